"""Plugin discovery: `spec` describes backends, `registry` reads plugins, `lookup` chooses.

This package uses only specs: it imports an engine's module only to return the engine.
"""

from genlm.core.plugins.lookup import (
    find_backend,
    get_backend,
    get_trie,
    list_backends,
    refresh,
    use_backend,
)
from genlm.core.plugins.spec import API_VERSION, TESTED, BackendInfo, BackendSpec, hookimpl

__all__ = [
    "API_VERSION",
    "TESTED",
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
