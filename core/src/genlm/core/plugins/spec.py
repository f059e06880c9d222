"""`BackendSpec`, which plugins yield, and `BackendInfo`, which describes what is installed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import pluggy

from genlm.core.errors import (
    BrokenPluginError,
    MissingRequirementError,
    PluginApiError,
    PluginError,
)

__all__ = [
    "API_VERSION",
    "PROJECT",
    "BackendInfo",
    "BackendSpec",
    "Kind",
    "Status",
    "genlm_backends",
    "hookimpl",
]

PROJECT = "genlm"
"""pluggy's project name and the group of the entry points."""

API_VERSION = 1
"""Version of the plugin interface that this core implements."""

Kind = Literal["engine", "trie"]

Status = Literal["ok", "missing", "ambiguous", "incompatible", "broken", "disabled"]

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of `genlm_backends`."""


@pluggy.HookspecMarker(PROJECT)
def genlm_backends() -> Iterable[BackendSpec]:
    """Yield a `BackendSpec` for each backend of the module; a hook that plugins implement.

    The module that an entry point names is imported whenever backends are listed, so it imports
    nothing heavy: the engine's own module is `BackendSpec.target`. Each name that is yielded
    needs an entry point of that name.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend: its name, what it is, where it is and what it needs.

    Attributes:
        name: Name of the backend and of its entry point.
        kind: `"engine"` or `"trie"`.
        target: `"package.module:attribute"`, imported when the backend is used. For an engine
            a callable `target(model, **options) -> Engine`, called on the engine's thread; for
            a trie a class `target(vocabulary)`.
        summary: One line for people.
        capabilities: `Capability` values that the backend declares.
        requires: Top-level modules it needs, looked up without importing them.
        install: Command that installs them; by default `pip install` of the distribution.
        api: Version of the plugin interface that it was written for.
        conformance: `"package.module:attribute"` of its conformance target.

    Raises:
        TypeError: `capabilities` or `requires` is not a tuple of strings.
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
        optional = {} if self.conformance is None else {"conformance": self.conformance}
        references: dict[str, object] = {"target": self.target, **optional}
        for field, reference in references.items():
            if not isinstance(reference, str) or not all(reference.partition(":")):
                raise ValueError(f"{field}={reference!r}: expected 'package.module:attribute'")
        for field in ("capabilities", "requires"):
            value: object = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
                raise TypeError(f"{field}={value!r}: expected a tuple of strings")
        for module in self.requires:
            if not module.isidentifier():
                raise ValueError(f"requires={module!r}: expected a top-level module's name")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """One installed backend and whether it can be used; other attributes as in `BackendSpec`.

    Attributes:
        kind: None where a plugin that could not or must not be imported left it unknown.
        status: `"ok"`; `"missing"`, a required module is not installed; `"ambiguous"`, another
            distribution provides the same name, ask for `provider`; `"incompatible"`, written
            for another plugin interface; `"broken"`; `"disabled"`, by an environment variable.
        reason: Why the status is not `"ok"`, in words.
        provider: `"distribution:name"`, accepted wherever a name is.
        distribution: Normalised name of the distribution.
        version: Version of the distribution.
        missing: Modules in `requires` that are not installed.
    """

    name: str
    kind: Kind | None
    status: Status
    reason: str = ""
    provider: str
    distribution: str
    version: str
    api: int | None = None
    summary: str = ""
    capabilities: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    install: str = ""
    target: str = ""
    conformance: str | None = None

    def __repr__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        kind = self.kind or "backend"
        return f"<{kind} {self.provider} {self.version}: {self.status}{reason}>"

    def error(self) -> PluginError | None:
        """Return the error that using this backend raises; None if it works or is disabled."""
        if self.status == "missing":
            return MissingRequirementError(self.provider, self.missing, self.install)
        if self.status == "incompatible":
            return PluginApiError(self.provider, self.api or 0, API_VERSION)
        if self.status == "broken":
            return BrokenPluginError(self.provider, self.reason)
        return None
