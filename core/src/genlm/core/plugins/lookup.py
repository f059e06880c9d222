"""Which backend a name means, and the public functions that find and import it.

Order of choice: the argument, the innermost `use_backend` block, the environment
variable `GENLM_BACKEND` or `GENLM_TRIE`, the only usable one installed. The
core's own backends count only when no other plugin of the kind is installed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

from genlm.core.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    GenlmError,
    UnknownBackendError,
    described,
)
from genlm.core.plugins.registry import CORE, PUBLISHED, Registry, find_plugins
from genlm.core.plugins.spec import BackendInfo, Kind

if TYPE_CHECKING:
    from genlm.core.engine import Engine
    from genlm.core.trie import TokenCharacterTrie

__all__ = [
    "find_backend",
    "get_backend",
    "get_trie",
    "is_strict",
    "list_backends",
    "refresh",
    "use_backend",
]

_CHOSEN: dict[Kind, ContextVar[str | None]] = {
    "engine": ContextVar("genlm_engine", default=None),
    "trie": ContextVar("genlm_trie", default=None),
}
_VARIABLES: dict[Kind, str] = {"engine": "GENLM_BACKEND", "trie": "GENLM_TRIE"}

_log = logging.getLogger("genlm.plugins")


@functools.cache
def _registry() -> Registry:
    return Registry(find_plugins())


def refresh() -> None:
    """Scan the installed plugins again at the next call that needs them.

    Needed after an installation in the running process. Modules that are already
    imported stay as they are, and an editable installation is only seen by a new
    process, because Python reads its path files when it starts.
    """
    importlib.invalidate_caches()
    # Python 3.11 leaves this one out.
    importlib.metadata.MetadataPathFinder().invalidate_caches()
    _registry.cache_clear()


# -- choice ---------------------------------------------------------------------------


@contextmanager
def use_backend(name: str | None = None, *, trie: str | None = None) -> Iterator[None]:
    """Choose the engine, the trie or both for the calls inside a `with` block.

        with genlm.use_backend("hf"):
            llm = genlm.load_model("demo")

    The choice holds for this thread and asyncio task and for the tasks and
    `asyncio.to_thread` calls that they start inside the block, not for new threads. Blocks
    nest; an argument of a call wins. Names are looked up when a backend is asked for.

    Args:
        name: An engine's name, or `"distribution:name"`; None leaves it as it is.
        trie: The same for the token trie.

    Raises:
        TypeError: Neither is given, or one is not a string.
    """
    choices: dict[Kind, str | None] = {"engine": name, "trie": trie}
    wanted = {kind: choice for kind, choice in choices.items() if choice is not None}
    if not wanted:
        raise TypeError('use_backend needs an engine\'s name, trie="name", or both')
    for choice in wanted.values():
        _check_name(choice)
    tokens = [(_CHOSEN[kind], _CHOSEN[kind].set(choice)) for kind, choice in wanted.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def _chosen(kind: Kind) -> tuple[str | None, str | None]:
    """Return the name that a block or the environment chose, and where it comes from."""
    name = _CHOSEN[kind].get()
    if name is not None:
        return name, "use_backend"
    name = os.environ.get(_VARIABLES[kind], "").strip()
    return (name, _VARIABLES[kind]) if name else (None, None)


# -- public lookups -------------------------------------------------------------------


def list_backends(kind: Kind | None = None) -> list[BackendInfo]:
    """Describe every installed backend, by name.

    Imports the modules of the plugins' hooks, never an engine. A broken or disabled plugin of
    unknown kind is listed for every `kind`.

    Args:
        kind: `"engine"` or `"trie"`, None for both.

    Raises:
        ValueError: Another kind.
        UnknownBackendError: `GENLM_PLUGINS` lists a plugin that is not installed.
        PluginError: A plugin is broken or incompatible and `GENLM_STRICT=1`.
    """
    if kind is not None:
        _check_kind(kind)
    _check_allowed()
    infos = _of_kind(_registry().everything(), kind)
    for info in infos:
        _raise_if_strict(info)
    return infos


def find_backend(name: str | None = None, kind: Kind = "engine") -> BackendInfo:
    """Describe the backend that `get_backend` or `get_trie` would import.

    Args:
        name: A name, or `"distribution:name"`; None follows the order of choice.
        kind: `"engine"` or `"trie"`.

    Returns:
        Its description; its status is `"ok"`.

    Raises:
        UnknownBackendError: No plugin provides the name, or several could be meant.
        AmbiguousBackendError: Several distributions provide the name.
        MissingRequirementError: A library that it needs is not installed.
        BrokenPluginError: The plugin that provides the name is broken.
        PluginApiError: It was written for another plugin interface.
        ValueError: Another kind.
    """
    _check_kind(kind)
    source = None
    if name is None:
        name, source = _chosen(kind)
        if name is None:
            return _only_one(kind)
    _check_name(name)
    _check_allowed()
    infos = _registry().named(name)
    candidates = [info for info in infos if info.kind == kind]
    providers = [info.provider for info in candidates if info.status == "ambiguous"]
    if len(providers) > 1:
        raise AmbiguousBackendError(name, kind, providers)
    usable = [info for info in candidates if info.status in {"ok", "missing"}]
    faulty = [info for info in _of_kind(infos, kind) if info.error() is not None]
    if not usable and not faulty:
        _raise_unknown(kind, name, source)
    info = (usable or faulty)[0]
    _report_ignored(each for each in faulty if each is not info)
    _raise_fault(info)
    return info


def get_backend(name: str | None = None) -> Callable[..., Engine]:
    """Import an engine and return it, not yet built.

    Args:
        name: A name, or `"distribution:name"`; None follows the order of choice.

    Returns:
        A callable `target(model, **options) -> Engine`.

    Raises:
        BrokenPluginError: The plugin or the engine's module cannot be imported.
        PluginError: As for `find_backend`.
    """
    return cast("Callable[..., Engine]", _target(find_backend(name, "engine")))


def get_trie(name: str | None = None) -> Callable[..., TokenCharacterTrie]:
    """Import a token trie's class, `target(vocabulary)`, and return it; as `get_backend`."""
    return cast("Callable[..., TokenCharacterTrie]", _target(find_backend(name, "trie")))


def _target(info: BackendInfo) -> Any:
    """Import the target of a spec; errors of genlm pass unchanged."""
    try:
        found = pkgutil.resolve_name(info.target)
    except GenlmError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"importing {info.target!r} failed: {described(error)}"
        raise BrokenPluginError(info.provider, reason) from error
    if not callable(found):
        raise BrokenPluginError(info.provider, f"{info.target!r} is not callable")
    return found


def _only_one(kind: Kind) -> BackendInfo:
    infos = [info for info in list_backends(kind) if info.status != "disabled"]
    known = [info for info in infos if info.kind == kind]
    others = [info for info in known if info.distribution != CORE]
    usable = [info for info in others or known if info.status == "ok"]
    # One backend may have several names.
    if len({(info.distribution, info.target) for info in usable}) == 1:
        _report_ignored(info for info in infos if info.error() is not None)
        return usable[0]
    if len({(info.distribution, info.target) for info in others}) == 1:
        _raise_fault(others[0])
    raise UnknownBackendError(None, kind, _names(known), _how_to_choose(kind, known))


# -- errors ---------------------------------------------------------------------------


def _check_kind(kind: Kind) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: expected one of {get_args(Kind)}")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a backend's name is a string; found {name!r}")


def _check_allowed() -> None:
    """Refuse a misspelt `GENLM_PLUGINS`, which would disable every plugin."""
    unknown = _registry().not_installed()
    if unknown:
        known = _registry().ids
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Unset it to allow every plugin"
        raise UnknownBackendError(unknown[0], "plugin", known, hint, "GENLM_PLUGINS")


def _raise_fault(info: BackendInfo) -> None:
    error = info.error()
    if error is not None:
        raise error from _registry().cause(info.provider)


def is_strict() -> bool:
    """Whether `GENLM_STRICT` asks for errors of plugins, with their tracebacks."""
    return os.environ.get("GENLM_STRICT", "").strip().lower() not in {"", "0", "false", "no"}


def _raise_if_strict(info: BackendInfo) -> None:
    if is_strict() and info.status in {"broken", "incompatible"}:
        _raise_fault(info)


def _report_ignored(infos: Iterable[BackendInfo]) -> None:
    for info in infos:
        _raise_if_strict(info)
        _log.warning("ignored the plugin %s: %s", info.provider, info.reason)


def _raise_unknown(kind: Kind, name: str, source: str | None) -> NoReturn:
    everything = _registry().everything()
    hidden = {"disabled", "broken"}
    installed = [i for i in everything if i.kind == kind and i.status not in hidden]
    hint = _hint(kind, name, everything)
    raise UnknownBackendError(name, kind, _names(installed), hint, source)


def _of_kind(infos: Iterable[BackendInfo], kind: Kind | None) -> list[BackendInfo]:
    return [info for info in infos if kind is None or info.kind in {kind, None}]


def _names(infos: Iterable[BackendInfo]) -> list[str]:
    return sorted({info.name for info in infos})


def _hint(kind: Kind, name: str, everything: list[BackendInfo]) -> str:
    """Say what to do about a name of this kind that nothing provides."""
    for info in everything:
        if name not in {info.name, info.provider}:
            continue
        if info.status in {"disabled", "broken"}:
            return f"{info.provider} is installed, but {info.status}: {info.reason}"
        if info.kind != kind:
            call = "get_backend" if info.kind == "engine" else "get_trie"
            return f"{name!r} is of kind {info.kind}: genlm.{call}({name!r})"
    distribution, _, bare = name.rpartition(":")
    published = {each: source for each, (of, source) in PUBLISHED.items() if of == kind}
    if bare in published and distribution in {"", published[bare]}:
        return _provided_by(published[bare])
    known = {each for info in _of_kind(everything, kind) for each in (info.name, info.provider)}
    close = difflib.get_close_matches(name.lower(), sorted(known | set(published)), n=1)
    if not close:
        return f"`genlm plugins` shows every installed {kind}"
    provided = "" if close[0] in known else f" {_provided_by(published[close[0]])}"
    return f"Did you mean {close[0]!r}?{provided}"


def _provided_by(distribution: str) -> str:
    return f"It is provided by {distribution}: {_install(distribution)}"


def _install(distribution: str) -> str:
    """Both ways, because a clone may be newer than what an index has, or the only source."""
    return f"pip install {distribution}, or pip install ./plugins/{distribution} in a clone"


def _how_to_choose(kind: Kind, infos: list[BackendInfo]) -> str:
    choices = sorted(
        info.provider if info.status == "ambiguous" else info.name for info in infos
    )
    if not choices:
        distributions = sorted({source for of, source in PUBLISHED.values() if of == kind})
        return f"Install one of {', '.join(distributions)}: {_install(distributions[0])}"
    example = repr(choices[0])
    if kind == "trie":
        return f"Name one: get_trie({example}), use_backend(trie={example}) or GENLM_TRIE"
    return f"Name one: backend={example}, use_backend({example}) or GENLM_BACKEND"
