"""The installed plugins, discovered in package metadata and imported on first use.

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

from genlm.core.base.errors import BrokenPluginError, describe_error
from genlm.core.plugins import spec as hookspecs
from genlm.core.plugins.spec import API_VERSION, PROJECT, BackendInfo, BackendSpec, Kind, Status

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
"""Kind and distribution of this project's backends, for messages about missing backends."""

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
            not colon or _normalized_name(distribution) == self.distribution
        )

    def is_listed(self, entries: Iterable[str]) -> bool:
        """Whether an entry of an environment variable selects this plugin."""
        return any(
            self.provides(entry) or _normalized_name(entry) == self.distribution
            for entry in entries
        )

    def why_disabled(self) -> str | None:
        """Return the environment variable that disables the plugin, None if it is enabled.

        `GENLM_PLUGINS` lists the allowed plugins in addition to the core's,
        `GENLM_DISABLE_PLUGINS` the disabled ones: names of backends or distributions, or
        `distribution:name`, separated by commas.
        """
        if self.is_listed(variable_entries("GENLM_DISABLE_PLUGINS")):
            return "GENLM_DISABLE_PLUGINS lists it"
        allowed = variable_entries("GENLM_PLUGINS")
        if allowed and self.distribution != CORE and not self.is_listed(allowed):
            return "GENLM_PLUGINS does not list it"
        return None


def variable_entries(variable: str) -> list[str]:
    """Return the comma-separated entries of an environment variable."""
    entries = map(str.strip, os.environ.get(variable, "").split(","))
    return [entry for entry in entries if entry]


def _normalized_name(distribution: str) -> str:
    """Return the normalised name of a distribution, as in package indexes."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def find_plugins() -> tuple[Plugin, ...]:
    """List the installed plugins, by name and distribution, without importing them.

    If a distribution is on `sys.path` several times, the first one is used, as by `import`.
    Unreadable metadata is logged and skipped.
    """
    plugins: dict[tuple[str, str], Plugin] = {}
    for candidate in importlib.metadata.distributions():
        try:
            # Parsing metadata is slow (torch's is long), so the raw text is searched first.
            if f"[{PROJECT}]" not in (candidate.read_text("entry_points.txt") or ""):
                continue
            first = importlib.metadata.distribution(candidate.metadata["Name"])
            entry_points = first.entry_points.select(group=PROJECT)
            name, version = _normalized_name(first.metadata["Name"]), first.metadata["Version"]
            version.strip()  # raises if it is missing
        except Exception as error:  # noqa: BLE001 - broken metadata of a distribution
            _log.warning("cannot read the metadata of %s: %r", candidate, error)
            continue
        for entry_point in entry_points:
            plugin = Plugin(entry_point.name, name, version, entry_point)
            plugins.setdefault((plugin.name, name), plugin)
    return tuple(plugins[key] for key in sorted(plugins))


class Registry:
    """The plugins of one scan.

    The registry may be used from several threads. Two threads may read the same plugin
    concurrently, with the same result.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(plugins)
        self._outcomes: dict[str, tuple[BackendSpec, ...] | BrokenPluginError] = {}

    def backends(self, name: str | None = None) -> list[BackendInfo]:
        """Return descriptions of the backends of a name or `"distribution:name"`, or of all.

        The enabled plugins that provide the name are imported.
        """
        infos: dict[tuple[Kind | None, str], BackendInfo] = {}
        for plugin in self.plugins:
            if name is None or plugin.provides(name):
                for info in self._infos(plugin):
                    if name is None or info.name == plugin.name:
                        infos.setdefault((info.kind, info.provider), info)
        usable = [info for info in infos.values() if info.status in {"ok", "missing"}]
        providers = Counter((info.kind, info.name) for info in usable)
        return [
            replace(info, status="ambiguous", reason=f"use the full name {info.provider}")
            if info in usable and providers[info.kind, info.name] > 1
            else info
            for info in sorted(infos.values(), key=lambda info: (info.name, info.provider))
        ]

    def cause(self, provider: str) -> BaseException | None:
        """Return the exception of a broken plugin, None if it raised none."""
        return getattr(self._outcomes.get(provider), "__cause__", None)

    def _infos(self, plugin: Plugin) -> Iterator[BackendInfo]:
        """Yield descriptions of a plugin's backend, and of specs that lack an entry point."""
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
            elif all(other.id != provider for other in self.plugins):
                module = plugin.entry_point.value
                reason = (
                    f"{plugin.id} yields it, but no entry point is named {spec.name!r}: add "
                    f'{spec.name} = "{module}" to [project.entry-points.genlm] in its '
                    f"pyproject.toml, and install it again"
                )
                identity = {"name": spec.name, "kind": spec.kind, "provider": provider}
                yield _info(plugin, "broken", reason, **identity)

    def _specs(self, plugin: Plugin) -> tuple[BackendSpec, ...] | BrokenPluginError:
        """Return the specs of a plugin, or its error; import the plugin on first use."""
        if plugin.id not in self._outcomes:
            outcome: tuple[BackendSpec, ...] | BrokenPluginError
            try:
                outcome = tuple(_load_specs(plugin))
                if problem := _conflict(plugin.name, outcome):
                    outcome = BrokenPluginError(plugin.id, problem)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - status of the plugin
                is_plain = isinstance(error, pluggy.PluginValidationError)
                reason = str(error).strip() if is_plain else describe_error(error)
                outcome = BrokenPluginError(plugin.id, reason)
                outcome.__cause__ = error
            self._outcomes.setdefault(plugin.id, outcome)
        return self._outcomes[plugin.id]


def _load_specs(plugin: Plugin) -> Iterator[BackendSpec]:
    """Import a plugin's module, call its hook in a separate manager, and yield the specs."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin.entry_point.load(), plugin.id)
    manager.check_pending()
    for specs in manager.hook.genlm_backends():
        if not isinstance(specs, Iterable):
            type_name = type(specs).__name__
            raise TypeError(f"genlm_backends returned {type_name}; yield BackendSpec objects")
        for spec in specs:
            if not isinstance(spec, BackendSpec):
                type_name = type(spec).__name__
                raise TypeError(f"genlm_backends yielded {type_name}, expected BackendSpec")
            yield spec


def _conflict(name: str, specs: tuple[BackendSpec, ...]) -> str:
    """Describe a conflict of specs with each other or with the entry point; `""` if none."""
    if not specs:
        return "it yields no BackendSpec; implement genlm_backends with @hookimpl"
    counts = Counter((spec.kind, spec.name) for spec in specs)
    [((kind, frequent_name), count)] = counts.most_common(1)
    if count > 1:
        return f"it yields the {kind} {frequent_name!r} twice"
    if name not in (names := sorted({spec.name for spec in specs})):
        listing = ", ".join(map(repr, names))
        return f"its entry point is named {name!r} but it yields {listing}"
    return ""


def _info_of_spec(plugin: Plugin, spec: BackendSpec) -> BackendInfo:
    attributes = {field.name: getattr(spec, field.name) for field in fields(spec)}
    install = attributes.pop("install") or f"pip install {plugin.distribution}"
    if spec.api != API_VERSION:
        reason = f"plugin interface {spec.api}, this genlm-core implements {API_VERSION}"
        return _info(plugin, "incompatible", reason, **attributes)
    missing = tuple(module for module in spec.requires if not _is_installed(module))
    if not missing:
        return _info(plugin, "ok", **attributes)
    reason = f"needs {', '.join(missing)}"
    return _info(plugin, "missing", reason, missing=missing, install=install, **attributes)


def _info(plugin: Plugin, status: Status, reason: str = "", **attributes: Any) -> BackendInfo:
    kind, distribution = PUBLISHED.get(plugin.name, (None, ""))
    defaults = {
        "name": plugin.name,
        "kind": kind if distribution == plugin.distribution else None,
        "provider": plugin.id,
        "distribution": plugin.distribution,
        "version": plugin.version,
    }
    return BackendInfo(status=status, reason=reason, **(defaults | attributes))


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
