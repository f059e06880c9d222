"""The installed plugins, which are found in metadata and imported on first use.

A plugin is one entry point of the group `genlm` in one distribution. An error in a plugin's
code determines the status of that plugin.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pluggy

from genlm.core.base.errors import BrokenPluginError, described
from genlm.core.plugins import spec as hookspecs
from genlm.core.plugins.spec import API_VERSION, PROJECT, BackendInfo, BackendSpec, Kind, Status

__all__ = ["CORE", "PUBLISHED", "Registry", "find_plugins", "listed"]

CORE = "genlm-core"
"""The distribution of the core, whose backends are always installed."""

PUBLISHED: dict[str, tuple[Kind, str]] = {
    "hf": ("engine", "genlm-hf"),
    "vllm": ("engine", "genlm-vllm"),
    "sgl": ("engine", "genlm-sgl"),
    "mlx": ("engine", "genlm-mlx"),
    "ray": ("engine", "genlm-ray"),
    "llamacpp": ("engine", "genlm-llamacpp"),
    "cuda": ("trie", "genlm-trie-cuda"),
    "parallel": ("trie", "genlm-trie-cuda"),
}
"""Kind and distribution of the backends of this project, for messages about missing ones."""

_log = logging.getLogger("genlm.plugins")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point, with the normalised name and the version of its distribution."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def id(self) -> str:
        """Unique name, `"distribution:name"`."""
        return f"{self.distribution}:{self.name}"

    def provides(self, name: str) -> bool:
        """Whether a name, or `"distribution:name"`, selects this plugin's backend."""
        distribution, colon, name = name.rpartition(":")
        return name == self.name and (
            not colon or _normalized(distribution) == self.distribution
        )

    def is_listed(self, entries: Iterable[str]) -> bool:
        """Whether an entry of an environment variable selects this plugin."""
        return any(self.provides(e) or _normalized(e) == self.distribution for e in entries)

    def why_disabled(self) -> str | None:
        """Return the environment variable that disables the plugin, None if it is enabled.

        `GENLM_PLUGINS` lists the allowed plugins in addition to the core's,
        `GENLM_DISABLE_PLUGINS` the disabled ones: names of backends or distributions, or
        `distribution:name`, separated by commas.
        """
        if self.is_listed(listed("GENLM_DISABLE_PLUGINS")):
            return "GENLM_DISABLE_PLUGINS lists it"
        allowed = listed("GENLM_PLUGINS")
        if allowed and self.distribution != CORE and not self.is_listed(allowed):
            return "GENLM_PLUGINS does not list it"
        return None


def listed(variable: str) -> list[str]:
    """Return the entries of an environment variable."""
    return [each for each in map(str.strip, os.environ.get(variable, "").split(",")) if each]


def _normalized(distribution: str) -> str:
    """Return the normalised name of a distribution, as in package indexes."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def find_plugins() -> tuple[Plugin, ...]:
    """List the installed plugins, by name and distribution, without importing them.

    If a distribution is on `sys.path` several times, the first one is used, as by `import`.
    Unreadable metadata is logged and skipped.
    """
    found: dict[tuple[str, str], Plugin] = {}
    for candidate in importlib.metadata.distributions():
        try:
            # Parsing metadata is slow (torch's is long), so the text is searched first.
            if f"[{PROJECT}]" not in (candidate.read_text("entry_points.txt") or ""):
                continue
            first = importlib.metadata.distribution(candidate.metadata["Name"])
            entry_points = first.entry_points.select(group=PROJECT)
            name, version = _normalized(first.metadata["Name"]), first.metadata["Version"]
            version.strip()  # raises if it is missing
        except Exception as error:  # noqa: BLE001 - broken metadata of a distribution
            _log.warning("cannot read the metadata of %s: %r", candidate, error)
            continue
        for entry_point in entry_points:
            plugin = Plugin(entry_point.name, name, version, entry_point)
            found.setdefault((plugin.name, name), plugin)
    return tuple(found[key] for key in sorted(found))


class Registry:
    """The plugins of one scan.

    The registry may be used from several threads, which may read the same plugin concurrently,
    with the same result.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(plugins)
        self._read: dict[str, tuple[BackendSpec, ...] | BrokenPluginError] = {}

    def backends(self, name: str | None = None) -> list[BackendInfo]:
        """Return descriptions of the backends of a name or `"distribution:name"`, or of all.

        The enabled plugins that provide the name are imported.
        """
        infos: dict[tuple[Kind | None, str], BackendInfo] = {}
        for plugin in self.plugins:
            if name is None or plugin.provides(name):
                for info in self._described(plugin):
                    if name is None or info.name == plugin.name:
                        infos.setdefault((info.kind, info.provider), info)
        usable = [info for info in infos.values() if info.status in {"ok", "missing"}]
        providers = Counter((info.kind, info.name) for info in usable)
        return [
            replace(info, status="ambiguous", reason=f"ask for {info.provider}")
            if info in usable and providers[info.kind, info.name] > 1
            else info
            for info in sorted(infos.values(), key=lambda each: (each.name, each.provider))
        ]

    def cause(self, provider: str) -> BaseException | None:
        """Return the exception of a broken plugin, None if it raised none."""
        return getattr(self._read.get(provider), "__cause__", None)

    def _described(self, plugin: Plugin) -> Iterator[BackendInfo]:
        """Return descriptions of a plugin's backends of its name and without entry points."""
        if disabled := plugin.why_disabled():
            yield _info(plugin, "disabled", disabled)
            return
        specs = self._specs(plugin)
        if isinstance(specs, BrokenPluginError):
            yield _info(plugin, "broken", specs.reason)
            return
        for spec in specs:
            provider = f"{plugin.distribution}:{spec.name}"
            if spec.name == plugin.name:
                yield _info_of_spec(plugin, spec)
            elif all(each.id != provider for each in self.plugins):
                reason = f"{plugin.id} yields it, but no entry point is named {spec.name!r}"
                identity = {"name": spec.name, "kind": spec.kind, "provider": provider}
                yield _info(plugin, "broken", reason, **identity)

    def _specs(self, plugin: Plugin) -> tuple[BackendSpec, ...] | BrokenPluginError:
        """Import a plugin's module and collect the specs that its hook yields."""
        if plugin.id not in self._read:
            outcome: tuple[BackendSpec, ...] | BrokenPluginError
            try:
                outcome = tuple(_yielded(plugin))
                if problem := _contradiction(plugin.name, outcome):
                    outcome = BrokenPluginError(plugin.id, problem)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - status of the plugin
                is_plain = isinstance(error, pluggy.PluginValidationError)
                reason = str(error).strip() if is_plain else described(error)
                outcome = BrokenPluginError(plugin.id, reason)
                outcome.__cause__ = error
            self._read.setdefault(plugin.id, outcome)
        return self._read[plugin.id]


def _yielded(plugin: Plugin) -> Iterator[BackendSpec]:
    """Import a plugin's module and call its hook, alone in a manager of pluggy."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin.entry_point.load(), plugin.id)
    manager.check_pending()
    for answer in manager.hook.genlm_backends():
        if not isinstance(answer, Iterable):
            found = type(answer).__name__
            raise TypeError(f"genlm_backends returned {found}; yield BackendSpec objects")
        for spec in answer:
            if not isinstance(spec, BackendSpec):
                found = type(spec).__name__
                raise TypeError(f"genlm_backends yielded {found}, expected BackendSpec")
            yield spec


def _contradiction(name: str, specs: tuple[BackendSpec, ...]) -> str:
    """Describe a conflict of specs with each other or with the entry point; `""` if none."""
    if not specs:
        return "it yields no BackendSpec; implement genlm_backends with @hookimpl"
    [((kind, most), count)] = Counter((spec.kind, spec.name) for spec in specs).most_common(1)
    if count > 1:
        return f"it yields the {kind} {most!r} twice"
    if name not in (names := sorted({spec.name for spec in specs})):
        shown = ", ".join(map(repr, names))
        return f"its entry point is named {name!r} but it yields {shown}"
    return ""


def _info_of_spec(plugin: Plugin, spec: BackendSpec) -> BackendInfo:
    known = {field.name: getattr(spec, field.name) for field in fields(spec)}
    install = known.pop("install") or f"pip install {plugin.distribution}"
    if spec.api != API_VERSION:
        reason = f"plugin interface {spec.api}, this genlm-core implements {API_VERSION}"
        return _info(plugin, "incompatible", reason, **known)
    missing = tuple(module for module in spec.requires if not _is_installed(module))
    if not missing:
        return _info(plugin, "ok", **known)
    reason = f"needs {', '.join(missing)}"
    return _info(plugin, "missing", reason, missing=missing, install=install, **known)


def _info(plugin: Plugin, status: Status, reason: str = "", **known: Any) -> BackendInfo:
    kind, distribution = PUBLISHED.get(plugin.name, (None, ""))
    unread = {
        "name": plugin.name,
        "kind": kind if distribution == plugin.distribution else None,
        "provider": plugin.id,
        "distribution": plugin.distribution,
        "version": plugin.version,
    }
    return BackendInfo(status=status, reason=reason, **(unread | known))


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
