"""The checks, one module per subject; `all_checks(kind)` lists them in documented order."""

from __future__ import annotations

from importlib import import_module

from genlm.testing.check import Check
from genlm.testing.deprecation import warn_renamed
from genlm.testing.target import Kind

__all__ = ["all_checks", "current_id"]

_MODULES: dict[Kind, tuple[str, ...]] = {
    "engine": (
        "engine_rows",
        "engine_batches",
        "engine_caches",
        "engine_contexts",
        "engine_reductions",
        "engine_requests",
        "engine_cancellation",
        "engine_threads",
        "engine_faults",
        "engine_endings",
        "engine_statistics",
        "engine_sampling",
        "engine_adapters",
        "engine_vocabulary",
        "engine_stateful",
    ),
    "trie": ("trie_values", "trie_vocabularies", "trie_weights", "trie_nodes", "trie_async"),
}


_FORMER_IDS = {
    "a-cancelled-continuation-disturbs-nobody": "a-cancelled-continuation-changes-no-other",
    "a-dead-engine-leaves-nobody-waiting": "a-dead-engine-ends-every-request",
    "bad-requests-hurt-nobody": "bad-requests-fail-alone",
    "cancelled-reductions-disturb-nobody": "cancelled-reductions-change-no-other",
    "ending-a-front-ends-every-reduction": "shutdown-ends-every-reduction",
    "loading-an-adapter-disturbs-nobody": "loading-an-adapter-changes-no-row",
    "results-come-as-asked": "results-have-the-requested-type",
}
"""Former ids of checks, which work until 1.1."""


def all_checks(kind: Kind) -> list[Check]:
    """Every check of engines or of tries."""
    modules = [import_module(f"{__name__}.{name}") for name in _MODULES[kind]]
    return [value for module in modules for value in vars(module).values() if _is(value, kind)]


def current_id(name: str) -> str:
    """Replace a former id in `check` or `check[model]`, with a DeprecationWarning."""
    check_id, bracket, model = name.partition("[")
    if check_id not in _FORMER_IDS:
        return name
    current = _FORMER_IDS[check_id] + bracket + model
    warn_renamed(f"the check id {name}", current)
    return current


def _is(value: object, kind: Kind) -> bool:
    return isinstance(value, Check) and value.kind == kind
