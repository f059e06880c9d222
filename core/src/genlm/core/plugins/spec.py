"""`BackendSpec`: how a plugin describes a backend without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["API_VERSION", "BackendSpec", "Kind"]

API_VERSION = 1
"""Version of the plugin interface that this core speaks."""

Kind = Literal["engine", "trie"]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend on offer: what it is, where it lives and what it needs.

    Attributes:
        name: What users ask for, the entry point's name as well.
        kind: `"engine"` or `"trie"`.
        target: `"package.module:attribute"`, imported when the backend is used.
            For an engine a callable `target(model, **options) -> Engine`, called on
            the engine's thread; for a trie a class `target(vocabulary)`.
        summary: One line for people.
        capabilities: `Capability` values that the backend declares.
        requires: Top-level modules it needs, looked up without importing them.
        install: Command that installs what is missing; derived from the
            distribution's name when empty.
        api: Version of the plugin interface that it was written for.
        conformance: `"package.module:attribute"` of its conformance target.

    Raises:
        TypeError: A list field is a bare string or holds something else.
        ValueError: The kind, a reference or a required module is malformed.
    """

    name: str
    kind: Kind
    target: str
    summary: str = ""
    capabilities: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    install: str = ""
    api: int = API_VERSION
    conformance: str | None = None

    def __post_init__(self) -> None:
        if self.api != API_VERSION:
            return  # another interface has rules of its own; the registry refuses it
        name: object = self.name
        if not isinstance(name, str) or not name or ":" in name:
            raise ValueError(f"name={name!r}: expected a name without ':'")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: expected one of {get_args(Kind)}")
        _check_reference("target", self.target)
        if self.conformance is not None:
            _check_reference("conformance", self.conformance)
        for field in ("capabilities", "requires"):
            value: object = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
                raise TypeError(f"{field}={value!r}: expected a tuple of strings")
        for module in self.requires:
            if not module.isidentifier():
                raise ValueError(f"requires={module!r}: expected a top-level module's name")


def _check_reference(field: str, value: object) -> None:
    if not isinstance(value, str) or not all(value.partition(":")):
        raise ValueError(f"{field}={value!r}: expected 'package.module:attribute'")
