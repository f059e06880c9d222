"""A second model over the same weights, so that the caller's model may run at any time.

A step of the engine changes attention functions, adapters and forward methods of the model,
and some models keep intermediate results in their modules. All of that is state of module
objects and configs. The engine therefore runs copies of the module objects and configs with
the same parameters: weights are not copied, and weights changed in place change in both.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import MethodType, TracebackType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from genlm_hf.forward import accepted, evaluation_mode
from genlm_hf.probe import first_pass
from genlm_hf.served_model import context_window, input_device

__all__ = ["share_weights"]

_logger = logging.getLogger("genlm_hf")


def share_weights(model: Any) -> Any:
    """Return a model of copied modules and configs over the weights of `model`.

    Parameters, buffers and dictionaries of hooks are the same objects. Later changes of
    adapters, attention functions or training mode affect one of the models only.

    Args:
        model: A transformers model. It is run once, in evaluation mode, because some
            models change their weights in the first pass.

    Returns:
        The second model; `model` itself, with a warning, if the two cannot be separated:
        its modules are called through references that cannot be followed, such as closures,
        or it changes its weights when it leaves training mode.

    Raises:
        ModelLoadError: The model does not run on token ids alone.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    before, training = _versions(model), model.training
    _run(model)
    if training and _versions(model) != before:
        return _in_place(model, "it changes its weights when it leaves training mode")
    second = _Copies(model).model
    with _CalledModules(model) as called:
        _run(second)
    if called.names:
        return _in_place(model, f"other code holds its module {called.names[0]}")
    return second


def _in_place(model: Any, why: str) -> Any:
    _logger.warning(
        "%s is served in place, because %s; do not run it elsewhere while the engine steps",
        type(model).__name__,
        why,
    )
    return model


def _run(model: Any) -> None:
    count = min(2, context_window(model.config) or 2)
    token_ids = torch.zeros((1, count), dtype=torch.long, device=input_device(model))
    inputs = {"input_ids": token_ids, "use_cache": False, "return_dict": True}
    with first_pass(count), torch.inference_mode(), evaluation_mode(model):
        model(**accepted(model, inputs))


def _versions(model: torch.nn.Module) -> list[int]:
    """Return how often each parameter was changed in place, by torch's count."""
    return [p._version for p in model.parameters() if not p.is_inference()]  # noqa: SLF001


class _Copies:
    """Copies of modules and configs, and of attributes that refer to them.

    Attributes:
        model: The copy of the model, in evaluation mode.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {module: object.__new__(type(module)) for module in model.modules()}
        self._configs: dict[int, Any] = {}
        for module, second in self._modules.items():
            attributes = {name: self._copy(value) for name, value in vars(module).items()}
            for name in ("_modules", "_parameters", "_buffers"):
                attributes[name] = type(attributes[name])(attributes[name])
            # The result of Module.compile runs the first model.
            attributes.pop("_compiled_call_impl", None)
            vars(second).update(attributes)
            second.training = False
        self.model = self._modules[model]

    def _copy(self, value: Any) -> Any:
        """Return a copy, or the object itself if it does not refer to a module or config."""
        from transformers import PreTrainedConfig

        if isinstance(value, torch.nn.Module):
            return self._modules.get(value, value)
        if isinstance(value, PreTrainedConfig):
            return copy.deepcopy(value, self._configs)
        if type(value) not in _COMPOUNDS:
            return value
        take_apart, rebuild = _COMPOUNDS[type(value)]
        parts = take_apart(value)
        copies = [self._copy(part) for part in parts]
        same = all(new is old for new, old in zip(copies, parts, strict=True))
        return value if same else rebuild(value, copies)


def _partial(_: partial[Any], parts: list[Any]) -> partial[Any]:
    function, args, keywords, attributes = parts
    new = partial(function, *args, **keywords)
    vars(new).update(attributes)
    return new


# Types that may refer to modules: how to take them apart and to rebuild them. accelerate and
# others replace the forward methods of modules by methods and partials.
_COMPOUNDS: dict[type, tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], Any]]] = {
    MethodType: (lambda m: [m.__self__], lambda m, parts: MethodType(m.__func__, *parts)),
    partial: (lambda p: [p.func, p.args, p.keywords, vars(p)], _partial),
    list: (list, lambda _, parts: parts),
    tuple: (list, lambda _, parts: tuple(parts)),
    dict: (lambda d: list(d.values()), lambda d, parts: dict(zip(d, parts, strict=True))),
    OrderedDict: (
        lambda d: list(d.values()),
        lambda d, parts: OrderedDict(zip(d, parts, strict=True)),
    ),
}


class _CalledModules:
    """Records which modules of a model this thread calls.

    Attributes:
        names: Names of their classes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = set(model.modules())
        self._thread = threading.get_ident()
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self._handle = register_module_forward_pre_hook(self._record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.remove()

    def _record(self, module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread and module in self._modules:
            self.names.append(type(module).__name__)
