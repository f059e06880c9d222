"""Reads a plugin's specs and imports a backend's target.

The only place that runs a plugin's code. Whatever goes wrong there becomes an
error that names the plugin.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

import pluggy

from genlm.core.errors import BrokenPluginError, GenlmError
from genlm.core.plugins import hookspecs
from genlm.core.plugins.discovery import Plugin
from genlm.core.plugins.spec import BackendSpec

__all__ = ["import_target", "install_command", "missing_modules", "read_specs"]


def read_specs(plugin: Plugin) -> tuple[BackendSpec, ...]:
    """Import a plugin's module and collect every spec that its hook yields.

    Raises:
        BrokenPluginError: The module cannot be imported, its hook is missing,
            misspelt or raises, or yields something else than distinct specs.
    """
    try:
        # A manager of its own, so that no plugin's hook runs together with another's.
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(plugin.entry_point.load(), plugin.id)
        manager.check_pending()
        specs = [spec for answer in manager.hook.genlm_backends() for spec in _listed(answer)]
    except pluggy.PluginValidationError as error:
        raise BrokenPluginError(plugin.id, str(error).strip()) from error
    except (Exception, SystemExit) as error:
        raise BrokenPluginError(plugin.id, _described(error)) from error
    _check_distinct(plugin, specs)
    return tuple(specs)


def _listed(answer: object) -> list[BackendSpec]:
    if not isinstance(answer, Iterable):
        raise TypeError(
            f"genlm_backends returned {type(answer).__name__}; yield BackendSpec objects"
        )
    specs = []
    for spec in answer:
        if not isinstance(spec, BackendSpec):
            raise TypeError(
                f"genlm_backends yielded {type(spec).__name__}, expected BackendSpec"
            )
        specs.append(spec)
    return specs


def _check_distinct(plugin: Plugin, specs: list[BackendSpec]) -> None:
    if not specs:
        reason = "it yields no BackendSpec; implement genlm_backends with @genlm.hookimpl"
        raise BrokenPluginError(plugin.id, reason)
    keys = [(spec.kind, spec.name) for spec in specs]
    for kind, name in keys:
        if keys.count((kind, name)) > 1:
            raise BrokenPluginError(plugin.id, f"it yields the {kind} {name!r} twice")
    if plugin.name not in {spec.name for spec in specs}:
        names = ", ".join(sorted({repr(spec.name) for spec in specs}))
        raise BrokenPluginError(
            plugin.id, f"its entry point is named {plugin.name!r} but it yields {names}"
        )


def import_target(plugin_id: str, target: str) -> Any:
    """Import what a spec points at.

    Returns:
        The engine callable or trie class.

    Raises:
        BrokenPluginError: It cannot be imported or is not callable. An error of
            genlm's own that is raised meanwhile passes unchanged.
    """
    try:
        found = pkgutil.resolve_name(target)
    except GenlmError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"importing {target!r} failed: {_described(error)}"
        raise BrokenPluginError(plugin_id, reason) from error
    if not callable(found):
        raise BrokenPluginError(plugin_id, f"{target!r} is not callable")
    return found


def missing_modules(spec: BackendSpec) -> tuple[str, ...]:
    """The required modules that are not installed; imports none of them."""
    return tuple(module for module in spec.requires if not _is_installed(module))


def install_command(spec: BackendSpec, distribution: str) -> str:
    """The command that installs what a backend requires."""
    return spec.install or f"pip install {distribution}"


def _is_installed(module: str) -> bool:
    if sys.modules.get(module) is not None:
        return True
    return importlib.util.find_spec(module) is not None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
