"""Plugins: what they offer, how they are found, which one is chosen.

This package knows specs, never engines: it imports an engine's module only to
hand it to whoever asked for it.
"""

from genlm.core.plugins.choice import use_backend
from genlm.core.plugins.hookspecs import hookimpl
from genlm.core.plugins.info import BackendInfo
from genlm.core.plugins.registry import (
    find_backend,
    get_backend,
    get_trie,
    list_backends,
    refresh,
)
from genlm.core.plugins.spec import API_VERSION, BackendSpec

__all__ = [
    "API_VERSION",
    "BackendInfo",
    "BackendSpec",
    "find_backend",
    "get_backend",
    "get_trie",
    "hookimpl",
    "list_backends",
    "refresh",
    "use_backend",
]
