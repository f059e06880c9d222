"""The correct targets that mutants are derived from; each passes every check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from genlm import Engine
from genlm.testing import EngineTarget
from genlm.testing.core_targets import numpy_targets
from genlm.testing.target import Target

from .attention import ADAPTER_SEEDS, CONTEXT, TRAINED, dense_row, trained_row
from .cached_engine import CachedEngine, PlainEngine
from .resident_engine import ResidentEngine
from .vocabulary import TEXTS

NO_FAILURE = {"passed", "not applicable"}
"""Statuses of outcomes that a correct target may have."""


def correct_targets() -> dict[str, Target]:
    """Every correct target, by name."""
    tries = {f"{trie.model} trie": trie for trie in numpy_targets(Path())}
    engines = {
        "cached": cached_target(),
        "resident": cached_target(ResidentEngine),
        "plain": plain_target(),
    }
    return {**engines, **tries}


def cached_target(
    build: Callable[..., Engine] = CachedEngine, timeout_s: float = 30.0
) -> EngineTarget:
    """An engine with a prefix cache and adapters."""
    return EngineTarget(
        model="cached",
        build=build,
        oracle=dense_row,
        weights=[
            (lambda: {"seed": torch.tensor(0)}, dense_row),
            (lambda: {"seed": torch.tensor(TRAINED)}, trained_row),
        ],
        adapters={name: name for name in ADAPTER_SEEDS},
        max_length=CONTEXT,
        tight_options=[{"kv_budget": 3}],
        texts=TEXTS,
        timeout_s=timeout_s,
    )


def plain_target(
    build: Callable[..., Engine] = PlainEngine, timeout_s: float = 30.0
) -> EngineTarget:
    """An engine that declares nothing."""
    return EngineTarget(
        model="plain",
        build=build,
        oracle=dense_row,
        max_length=CONTEXT,
        texts=TEXTS,
        timeout_s=timeout_s,
    )
