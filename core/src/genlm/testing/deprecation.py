"""Former names of public fields, which work until genlm 1.1."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["renamed", "warn_renamed"]

C = TypeVar("C", bound=type)


def warn_renamed(former: str, name: str, stacklevel: int = 3) -> None:
    """Warn the caller of the caller that a name is deprecated."""
    message = f"{former} is deprecated and works until 1.1; use {name}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def renamed(**names: str) -> Callable[[C], C]:
    """Accept former names, `former="name"`, as keyword arguments and attributes of a class."""

    def decorate(kind: C) -> C:
        construct = kind.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def with_former_names(self: Any, *arguments: Any, **fields: Any) -> None:
            for former in fields.keys() & names.keys():
                warn_renamed(f"{kind.__name__}({former}=)", f"{names[former]}=")
                fields[names[former]] = fields.pop(former)
            construct(self, *arguments, **fields)

        kind.__init__ = with_former_names  # type: ignore[misc]
        for former, name in names.items():
            setattr(kind, former, property(_reader(kind.__name__, former, name)))
        return kind

    return decorate


def _reader(owner: str, former: str, name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        warn_renamed(f"{owner}.{former}", name)
        return getattr(self, name)

    return read
