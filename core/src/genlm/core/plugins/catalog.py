"""What one scan found: every installed plugin, and the specs read so far.

A plugin is imported when its own name is asked for, or when all are listed.
Reading never raises because of a plugin; its fault becomes its status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from genlm.core.errors import BrokenPluginError
from genlm.core.plugins.discovery import Plugin, normalized, why_disabled
from genlm.core.plugins.info import BackendInfo, Status
from genlm.core.plugins.loading import install_command, missing_modules, read_specs
from genlm.core.plugins.spec import API_VERSION, BackendSpec
from genlm.core.plugins.well_known import WELL_KNOWN

__all__ = ["Catalog"]


class Catalog:
    """The plugins of one scan.

    Safe to use from several threads: no lock is held while a plugin's code runs
    (it may itself wait for an import that another thread does), so two threads
    may read the same plugin's specs at once and keep the same answer.

    Args:
        plugins: What `find_plugins` returned.
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._plugins = tuple(plugins)
        self._specs: dict[str, tuple[BackendSpec, ...] | BrokenPluginError] = {}

    def everything(self) -> list[BackendInfo]:
        """Describe each backend of each plugin, importing all that are enabled."""
        return self._described(self._plugins, with_undeclared=True)

    def named(self, name: str) -> list[BackendInfo]:
        """Describe the backends of one name, importing only plugins of that name.

        Args:
            name: A backend's name, or `"distribution:name"`.
        """
        distribution, colon, name = name.rpartition(":")
        plugins = [
            plugin
            for plugin in self._plugins
            if plugin.name == name
            and (not colon or plugin.distribution == normalized(distribution))
        ]
        return self._described(plugins, with_undeclared=False)

    def cause(self, provider: str) -> BaseException | None:
        """What a broken plugin raised, None if it raised nothing."""
        outcome = self._specs.get(provider)
        return outcome.__cause__ if isinstance(outcome, BrokenPluginError) else None

    def _described(
        self, plugins: Iterable[Plugin], *, with_undeclared: bool
    ) -> list[BackendInfo]:
        infos = [info for plugin in plugins for info in self._backends(plugin)]
        if with_undeclared:
            infos += self._undeclared()
        # A plugin that cannot be loaded at all leaves its name to the others.
        providers = Counter(
            (info.kind, info.name) for info in infos if info.status in {"ok", "missing"}
        )
        return [_with_ambiguity(info, providers[info.kind, info.name]) for info in infos]

    def _backends(self, plugin: Plugin) -> Iterator[BackendInfo]:
        """Describe what a plugin offers under its entry point's name."""
        disabled = why_disabled(plugin)
        if disabled is not None:
            yield _unread(plugin, "disabled", disabled)
            return
        specs = self._read(plugin)
        if isinstance(specs, BrokenPluginError):
            yield _unread(plugin, "broken", specs.reason)
            return
        for spec in specs:
            if spec.name == plugin.name:
                yield _read(plugin, spec)

    def _undeclared(self) -> Iterator[BackendInfo]:
        """Describe specs that no entry point of their distribution names."""
        declared = {(plugin.distribution, plugin.name) for plugin in self._plugins}
        for plugin in self._plugins:
            specs = () if why_disabled(plugin) else self._read(plugin)
            if isinstance(specs, BrokenPluginError):
                continue
            for spec in specs:
                key = (plugin.distribution, spec.name)
                if key not in declared:
                    declared.add(key)
                    reason = f"{plugin.id} yields it, but no entry point is named {spec.name!r}"
                    info = _unread(plugin, "broken", reason)
                    provider = f"{plugin.distribution}:{spec.name}"
                    yield replace(info, name=spec.name, kind=spec.kind, provider=provider)

    def _read(self, plugin: Plugin) -> tuple[BackendSpec, ...] | BrokenPluginError:
        if plugin.id not in self._specs:
            try:
                outcome: tuple[BackendSpec, ...] | BrokenPluginError = read_specs(plugin)
            except BrokenPluginError as error:
                outcome = error
            self._specs.setdefault(plugin.id, outcome)
        return self._specs[plugin.id]


def _read(plugin: Plugin, spec: BackendSpec) -> BackendInfo:
    status: Status = "ok"
    reason = install = ""
    missing: tuple[str, ...] = ()
    if spec.api != API_VERSION:
        status = "incompatible"
        reason = f"plugin interface {spec.api}, this genlm-core speaks {API_VERSION}"
    elif missing := missing_modules(spec):
        status, install = "missing", install_command(spec, plugin.distribution)
        reason = f"needs {', '.join(missing)}"
    return BackendInfo(
        name=spec.name,
        kind=spec.kind,
        status=status,
        reason=reason,
        provider=plugin.id,
        distribution=plugin.distribution,
        version=plugin.version,
        api=spec.api,
        summary=spec.summary,
        capabilities=spec.capabilities,
        requires=spec.requires,
        missing=missing,
        install=install,
        target=spec.target,
        conformance=spec.conformance,
    )


def _unread(plugin: Plugin, status: Status, reason: str) -> BackendInfo:
    kind, distribution = WELL_KNOWN.get(plugin.name, (None, ""))
    return BackendInfo(
        name=plugin.name,
        kind=kind if distribution == plugin.distribution else None,
        status=status,
        reason=reason,
        provider=plugin.id,
        distribution=plugin.distribution,
        version=plugin.version,
    )


def _with_ambiguity(info: BackendInfo, providers: int) -> BackendInfo:
    if providers < 2 or info.status not in {"ok", "missing"}:
        return info
    return replace(info, status="ambiguous", reason=f"ask for {info.provider}")
