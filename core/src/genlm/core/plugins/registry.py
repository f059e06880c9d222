"""Finding the backend that a name means, and the public functions that do.

Order of choice: the argument, the innermost `use_backend` block, the environment
variable `GENLM_BACKEND` or `GENLM_TRIE`, the only usable one installed. What comes
with the core itself is that "only one" when no other plugin of the kind is installed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn, cast, get_args

from genlm.core.errors import AmbiguousBackendError, UnknownBackendError
from genlm.core.forking import renew_in_forks
from genlm.core.plugins.catalog import Catalog
from genlm.core.plugins.choice import chosen
from genlm.core.plugins.discovery import CORE, find_plugins
from genlm.core.plugins.info import BackendInfo
from genlm.core.plugins.loading import import_target
from genlm.core.plugins.spec import Kind
from genlm.core.plugins.well_known import WELL_KNOWN

if TYPE_CHECKING:
    from genlm.core.engine import Engine
    from genlm.core.trie.protocol import TokenTrie

__all__ = ["Registry", "find_backend", "get_backend", "get_trie", "list_backends", "refresh"]

_log = logging.getLogger("genlm.plugins")


class Registry:
    """The installed plugins of this process, scanned once and again after `refresh`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scanned: Catalog | None = None
        renew_in_forks(self)

    def refresh(self) -> None:
        """Forget the scan; the next question scans again."""
        importlib.invalidate_caches()
        # Python 3.11 leaves this one out.
        importlib.metadata.MetadataPathFinder().invalidate_caches()
        with self._lock:
            self._scanned = None

    def describe(self, kind: Kind | None = None) -> list[BackendInfo]:
        """Describe every backend of a kind, those of unknown kind included."""
        infos = _of_kind(self._catalog().everything(), kind)
        for info in infos:
            self._raise_if_strict(info)
        return infos

    def find(self, kind: Kind, name: str | None) -> BackendInfo:
        """Find the usable backend that a name, or the order of choice, means."""
        source = None
        if name is None:
            choice = chosen(kind)
            if choice is None:
                return self._only_one(kind)
            name, source = choice
        if not isinstance(name, str):
            raise TypeError(f"a backend's name is a string; found {name!r}")
        infos = self._catalog().named(name)
        candidates = [info for info in infos if info.kind == kind]
        if len([info for info in candidates if info.status == "ambiguous"]) > 1:
            providers = [info.provider for info in candidates if info.status == "ambiguous"]
            raise AmbiguousBackendError(name, kind, providers)
        usable = [info for info in candidates if info.status in {"ok", "missing"}]
        faulty = [info for info in _of_kind(infos, kind) if info.error() is not None]
        if not usable and not faulty:
            self._raise_unknown(kind, name, source)
        self._report_ignored(info for info in faulty if info not in usable[:1])
        info = (usable or faulty)[0]
        self._raise_fault(info)
        return info

    def _only_one(self, kind: Kind) -> BackendInfo:
        infos = [info for info in self.describe(kind) if info.status != "disabled"]
        known = [info for info in infos if info.kind == kind]
        others = [info for info in known if info.distribution != CORE]
        usable = [info for info in others or known if info.status == "ok"]
        faulty = [info for info in infos if info.error() is not None]
        # One backend may have several names.
        if len({(info.distribution, info.target) for info in usable}) == 1:
            self._report_ignored(faulty)
            return usable[0]
        if len({(info.distribution, info.target) for info in others}) == 1:
            self._raise_fault(others[0])
        raise UnknownBackendError(None, kind, _names(known), _how_to_choose(kind, known))

    def _raise_unknown(self, kind: Kind, name: str, source: str | None) -> NoReturn:
        everything = self._catalog().everything()
        installed = [
            info
            for info in everything
            if info.kind == kind and info.status not in {"disabled", "broken"}
        ]
        hint = _hint(kind, name, everything)
        raise UnknownBackendError(name, kind, _names(installed), hint, source)

    def _raise_fault(self, info: BackendInfo) -> None:
        error = info.error()
        if error is not None:
            raise error from self._catalog().cause(info.provider)

    def _raise_if_strict(self, info: BackendInfo) -> None:
        if info.status in {"broken", "incompatible"} and _is_strict():
            self._raise_fault(info)

    def _report_ignored(self, infos: Iterable[BackendInfo]) -> None:
        for info in infos:
            self._raise_if_strict(info)
            _log.warning("ignored the plugin %s: %s", info.provider, info.reason)

    def _after_fork(self) -> None:
        """Renew the lock in a forked process."""
        self._lock = threading.Lock()

    def _catalog(self) -> Catalog:
        with self._lock:
            if self._scanned is None:
                self._scanned = Catalog(find_plugins())
            return self._scanned


def _is_strict() -> bool:
    return os.environ.get("GENLM_STRICT", "").strip().lower() not in {"", "0", "false", "no"}


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
    well_known = {n: d for n, (k, d) in WELL_KNOWN.items() if k == kind}
    if bare in well_known and distribution in {"", well_known[bare]}:
        return f"It is provided by {well_known[bare]}: pip install {well_known[bare]}"
    known = {info.name: info.name for info in _of_kind(everything, kind)}
    known |= {info.provider: info.provider for info in _of_kind(everything, kind)}
    close = difflib.get_close_matches(name.lower(), [*known, *well_known], n=1)
    if not close:
        return f"`genlm plugins` shows every installed {kind}"
    hint = f"Did you mean {close[0]!r}?"
    if close[0] in known:
        return hint
    return (
        f"{hint} It is provided by {well_known[close[0]]}: pip install {well_known[close[0]]}"
    )


def _how_to_choose(kind: Kind, infos: list[BackendInfo]) -> str:
    choices = sorted(
        info.provider if info.status == "ambiguous" else info.name for info in infos
    )
    if not choices:
        distributions = sorted({d for k, d in WELL_KNOWN.values() if k == kind})
        return f"Install one: pip install {' or '.join(distributions)}"
    example = repr(choices[0])
    if kind == "trie":
        return f"Name one: get_trie({example}), use_backend(trie={example}) or GENLM_TRIE"
    return f"Name one: backend={example}, use_backend({example}) or GENLM_BACKEND"


def _check_kind(kind: Kind) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: expected one of {get_args(Kind)}")


_registry = Registry()


def list_backends(kind: Kind | None = None) -> list[BackendInfo]:
    """Describe every installed backend, by name.

    Imports the plugins' small modules, never an engine. A broken or disabled
    plugin is an entry with that status; its kind may be unknown, and then it is
    listed whichever kind is asked for.

    Args:
        kind: `"engine"` or `"trie"`, None for both.

    Raises:
        ValueError: There is no such kind.
        BrokenPluginError: A plugin is broken and `GENLM_STRICT=1`.
        PluginApiError: A plugin is incompatible and `GENLM_STRICT=1`.
    """
    if kind is not None:
        _check_kind(kind)
    return _registry.describe(kind)


def find_backend(name: str | None = None, kind: Kind = "engine") -> BackendInfo:
    """Describe the backend that `get_backend` or `get_trie` would import.

    Args:
        name: A name, or `"distribution:name"`; None follows the order of choice.
        kind: `"engine"` or `"trie"`.

    Returns:
        Its description; its status is `"ok"`.

    Raises:
        UnknownBackendError: Nothing provides the name, or none stands out.
        AmbiguousBackendError: Several distributions provide the name.
        MissingRequirementError: The library that it drives is not installed.
        BrokenPluginError: The plugin that provides the name is broken.
        PluginApiError: It was written for another plugin interface.
        ValueError: There is no such kind.
    """
    _check_kind(kind)
    return _registry.find(kind, name)


def get_backend(name: str | None = None) -> Callable[..., Engine]:
    """Import an engine and return it, not yet built.

    Args:
        name: An engine's name, or `"distribution:name"`. None takes that of the
            innermost `use_backend` block, else of `GENLM_BACKEND`, else the only
            usable engine installed; the reference engine, which comes with the
            core, is that one only if no other is installed.

    Returns:
        A callable `target(model, **options) -> Engine`.

    Raises:
        UnknownBackendError: Nothing provides the name, or none stands out.
        AmbiguousBackendError: Several distributions provide the name.
        MissingRequirementError: The library that it drives is not installed.
        BrokenPluginError: The plugin or the engine's module cannot be imported.
        PluginApiError: It was written for another plugin interface.
    """
    info = find_backend(name, "engine")
    return cast("Callable[..., Engine]", import_target(info.provider, info.target))


def get_trie(name: str | None = None) -> Callable[..., TokenTrie]:
    """Import a token trie's class and return it; `get_backend` for tries.

    Args:
        name: A trie's name, or `"distribution:name"`. None takes that of the
            innermost `use_backend(trie=...)` block, else of `GENLM_TRIE`, else the
            only usable one installed, the core's own if there is no other.

    Returns:
        A class `target(vocabulary)`.

    Raises:
        PluginError: As for `get_backend`.
    """
    info = find_backend(name, "trie")
    return cast("Callable[..., TokenTrie]", import_target(info.provider, info.target))


def refresh() -> None:
    """Look again at what is installed, at the next question.

    Needed after an installation in the running process. Modules that are already
    imported stay as they are, and an editable installation is only seen by a new
    process, because Python reads its path files when it starts.
    """
    _registry.refresh()
