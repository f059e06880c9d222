"""Passes that read the common past of their sequences once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from mlx_lm.models import base
from mlx_lm.models import llama as mlx_llama

from genlm.prefix import PassLayout, TokenBatch
from genlm.testing import TINY_LLAMA, TinyModel, families
from genlm_mlx import shared_attention
from genlm_mlx.cache import check_attention, slot_caches
from genlm_mlx.engine import MLXEngine
from genlm_mlx.storage import KVStorage, LayerShape

from .conftest import Make
from .driving import Ids, largest_error, population, rows_of, used

WIDTH = 4
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32


def shares_pasts(engine: MLXEngine) -> bool:
    path: Any = engine._choice.path
    return bool(path.forward.shares_pasts)


@settings(max_examples=80, deadline=None)
@given(
    shared=st.integers(1, 6),
    own=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3, 7, 40]),
    groups=st.sampled_from([1, 3]),
    scores_at_once=st.sampled_from([1, 60, 2**24]),
    dtype=st.sampled_from([mx.float32, mx.float16]),
)
def test_attention_in_two_parts_equals_attention_over_whole_sequences(
    shared: int,
    own: list[tuple[int, int]],
    window: int | None,
    groups: int,
    scores_at_once: int,
    dtype: mx.Dtype,
) -> None:
    generator, heads = np.random.default_rng(0), 2

    def states(*shape: int) -> mx.array:
        return mx.array(generator.normal(size=(*shape, WIDTH))).astype(dtype)

    storage = KVStorage([LayerShape(heads, WIDTH, WIDTH, dtype)], 100)
    storage._arrays = [[states(heads * storage.slots), states(heads * storage.slots)]]
    paths, first = [], 1 + shared
    for past, new in own:
        slots = np.arange(first, first := first + past + new)
        paths.append(np.concatenate([np.arange(1, 1 + shared), slots]))
    batch = TokenBatch.of_paths(None, paths, [(0,) * count for _, count in own])
    new = max(count for _, count in own)
    queries = states(len(own), heads * groups, new)
    keys, values = states(len(own), heads, new), states(len(own), heads, new)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_attention, "_SCORES_AT_ONCE", scores_at_once)
        for count in (0, shared):
            layout = PassLayout(batch, batch.segments)
            layout.share(count)
            (cache,) = slot_caches(storage, layout, [window])
            mask = cache.make_mask(new)
            fetched = cache.update_and_fetch(keys, values)
            assert fetched[0].shape[2] == layout.past + new
            attention = base.scaled_dot_product_attention(
                queries, *fetched, cache=cache, scale=0.5, mask=mask
            )
            results.append(np.array(attention.astype(mx.float32)).swapaxes(1, 2))
    is_token = np.arange(new) < np.array([[count] for _, count in own])
    whole, parts = (result[is_token] for result in results)
    np.testing.assert_allclose(parts, whole, atol=1e-5 if dtype == mx.float32 else 5e-3)


@pytest.mark.usefixtures("eager_sharing")
@pytest.mark.parametrize("budget", [None, 60_000])
def test_rows_do_not_depend_on_what_sequences_share(
    budget: int | None, llama: TinyModel
) -> None:
    engine = MLXEngine(llama.path, dtype="float32", kv_budget_bytes=budget)
    assert shares_pasts(engine)
    for seed in range(3):
        for step in population(seed, 20):
            assert largest_error(engine, step, llama.logprobs) <= 1e-5


def test_a_population_has_its_prompt_in_memory_once(make: Make) -> None:
    model = make("llama", {**TINY_LLAMA, "max_position_embeddings": 1024})
    engine = MLXEngine(model.path, dtype="float32")
    prompt = tuple(np.random.default_rng(0).integers(3, 300, 800).tolist())
    particles: list[Ids] = [(*prompt, i) for i in range(3, 103)]
    rows_of(engine, [prompt])
    before, forwards = mx.get_active_memory(), used(engine, "forwards")
    mx.reset_peak_memory()
    for _ in range(3):
        rows = rows_of(engine, particles)
        particles = [(*ids, ids[-1]) for ids in particles]
    assert mx.get_peak_memory() - before < 100 * len(prompt) * TOKEN_BYTES / 2
    assert used(engine, "forwards") == forwards + 3
    expected = model.logprobs(particles[7][:-1])
    torch.testing.assert_close(rows[7].double(), expected, rtol=0, atol=1e-5)


def test_shared_keys_that_a_layer_does_not_read_are_an_error() -> None:
    layer = LayerShape(2, WIDTH, WIDTH, mx.float32)
    storage, slots = KVStorage([layer, layer], 10), np.arange(1, 5)
    batch = TokenBatch.of_paths(None, [slots] * 2, [(0,)] * 2)
    layout = PassLayout(batch, batch.segments)
    layout.share(3)
    caches, states = slot_caches(storage, layout, [None, None]), mx.ones((2, 2, 1, WIDTH))
    for cache in caches:
        fetched = cache.update_and_fetch(states, states)
    base.scaled_dot_product_attention(states, *fetched, cache=cache, scale=1, mask=None)
    with pytest.raises(ValueError, match="layer 0"):
        check_attention(caches)


def test_models_that_change_their_keys_get_whole_sequences(tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, families(16)["stablelm"])
    engine = MLXEngine(model.path, dtype="float32")
    assert not shares_pasts(engine)


def test_models_with_an_attention_of_their_own_get_whole_sequences(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*args: Any, cache: Any, **options: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(mlx_llama, "scaled_dot_product_attention", attention)
    engine = MLXEngine(llama.path, dtype="float32")
    assert not shares_pasts(engine)
    for step in population(1, 5):
        assert largest_error(engine, step, llama.logprobs) <= 1e-5
