"""`BackendSpec`: how a plugin describes a backend without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
