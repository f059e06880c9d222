"""Scores of texts against transformers, position by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from genlm import AsyncLM, Capability, Query, TokenScores
from genlm.testing import TINY_LLAMA, TinyModel, families
from genlm_mlx import execution_paths, forward
from genlm_mlx.engine import MLXEngine
from genlm_mlx.forward import as_tensor

from .conftest import Make
from .driving import rows_of, used

Ids = tuple[int, ...]
FAMILIES = families(head_dim=8)
PATHS = ("slot_cache", "uncached")


def text(length: int, seed: int) -> Ids:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (length,), generator=generator).tolist())


TEXTS = [text(40, 0), (*text(40, 0)[:12], *text(20, 1)), text(33, 2), text(33, 3), text(2, 4)]
STARTS = [1, 15, 30, 4, 1]


def scores_of(
    engine: MLXEngine, texts: Sequence[Ids], starts: Sequence[int], adapter: str | None = None
) -> list[TokenScores]:
    for i, (ids, start) in enumerate(zip(texts, starts, strict=True)):
        engine.submit(Query(i, ids[:-1], adapter, targets=ids[start:]))
    results: dict[int, Any] = {}
    while len(results) < len(texts):
        for completion in engine.step():
            assert completion.error is None, completion.error
            results[completion.query_id] = completion.result
    return [results[i] for i in range(len(texts))]


def assert_right(
    texts: Sequence[Ids],
    starts: Sequence[int],
    results: Sequence[TokenScores],
    oracle: Callable[[Ids], torch.Tensor],
    bound: float = 3e-5,
) -> None:
    for ids, start, scores in zip(texts, starts, results, strict=True):
        rows = [oracle(ids[:end]).double() for end in range(start, len(ids))]
        pairs = list(zip(rows, ids[start:], strict=True))
        right = torch.stack([row[target] for row, target in pairs])
        assert (scores.logprobs.double() - right).abs().max() <= bound
        assert scores.is_top.tolist() == [bool(row[i] >= row.max()) for row, i in pairs]


@pytest.mark.parametrize("path", PATHS)
def test_scores_are_right_with_and_without_a_cache(path: str, llama: TinyModel) -> None:
    engine = MLXEngine(
        llama.path, dtype="float32", execution_path=path, max_tokens_per_batch=50
    )
    assert Capability.SCORE in engine.capabilities
    for _ in range(2):  # the second time most is cached
        assert_right(TEXTS, STARTS, scores_of(engine, TEXTS, STARTS), llama.logprobs)


@pytest.mark.parametrize("name", ["gemma3_text", "cohere", "granite", "mamba", "gemma2"])
def test_logits_that_are_scaled_or_capped_and_other_layers_are_right(
    name: str, tmp_path: Any
) -> None:
    model = TinyModel.of(tmp_path, FAMILIES[name])
    engine = MLXEngine(model.path, dtype="float32", max_tokens_per_batch=60)
    assert_right(TEXTS, STARTS, scores_of(engine, TEXTS, STARTS), model.logprobs, 1e-4)


def test_windows_hide_what_they_should(make: Make) -> None:
    settings = {**TINY_LLAMA, "sliding_window": 6}
    model = make("mistral", settings)
    for path in PATHS:
        engine = MLXEngine(
            model.path, dtype="float32", execution_path=path, max_tokens_per_batch=9
        )
        assert_right(TEXTS, STARTS, scores_of(engine, TEXTS, STARTS), model.logprobs)


def test_adapters_apply(llama: TinyModel) -> None:
    engine = MLXEngine(llama.path, dtype="float32")
    for name in ("red", "blue"):
        engine.add_adapter(name, llama.adapters[name])
    for name in (None, "red", "blue"):
        results = scores_of(engine, TEXTS, STARTS, name)
        assert_right(TEXTS, STARTS, results, lambda ids, name=name: llama.logprobs(ids, name))


def test_every_position_is_computed_once(llama: TinyModel) -> None:
    engine = MLXEngine(llama.path, dtype="float32", self_test=False)
    prompt = text(30, 0)
    texts = [(*prompt, *text(4, i)) for i in range(1, 7)]
    engine.cache_prefix(prompt, None)
    before = used(engine, "tokens_computed")
    results = scores_of(engine, texts, [30] * 6)
    # All but the last token of each, and the last of the prompt again, for its logits.
    assert used(engine, "tokens_computed") == before + 6 * 3 + 1
    assert_right(texts, [30] * 6, results, llama.logprobs)


def test_rows_after_scores_are_right(llama: TinyModel) -> None:
    engine = MLXEngine(llama.path, dtype="float32")
    contexts = [ids[:20] for ids in TEXTS[:4]]
    for _ in range(3):
        rows = rows_of(engine, contexts)
        right = torch.stack([llama.logprobs(ids) for ids in contexts])
        assert (rows - right).abs().max() <= 1e-5
        assert_right(TEXTS, STARTS, scores_of(engine, TEXTS, STARTS), llama.logprobs)
        contexts = [(*ids, 7) for ids in contexts]


@pytest.mark.parametrize("path", PATHS)
def test_a_pass_has_a_limited_number_of_logits(
    path: str, llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def recorded(array: Any) -> torch.Tensor:
        sizes.append(array.shape[0])
        return as_tensor(array)

    for module in (execution_paths, forward):
        monkeypatch.setattr(module, "as_tensor", recorded)
    monkeypatch.setattr(execution_paths, "LOGITS_PER_PASS", 11 * 320)
    engine = MLXEngine(llama.path, dtype="float32", execution_path=path)
    sizes.clear()
    assert_right(TEXTS, STARTS, scores_of(engine, TEXTS, STARTS), llama.logprobs)
    assert max(sizes) == 11


@pytest.mark.parametrize("path", PATHS)
def test_a_text_longer_than_the_cache_is_scored_without(path: str, llama: TinyModel) -> None:
    engine = MLXEngine(
        llama.path, dtype="float32", execution_path=path, kv_budget_bytes=20 * 256
    )
    assert_right(TEXTS, STARTS, scores_of(engine, TEXTS, STARTS), llama.logprobs)


def test_callers_get_scores(llama: TinyModel) -> None:
    with AsyncLM(lambda: MLXEngine(llama.path, dtype="float32"), name="mlx") as llm:
        results = llm.batch_token_scores_sync(TEXTS, STARTS)
    assert_right(TEXTS, STARTS, results, llama.logprobs)
