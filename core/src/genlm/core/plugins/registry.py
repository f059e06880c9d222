"""The installed plugins: found in metadata, imported on use, read once.

A plugin is one entry point of the group `genlm` in one distribution. An error in a plugin's
code becomes the status of that plugin.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pluggy

from genlm.core.errors import BrokenPluginError, described
from genlm.core.forking import renew_in_forks
from genlm.core.plugins import spec as hookspecs
from genlm.core.plugins.spec import (
    API_VERSION,
    PROJECT,
    BackendInfo,
    BackendSpec,
    Kind,
    Status,
)

__all__ = ["CORE", "PUBLISHED", "Registry", "find_plugins"]

CORE = "genlm-core"
"""The distribution whose own backends are always installed."""

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
"""Kind and distribution of each backend of this project, for messages when it is absent."""

_SPEC_FIELDS = {field.name for field in fields(BackendSpec)} - {"install"}

_log = logging.getLogger("genlm.plugins")

_Specs = tuple[BackendSpec, ...] | BrokenPluginError


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of one distribution, whose normalised name and version it has."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def id(self) -> str:
        """`"distribution:name"`, unique."""
        return f"{self.distribution}:{self.name}"

    @property
    def ids(self) -> set[str]:
        """What environment variables may call it."""
        return {self.name, self.distribution, self.id}

    def why_disabled(self) -> str | None:
        """Say which environment variable disables it, None if it is enabled.

        `GENLM_PLUGINS` lists the plugins allowed beside the core's own,
        `GENLM_DISABLE_PLUGINS` those that are not: names of backends, of distributions, or
        `distribution:name`, separated by commas.
        """
        names = self.ids
        if names & _listed("GENLM_DISABLE_PLUGINS"):
            return "GENLM_DISABLE_PLUGINS lists it"
        allowed = _listed("GENLM_PLUGINS")
        if allowed and self.distribution != CORE and not names & allowed:
            return "GENLM_PLUGINS does not list it"
        return None


def _listed(variable: str) -> set[str]:
    return {each for entry in _entries(variable) for each in _spellings(entry)}


def _entries(variable: str) -> list[str]:
    return [each for each in map(str.strip, os.environ.get(variable, "").split(",")) if each]


def _spellings(entry: str) -> set[str]:
    distribution, colon, name = entry.rpartition(":")
    return {f"{_normalized(distribution)}:{name}"} if colon else {entry, _normalized(entry)}


def _normalized(distribution: str) -> str:
    """Spell a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def find_plugins() -> tuple[Plugin, ...]:
    """List the installed plugins, by name and distribution, without importing any.

    Of a distribution that is on `sys.path` several times the first one counts, which is the
    one that `import` finds. Metadata that cannot be read is logged and left out.
    """
    found: dict[tuple[str, str], Plugin] = {}
    for candidate in importlib.metadata.distributions():
        try:
            # Parsing metadata is slow (torch's is long), so look at the text first.
            if f"[{PROJECT}]" not in (candidate.read_text("entry_points.txt") or ""):
                continue
            first = importlib.metadata.distribution(candidate.metadata["Name"])
            entry_points = first.entry_points.select(group=PROJECT)
            name, version = _normalized(first.metadata["Name"]), first.metadata["Version"]
            version.strip()  # raises where there is none
        except Exception as error:  # noqa: BLE001 - another distribution's broken metadata
            _log.warning("cannot read the metadata of %s: %r", candidate, error)
            continue
        for entry_point in entry_points:
            plugin = Plugin(entry_point.name, name, version, entry_point)
            found.setdefault((plugin.name, name), plugin)
    return tuple(found[key] for key in sorted(found))


class Registry:
    """The plugins of one scan, all in one pluggy manager.

    Safe to use from several threads. No lock is held while a plugin's code runs, which may
    itself wait for an import in another thread; two threads may read the same plugin at once
    and keep the same answer.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._plugins = tuple(plugins)
        self._specs: dict[str, _Specs] = {}
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._lock = threading.Lock()
        renew_in_forks(self)

    def not_installed(self) -> list[str]:
        """Return the entries of `GENLM_PLUGINS` that name no installed plugin."""
        ids = {each for plugin in self._plugins for each in plugin.ids}
        return [each for each in _entries("GENLM_PLUGINS") if not _spellings(each) & ids]

    @property
    def ids(self) -> list[str]:
        """Names of the plugins and of their distributions, as variables list them."""
        return sorted({each for plugin in self._plugins for each in plugin.ids})

    def everything(self) -> list[BackendInfo]:
        """Describe each backend of each plugin, importing all that are enabled."""
        infos = [info for plugin in self._plugins for info in self._backends(plugin)]
        return _with_ambiguity([*infos, *self._undeclared()])

    def named(self, name: str) -> list[BackendInfo]:
        """Describe the backends of a name or `"distribution:name"`; import only those."""
        distribution, colon, name = name.rpartition(":")
        ids = {name, f"{_normalized(distribution)}:{name}"} - ({name} if colon else set())
        plugins = [plugin for plugin in self._plugins if {plugin.name, plugin.id} & ids]
        return _with_ambiguity([info for each in plugins for info in self._backends(each)])

    def cause(self, provider: str) -> BaseException | None:
        """Return what a broken plugin raised, None if it raised nothing."""
        outcome = self._specs.get(provider)
        return outcome.__cause__ if isinstance(outcome, BrokenPluginError) else None

    def _backends(self, plugin: Plugin) -> list[BackendInfo]:
        """Describe what a plugin offers under its entry point's name."""
        disabled = plugin.why_disabled()
        if disabled is not None:
            return [_unread(plugin, "disabled", disabled)]
        specs = self._read(plugin)
        if isinstance(specs, BrokenPluginError):
            return [_unread(plugin, "broken", specs.reason)]
        return [_info(plugin, spec) for spec in specs if spec.name == plugin.name]

    def _undeclared(self) -> Iterator[BackendInfo]:
        """Describe specs that no entry point of their distribution names."""
        declared = {plugin.id for plugin in self._plugins}
        for plugin in self._plugins:
            specs = () if plugin.why_disabled() else self._read(plugin)
            for spec in () if isinstance(specs, BrokenPluginError) else specs:
                provider = f"{plugin.distribution}:{spec.name}"
                if provider not in declared:
                    declared.add(provider)
                    reason = f"{plugin.id} yields it, but no entry point is named {spec.name!r}"
                    info = _unread(plugin, "broken", reason)
                    yield replace(info, name=spec.name, kind=spec.kind, provider=provider)

    def _read(self, plugin: Plugin) -> _Specs:
        """Import a plugin's module and collect every spec that its hook yields."""
        if plugin.id not in self._specs:
            outcome: _Specs
            try:
                outcome = _checked_specs(plugin.name, self._yielded(plugin))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - becomes its status
                own = isinstance(error, (pluggy.PluginValidationError, _SpecError))
                reason = str(error).strip() if own else described(error)
                outcome = BrokenPluginError(plugin.id, reason)
                outcome.__cause__ = None if isinstance(error, _SpecError) else error
            self._specs.setdefault(plugin.id, outcome)
        return self._specs[plugin.id]

    def _yielded(self, plugin: Plugin) -> list[Any]:
        """Call the hook of one plugin alone."""
        module = plugin.entry_point.load()
        with self._lock:
            manager = self._manager
            if not manager.is_registered(module):  # several entry points may share a module
                try:
                    manager.register(module, plugin.id)
                    manager.check_pending()
                except pluggy.PluginValidationError:
                    if manager.is_registered(module):  # else the check would fail for others
                        manager.unregister(module)
                    raise
            others = [each for each in manager.get_plugins() if each is not module]
            hook = manager.subset_hook_caller("genlm_backends", others)
        yielded: list[Any] = []
        for answer in hook():
            if not isinstance(answer, Iterable):
                found = type(answer).__name__
                raise TypeError(f"genlm_backends returned {found}; yield BackendSpec objects")
            yielded += answer
        return yielded

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


class _SpecError(Exception):
    """Specs that contradict each other or the entry point."""


def _checked_specs(name: str, yielded: list[Any]) -> tuple[BackendSpec, ...]:
    for spec in yielded:
        if not isinstance(spec, BackendSpec):
            found = type(spec).__name__
            raise TypeError(f"genlm_backends yielded {found}, expected BackendSpec")
    if not yielded:
        raise _SpecError("it yields no BackendSpec; implement genlm_backends with @hookimpl")
    for (kind, each), count in Counter((spec.kind, spec.name) for spec in yielded).items():
        if count > 1:
            raise _SpecError(f"it yields the {kind} {each!r} twice")
    names = sorted({spec.name for spec in yielded})
    if name not in names:
        shown = ", ".join(map(repr, names))
        raise _SpecError(f"its entry point is named {name!r} but it yields {shown}")
    return tuple(yielded)


def _info(plugin: Plugin, spec: BackendSpec) -> BackendInfo:
    status: Status = "ok"
    reason = install = ""
    missing: tuple[str, ...] = ()
    if spec.api != API_VERSION:
        status = "incompatible"
        reason = f"plugin interface {spec.api}, this genlm-core implements {API_VERSION}"
    elif missing := tuple(module for module in spec.requires if not _is_installed(module)):
        status, install = "missing", spec.install or f"pip install {plugin.distribution}"
        reason = f"needs {', '.join(missing)}"
    declared = {name: getattr(spec, name) for name in _SPEC_FIELDS}
    info = _unread(plugin, status, reason)
    return replace(info, missing=missing, install=install, **declared)


def _unread(plugin: Plugin, status: Status, reason: str) -> BackendInfo:
    kind, distribution = PUBLISHED.get(plugin.name, (None, ""))
    return BackendInfo(
        name=plugin.name,
        kind=kind if distribution == plugin.distribution else None,
        status=status,
        reason=reason,
        provider=plugin.id,
        distribution=plugin.distribution,
        version=plugin.version,
    )


def _with_ambiguity(infos: list[BackendInfo]) -> list[BackendInfo]:
    """Mark names with several providers; a plugin that cannot be loaded does not count."""
    usable = {"ok", "missing"}
    providers = Counter((info.kind, info.name) for info in infos if info.status in usable)
    return [
        replace(info, status="ambiguous", reason=f"ask for {info.provider}")
        if info.status in usable and providers[info.kind, info.name] > 1
        else info
        for info in infos
    ]


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
