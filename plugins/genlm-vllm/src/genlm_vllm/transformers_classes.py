"""`keep_transformers_classes`: transformers' classes stay as they are while vLLM uses them.

Where vLLM has no implementation of a model, it runs transformers' own and decorates the class
of the decoder for `torch.compile`, for good: from then on the class can be neither built nor
called outside vLLM in this process, be it for another engine or to check an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["keep_transformers_classes"]

_State = tuple[tuple[type, ...], Mapping[str, Any]]


@contextmanager
def keep_transformers_classes(model_of: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Undo at the end what vLLM does to transformers' classes meanwhile.

    vLLM's own model keeps it: its decoder becomes an instance of a subclass that has what
    vLLM changed.

    Args:
        model_of: Finds vLLM's model after it was built.
    """
    from vllm.model_executor.models.transformers import base

    decorate = getattr(base, "support_torch_compile", None)
    if decorate is None:  # an older vLLM, which decorates its own class
        yield
        return
    before: dict[type, _State] = {}

    def remembering(**options: Any) -> Callable[[type], type]:
        def decorated(cls: type) -> type:
            before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
            result: type = decorate(**options)(cls)
            return result

        return decorated

    base.support_torch_compile = remembering
    replaced: dict[type, type] = {}
    try:
        yield
        replaced |= {cls: _restored(cls, *state) for cls, state in before.items()}
        for module in model_of().modules():
            if type(module) in replaced:
                module.__class__ = replaced[type(module)]
    finally:
        base.support_torch_compile = decorate
        for cls, state in before.items():
            if cls not in replaced:
                _restored(cls, *state)


def _restored(cls: type, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> type:
    """Put a class back as it was; return a subclass with what had been changed."""
    changed = {
        name: value
        for name, value in vars(cls).items()
        if name not in attributes or attributes[name] is not value
    }
    added = tuple(base for base in cls.__bases__ if base not in bases)
    cls.__bases__ = bases
    for name in changed:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    return type(cls.__name__, (cls, *added), {**changed, "__module__": cls.__module__})
