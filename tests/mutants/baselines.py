"""The correct targets that the mutants are made of; each passes every check."""

from __future__ import annotations

from collections.abc import Callable

from genlm import Engine
from genlm.testing import EngineTarget

from .attention import ADAPTER_SEEDS, CONTEXT, dense_row
from .cached_engine import CachedEngine, PlainEngine
from .vocabulary import TEXTS


def cached_target(
    build: Callable[..., Engine] = CachedEngine, patience_s: float = 30.0
) -> EngineTarget:
    """An engine with a prefix cache, adapters and sampling of its own."""
    return EngineTarget(
        model="cached",
        build=build,
        oracle=dense_row,
        adapters={name: name for name in ADAPTER_SEEDS},
        max_length=CONTEXT,
        tight_options={"kv_budget": 3},
        texts=TEXTS,
        patience_s=patience_s,
    )


def plain_target(
    build: Callable[..., Engine] = PlainEngine, patience_s: float = 30.0
) -> EngineTarget:
    """An engine that declares nothing."""
    return EngineTarget(
        model="plain",
        build=build,
        oracle=dense_row,
        max_length=CONTEXT,
        texts=TEXTS,
        patience_s=patience_s,
    )
