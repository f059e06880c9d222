"""Decoding with mlx-lm alone, all particles in one batch of its cache.

For `bench_mlx.py`: the time of a step without a front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache
from particle_population import Clock, Population

__all__ = ["lockstep"]


def lockstep(model: Any, population: Population, clock: Clock) -> float:
    """Milliseconds a step of `[N, 1]` decoding, the start computed before."""
    particles = population.start()
    cache = [BatchKVCache([0]) for _ in model.layers]
    model(mx.array([population.prompt]), cache=cache)
    _reorder(cache, [0] * population.count)
    if population.tail_length:
        tails = [context[population.prompt_length :] for context in particles.contexts]
        mx.eval(model(mx.array(tails), cache=cache)[:, -1])
    seconds = 0.0
    for step in range(population.steps):
        particles.grow()
        last = mx.array([context[-1:] for context in particles.contexts])
        start = clock()
        logits = model(last, cache=cache)[:, -1].astype(mx.float32)
        rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(rows)
        particles.resample(step)
        _reorder(cache, particles.parents)
        seconds += clock() - start
    return seconds / population.steps * 1e3


def _reorder(cache: Sequence[BatchKVCache], parents: list[int] | None) -> None:
    if parents is None:
        return
    for layer in cache:
        layer.filter(mx.array(parents))
    mx.eval([layer.state for layer in cache])
