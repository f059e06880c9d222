"""Resolution of backend names, and the public functions that find and import backends.

Order of precedence: the argument, the innermost `use_backend` block, the environment variable
`GENLM_BACKEND` or `GENLM_TRIE`, the only usable installed backend. The core's backends are
considered only if no other plugin of the kind is installed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, get_args

from genlm.core.base.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    GenlmError,
    UnknownBackendError,
    describe_error,
)
from genlm.core.plugins.registry import (
    CORE,
    PUBLISHED,
    Registry,
    find_plugins,
    variable_entries,
)
from genlm.core.plugins.spec import BackendInfo, Kind

if TYPE_CHECKING:
    from genlm.core.engine.engine import Engine
    from genlm.core.trie.trie import TokenCharacterTrie

_SELECTED_NAMES: ContextVar[Mapping[Kind, str]] = ContextVar(
    "genlm_backends", default=MappingProxyType({})
)
_VARIABLES: dict[Kind, str] = {"engine": "GENLM_BACKEND", "trie": "GENLM_TRIE"}

_log = logging.getLogger("genlm.plugins")


@functools.cache
def _registry() -> Registry:
    return Registry(find_plugins())


def refresh() -> None:
    """Scan the installed plugins again at the next call that needs them.

    This is needed after an installation in the running process. Imported modules are not
    reloaded, and only a new process finds an editable installation, because Python reads path
    files at startup.
    """
    importlib.invalidate_caches()
    # Python 3.11 does not clear this cache.
    importlib.metadata.MetadataPathFinder().invalidate_caches()
    _registry.cache_clear()


@contextmanager
def use_backend(name: str | None = None, *, trie: str | None = None) -> Iterator[None]:
    """Select the engine, the trie or both for the calls inside a `with` block.

        with genlm.use_backend("hf"):
            llm = genlm.load_model("demo")

    The choice applies to this thread and asyncio task and to the tasks and
    `asyncio.to_thread` calls that they start inside the block, not to new threads. Blocks can
    be nested; an argument of a call has precedence. Names are resolved when a backend is
    requested.

    Args:
        name: Engine name or `"distribution:name"`; None for no change.
        trie: Name of the token trie, as `name`.

    Raises:
        TypeError: No name is given, or a name is not a string.
    """
    arguments: dict[Kind, str | None] = {"engine": name, "trie": trie}
    names = {
        kind: _checked_name(value) for kind, value in arguments.items() if value is not None
    }
    if not names:
        raise TypeError('use_backend needs an engine\'s name, trie="name", or both')
    token = _SELECTED_NAMES.set({**_SELECTED_NAMES.get(), **names})
    try:
        yield
    finally:
        _SELECTED_NAMES.reset(token)


def list_backends(kind: Kind | None = None) -> list[BackendInfo]:
    """Return descriptions of the installed backends, by name.

    The modules of the plugins' hooks are imported, but no engine. A broken or disabled plugin
    of unknown kind is listed for every `kind`.

    Args:
        kind: `"engine"` or `"trie"`, None for both.

    Raises:
        ValueError: `kind` has another value.
        UnknownBackendError: `GENLM_PLUGINS` lists a plugin that is not installed.
        PluginError: A plugin is broken or incompatible and `GENLM_STRICT=1`.
    """
    if kind is not None:
        _check_kind(kind)
    infos = _backends(None, kind)
    _check_strictly(infos)
    return infos


def find_backend(name: str | None = None, kind: Kind = "engine") -> BackendInfo:
    """Return the description of the backend that `get_backend` or `get_trie` would import.

    Args:
        name: Backend name or `"distribution:name"`; None follows the order of precedence.
        kind: `"engine"` or `"trie"`.

    Returns:
        The description, with status `"ok"`.

    Raises:
        UnknownBackendError: No plugin provides the name, or no name is given and there are
            several candidates.
        AmbiguousBackendError: Several distributions provide the name.
        MissingRequirementError: A required library is not installed.
        BrokenPluginError: The plugin that provides the name is broken.
        PluginApiError: The plugin was written for another version of the plugin interface.
        ValueError: `kind` has another value.
    """
    _check_kind(kind)
    source = None
    if name is None:
        name, source = _SELECTED_NAMES.get().get(kind), "use_backend"
    if name is None:
        source = _VARIABLES[kind]
        name = os.environ.get(source, "").strip() or None
    if name is None:
        return _only_usable(kind)
    infos = [info for info in _backends(_checked_name(name), kind) if info.status != "disabled"]
    providers = [info.provider for info in infos if info.status == "ambiguous"]
    if providers:
        raise AmbiguousBackendError(name, kind, providers)
    if not infos:
        all_infos = _registry().backends()
        enabled = [i for i in all_infos if i.status not in {"disabled", "broken"}]
        installed = [info.name for info in enabled if info.kind == kind]
        raise UnknownBackendError(name, kind, installed, _hint(kind, name, all_infos), source)
    info, *ignored = sorted(infos, key=lambda info: info.status not in {"ok", "missing"})
    _report_ignored(ignored)
    _raise_fault(info)
    return info


def get_backend(name: str | None = None) -> Callable[..., Engine]:
    """Import an engine and return the callable that builds it.

    Args:
        name: Engine name or `"distribution:name"`; None follows the order of precedence.

    Returns:
        A callable `target(model, **options) -> Engine`.

    Raises:
        BrokenPluginError: The plugin or the engine's module cannot be imported.
        PluginError: As for `find_backend`.
    """
    return cast("Callable[..., Engine]", _import_target(find_backend(name, "engine")))


def get_trie(name: str | None = None) -> Callable[..., TokenCharacterTrie]:
    """Import the class of a token trie and return it; arguments and errors as `get_backend`."""
    return cast("Callable[..., TokenCharacterTrie]", _import_target(find_backend(name, "trie")))


def _import_target(info: BackendInfo) -> Any:
    """Import the target of a spec; errors of genlm are raised unchanged."""
    try:
        target = pkgutil.resolve_name(info.target)
    except GenlmError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"importing {info.target!r} failed: {describe_error(error)}"
        raise BrokenPluginError(info.provider, reason) from error
    if not callable(target):
        raise BrokenPluginError(info.provider, f"{info.target!r} is not callable")
    return target


def _backends(name: str | None, kind: Kind | None) -> list[BackendInfo]:
    """Return descriptions of the backends that are or may be of a kind.

    A misspelt `GENLM_PLUGINS` is an error, because it would disable all plugins.
    """
    plugins = _registry().plugins
    for entry in variable_entries("GENLM_PLUGINS"):
        if not any(plugin.is_listed([entry]) for plugin in plugins):
            match = _closest_match(
                entry, {name for p in plugins for name in (p.name, p.distribution, p.id)}
            )
            hint = f"Did you mean {match!r}?" if match else "Unset it to allow every plugin"
            names = {plugin.name for plugin in plugins}
            raise UnknownBackendError(entry, "plugin", names, hint, "GENLM_PLUGINS")
    infos = _registry().backends(name)
    return [info for info in infos if kind is None or info.kind in {kind, None}]


def _only_usable(kind: Kind) -> BackendInfo:
    infos = [info for info in list_backends(kind) if info.status != "disabled"]
    of_kind = [info for info in infos if info.kind == kind]
    external = [info for info in of_kind if info.distribution != CORE]
    usable = [info for info in external or of_kind if info.status == "ok"]
    # One backend may have several names.
    if len({(info.distribution, info.target) for info in usable}) == 1:
        _report_ignored(info for info in infos if info.error() is not None)
        return usable[0]
    if len({(info.distribution, info.target) for info in external}) == 1:
        _raise_fault(external[0])
    installed = [info.name for info in of_kind]
    raise UnknownBackendError(None, kind, installed, _selection_hint(kind, of_kind))


def _check_kind(kind: Kind) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: expected one of {get_args(Kind)}")


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a backend's name is a string; found {name!r}")
    return name


def is_strict() -> bool:
    """Whether `GENLM_STRICT` is set, which raises errors of plugins with tracebacks."""
    return os.environ.get("GENLM_STRICT", "").strip().lower() not in {"", "0", "false", "no"}


def _raise_fault(info: BackendInfo) -> None:
    error = info.error()
    if error is not None:
        raise error from _registry().cause(info.provider)


def _check_strictly(infos: Iterable[BackendInfo]) -> None:
    for info in infos:
        if is_strict() and info.status in {"broken", "incompatible"}:
            _raise_fault(info)


def _report_ignored(infos: Iterable[BackendInfo]) -> None:
    for info in infos:
        _check_strictly([info])
        _log.warning("ignored the plugin %s: %s", info.provider, info.reason)


def _hint(kind: Kind, name: str, infos: list[BackendInfo]) -> str:
    """Return advice for the name of a backend that no plugin provides."""
    for info in infos:
        if name in {info.name, info.provider}:
            if info.status in {"disabled", "broken"}:
                return f"{info.provider} is installed, but {info.status}: {info.reason}"
            if info.kind != kind:
                call = "get_backend" if info.kind == "engine" else "get_trie"
                return f"{name!r} is of kind {info.kind}: genlm.{call}({name!r})"
    published = _published(kind)
    distribution, _, short_name = name.rpartition(":")
    if short_name in published and distribution in {"", published[short_name]}:
        return _provided_by(published[short_name])
    installed = {
        installed_name
        for info in infos
        if info.kind in {kind, None}
        for installed_name in (info.name, info.provider)
    }
    match = _closest_match(name.lower(), installed | set(published))
    if match is None:
        return f"`genlm plugins` shows every installed {kind}"
    provider = "" if match in installed else f" {_provided_by(published[match])}"
    return f"Did you mean {match!r}?{provider}"


def _selection_hint(kind: Kind, infos: list[BackendInfo]) -> str:
    """Return advice to select one of several backends, or to install one."""
    if not infos:
        distributions = sorted(set(_published(kind).values()))
        return (
            f"Install one of {', '.join(distributions)}: {_install_commands(distributions[0])}"
        )
    name = min(info.provider if info.status == "ambiguous" else info.name for info in infos)
    if kind == "trie":
        return f"Name one: get_trie({name!r}), use_backend(trie={name!r}) or GENLM_TRIE"
    return f"Name one: backend={name!r}, use_backend({name!r}) or GENLM_BACKEND"


def _published(kind: Kind) -> dict[str, str]:
    """Return the distributions of this project's backends of a kind, by backend name."""
    return {
        name: distribution
        for name, (backend_kind, distribution) in PUBLISHED.items()
        if backend_kind == kind
    }


def _closest_match(name: str, candidates: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, sorted(candidates), n=1)), None)


def _provided_by(distribution: str) -> str:
    return f"It is provided by {distribution}: {_install_commands(distribution)}"


def _install_commands(distribution: str) -> str:
    """Return both commands: a clone may be newer than the index, or the only source."""
    return f"pip install {distribution}, or pip install ./plugins/{distribution} in a clone"
