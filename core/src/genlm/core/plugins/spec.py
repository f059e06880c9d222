"""`BackendSpec`, which plugins yield, and `BackendInfo`, which describes installed backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import pluggy

from genlm.core.base.errors import (
    BrokenPluginError,
    MissingRequirementError,
    PluginApiError,
    PluginError,
)

PROJECT = "genlm"
"""pluggy's project name and the group of the entry points."""

API_VERSION = 1
"""Version of the plugin interface that this core implements."""

TESTED = {"torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0")}
"""Tested versions of genlm-core; see `BackendSpec.tested`."""

Kind = Literal["engine", "trie"]

Status = Literal["ok", "missing", "ambiguous", "incompatible", "broken", "disabled"]

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of `genlm_backends`."""


@pluggy.HookspecMarker(PROJECT)
def genlm_backends() -> Iterable[BackendSpec]:
    """Yield a `BackendSpec` for each backend of the module; a hook that plugins implement.

    The module of an entry point is imported whenever backends are listed, so it must load
    quickly: the engine's module is `BackendSpec.target`. Every yielded name needs an entry
    point of that name.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Description of a backend by its plugin.

    Attributes:
        name: Name of the backend and of its entry point.
        kind: `"engine"` or `"trie"`.
        target: `"package.module:attribute"`, imported when the backend is used. For an engine
            a callable `target(model, **options) -> Engine`, called on the engine's thread; for
            a trie a class `target(vocabulary)`.
        summary: Summary in one line.
        capabilities: `Capability` values that the backend declares.
        requires: Required top-level modules, looked up without importing them.
        install: Command that installs them; by default `pip install` of the distribution.
        api: Version of the plugin interface for which the plugin was written.
        conformance: `"package.module:attribute"` of the conformance target.
        tested: Tested versions, oldest first, by distribution name. `genlm plugins` and
            `genlm env` print them next to the installed versions.

    Raises:
        TypeError: `capabilities` or `requires` is not a tuple of strings, or `tested` is not a
            mapping of names to such tuples.
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
    tested: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.api != API_VERSION:
            return  # rejected by the registry; its attributes may have other rules
        name: object = self.name
        if not isinstance(name, str) or not name or ":" in name:
            raise ValueError(f"name={name!r}: expected a name without ':'")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: expected one of {get_args(Kind)}")
        optional = {} if self.conformance is None else {"conformance": self.conformance}
        references: dict[str, object] = {"target": self.target, **optional}
        for option, reference in references.items():
            if not isinstance(reference, str) or not all(reference.partition(":")):
                raise ValueError(f"{option}={reference!r}: expected 'package.module:attribute'")
        for option in ("capabilities", "requires"):
            if not _are_strings(value := getattr(self, option)):
                raise TypeError(f"{option}={value!r}: expected a tuple of strings")
        tested: object = self.tested
        if not isinstance(tested, Mapping) or not all(map(_are_strings, tested.values())):
            raise TypeError(
                f"tested={tested!r}: expected tuples of versions by distribution, such as "
                f"{{'torch': ('2.13.0',)}}"
            )
        for module in self.requires:
            if not module.isidentifier():
                raise ValueError(f"requires={module!r}: expected a top-level module's name")


def _are_strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """An installed backend and its status; other attributes as in `BackendSpec`.

    Attributes:
        kind: `"engine"` or `"trie"`; None if the plugin could not or must not be imported.
        status: `"ok"`; `"missing"`, a required module is not installed; `"ambiguous"`, another
            distribution provides the same name, use `provider`; `"incompatible"`, written for
            another plugin interface; `"broken"`; `"disabled"`, by an environment variable.
        reason: Explanation of a status that is not `"ok"`.
        provider: Full name, `"distribution:name"`, accepted in place of a name.
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
    tested: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        kind = self.kind or "backend"
        return f"<{kind} {self.provider} {self.version}: {self.status}{reason}>"

    def error(self) -> PluginError | None:
        """Return the error of using this backend; None if it is usable or disabled."""
        if self.status == "missing":
            return MissingRequirementError(self.provider, self.missing, self.install)
        if self.status == "incompatible":
            return PluginApiError(self.provider, self.api or 0, API_VERSION)
        if self.status == "broken":
            return BrokenPluginError(self.provider, self.reason)
        return None
