"""Rows in different batches, compared with unbatched float32 forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genlm import Engine, PrefixCacheEngine
from genlm.testing import TINY_LOGITS, TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

from .driving import answers, check, largest_error, prompts_of

# Lengths of 1, shared prefixes, duplicates, and a prompt that is a prefix of another one.
[SHARED] = prompts_of(40)
MIXED = [
    *prompts_of(9, 1, 23, 4, 150, 1),
    SHARED,
    (*SHARED, 5),
    (*SHARED, 6, 7, 8),
    SHARED,
    SHARED[:17],
    (0,),
    (0, 0),
]


def test_the_engine_implements_the_protocols(build: Any) -> None:
    engine = build()
    assert isinstance(engine, Engine)
    assert isinstance(engine, PrefixCacheEngine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 16},
        {"max_running_requests": 2},
        {"max_total_tokens": 170},
        {"max_total_tokens": 170, "max_running_requests": 3, "chunked_prefill_size": 24},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_rows_do_not_depend_on_the_batch(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(**options)
    for _ in range(2):  # computed, then from the cache
        check(engine, tiny, MIXED)
    engine.clear_prefix_cache()
    assert engine.statistics()["kv_tokens"] == 0
    prompts = prompts_of(*[1 + 7 * i % 60 for i in range(50)])
    check(engine, tiny, prompts)


def test_rows_belong_to_the_caller(build: Any) -> None:
    engine = build()
    prompts = prompts_of(5, 9, 3)
    rows = answers(engine, prompts)
    copies = [row.clone() for row in rows]
    for row in answers(engine, prompts):
        row.fill_(7.0)
        assert row.untyped_storage().nbytes() == row.nbytes
        assert not row.is_inference()
        assert not row.requires_grad
    assert all(torch.equal(row, copy) for row, copy in zip(rows, copies, strict=True))


def test_logits_beyond_the_tokenizer_are_cut_before_normalising(build: Any) -> None:
    engine = build()
    assert engine.vocabulary.size == TINY_VOCABULARY
    assert engine._served.embedding_rows == TINY_LOGITS
    [row] = answers(engine, prompts_of(5))
    assert row.shape == (TINY_VOCABULARY,)
    assert row.dtype == torch.float32
    assert abs(float(row.logsumexp(0))) <= 1e-5


def test_bfloat16_rows_are_float32_and_close(build: Any, tiny: TinyLlama) -> None:
    engine = build(dtype="bfloat16")
    rows = answers(engine, MIXED)
    assert {row.dtype for row in rows} == {torch.float32}
    # These weights are large on purpose; a trained model's rows come within 2e-2.
    assert largest_error(tiny, MIXED, rows) <= 0.15


def test_a_cached_prefix_is_computed_once(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    engine.cache_prefix(SHARED, None)
    computed = engine.statistics()["tokens_computed"]
    assert computed == len(SHARED)
    longer = [(*SHARED, token) for token in range(10)]
    check(engine, tiny, longer)
    assert engine.statistics()["tokens_computed"] == computed + 10
    engine.clear_prefix_cache()
    check(engine, tiny, longer[:1])
    assert engine.statistics()["tokens_computed"] == computed + 10 + len(SHARED) + 1


def test_prefixes_that_are_cached_make_way_for_contexts(build: Any, tiny: TinyLlama) -> None:
    engine = build(max_total_tokens=64)
    for prompt in prompts_of(40, 50, 60):
        engine.cache_prefix(prompt, None)
    check(engine, tiny, prompts_of(64, 30, seed=2))
