"""Names of the methods of public classes that are divided into several modules."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType


def name_methods(public_class: type, parts: Iterable[type]) -> None:
    """Name the methods of base classes after the public class, for Python's error messages."""
    for part in parts:
        for name, member in vars(part).items():
            method = getattr(member, "__func__", member)  # of a static method
            if isinstance(method, FunctionType):
                method.__qualname__ = f"{public_class.__name__}.{name}"
