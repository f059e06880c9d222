"""The checks, one module per subject; `all_checks(kind)` lists them in documented order."""

from __future__ import annotations

from importlib import import_module

from genlm.testing.check import Check
from genlm.testing.target import Kind

__all__ = ["all_checks"]

_MODULES: dict[Kind, tuple[str, ...]] = {
    "engine": (
        "engine_rows",
        "engine_caches",
        "engine_contexts",
        "engine_reductions",
        "engine_populations",
        "engine_endings",
        "engine_sampling",
        "engine_adapters",
        "engine_weights",
        "engine_vocabulary",
        "engine_programs",
    ),
    "trie": ("trie_values", "trie_vocabularies", "trie_weights", "trie_nodes"),
}


def all_checks(kind: Kind) -> list[Check]:
    """Every check of engines or of tries."""
    modules = [import_module(f"{__name__}.{name}") for name in _MODULES[kind]]
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, Check)]
