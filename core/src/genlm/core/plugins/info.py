"""`BackendInfo`: what is known of an installed backend without importing its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genlm.core.errors import (
    BrokenPluginError,
    MissingRequirementError,
    PluginApiError,
    PluginError,
)
from genlm.core.plugins.spec import API_VERSION, Kind

__all__ = ["BackendInfo", "Status"]

Status = Literal["ok", "missing", "ambiguous", "incompatible", "broken", "disabled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """One installed backend and whether it can be used.

    Attributes:
        name: What users ask for.
        kind: `"engine"` or `"trie"`; None where a plugin that could not or may
            not be imported left it unknown.
        status: `"ok"`; `"missing"`, a required module is not installed;
            `"ambiguous"`, another distribution provides the same name, ask for
            `provider`; `"incompatible"`, written for another plugin interface;
            `"broken"`; `"disabled"`, by an environment variable.
        reason: Why the status is not `"ok"`, in words.
        provider: `"distribution:name"`, accepted wherever a name is.
        distribution: Normalised name of the distribution.
        version: Its version.
        api: Version of the plugin interface it was written for, None if unknown.
        summary: One line for people.
        capabilities: What it can do beyond next-token rows.
        requires: Modules that it needs.
        missing: Those of them that are not installed.
        install: Command that installs what is missing.
        target: `"package.module:attribute"` of the engine or trie, `""` if unknown.
        conformance: `"package.module:attribute"` of its conformance target.
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
        """The error that using this backend raises, None if nothing speaks against it.

        Being disabled or ambiguous is no fault of the backend's and gives None.
        """
        if self.status == "missing":
            return MissingRequirementError(self.provider, self.missing, self.install)
        if self.status == "incompatible":
            return PluginApiError(self.provider, self.api or 0, API_VERSION)
        if self.status == "broken":
            return BrokenPluginError(self.provider, self.reason)
        return None
