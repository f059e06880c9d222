"""`measure_family` distinguishes right rows, wrong rows, refusals and failures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from genlm import AsyncLM, BatchEngine, ModelLoadError, Query, Vocabulary
from genlm.testing import FamilyResult, TinyModel, families, measure_family, tiny_tokenizer

Change = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


class Remembered(TinyModel):
    """Computes each row once for all tests, which request the same rows."""

    @functools.cache  # noqa: B019
    def logprobs(self, token_ids: tuple[int, ...], adapter: str | None = None) -> torch.Tensor:
        return super().logprobs(token_ids, adapter)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return Remembered.of(tmp_path_factory.mktemp("llama"), families(head_dim=8)["llama"])


class Alone(BatchEngine):
    """Each sequence alone by transformers; `change` breaks it."""

    max_context = 64

    def __init__(self, model: TinyModel, change: Change | None = None) -> None:
        self.vocabulary = Vocabulary.from_tokenizer(tiny_tokenizer())
        self._model = model
        self._change = change

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        rows = []
        for query in queries:
            row = self._model.logprobs(query.token_ids).float()
            rows.append(row if self._change is None else self._change(query.token_ids, row))
        return torch.stack(rows)


def measured(model: TinyModel, change: Change | None = None) -> FamilyResult:
    return measure_family(lambda path: AsyncLM(lambda: Alone(model, change)), model)


def test_right_rows_are_right(model: TinyModel) -> None:
    result = measured(model)
    assert result.status == "right"
    assert result.error is not None
    assert result.error < 1e-6
    assert result.rows > 100


def test_contexts_pass_every_window_by_several_tokens(model: TinyModel) -> None:
    requested: set[tuple[int, ...]] = set()
    largest_batch = [0]

    def record(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        requested.add(tuple(ids))
        return row

    class Counted(Alone):
        def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
            largest_batch[0] = max(largest_batch[0], len(queries))
            return super().evaluate(queries)

    measure_family(lambda path: AsyncLM(lambda: Counted(model, record)), model)
    grown = {ids for ids in requested if ids[:-1] in requested}
    lengths = {len(ids) for ids in grown}
    assert {*range(3, 12), *range(13, 23), *range(29, 39)} <= lengths
    assert max(map(len, requested)) == 60
    assert largest_batch[0] > 20
    forks = {ids[:15] for ids in requested if len(ids) > 15}
    assert any(sum(ids[:15] == fork for ids in requested) > 3 for fork in forks)


def windowed(model: TinyModel) -> Change:
    return lambda ids, row: model.logprobs(ids[-16:]).float()


def mixed_up(model: TinyModel) -> Change:
    """The row of whatever came before, for one length."""
    before = [torch.zeros(0)]

    def change(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        answer = before[0] if len(ids) == 23 and len(before[0]) else row
        before[0] = row
        return answer

    return change


@pytest.mark.parametrize("broken", [windowed, mixed_up])
def test_wrong_rows_are_wrong(broken: Callable[[TinyModel], Change], model: TinyModel) -> None:
    result = measured(model, broken(model))
    assert result.status == "wrong"
    assert result.error is not None
    assert result.error > 1e-2
    assert "largest after" in result.reason


def test_a_difference_just_above_the_bound_is_wrong(model: TinyModel) -> None:
    def change(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[:1] + 2e-5, row[1:]])

    assert measured(model, change).status == "right"
    load = lambda path: AsyncLM(lambda: Alone(model, change))  # noqa: E731
    assert measure_family(load, model, bound=1e-5).status == "wrong"


def test_a_row_of_nan_is_never_right(model: TinyModel) -> None:
    result = measured(model, lambda ids, row: row * float("nan" if len(ids) == 33 else 1))
    assert result.status in {"wrong", "fails"}


def test_a_longer_row_is_wrong(tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, families(head_dim=8)["qwen2"])
    assert model.vocab_size == 301  # transformers adds a token to this one's tokenizers
    result = measured(model, lambda ids, row: row[:300].log_softmax(-1))
    assert (result.status, result.error) == ("wrong", float("inf"))
    assert "a row of 300 ids; expected 301" in result.reason


def test_failing_requests_and_loads_are_told_from_refusals(model: TinyModel) -> None:
    def fail(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        raise IndexError("beyond the window")

    def load(error: Exception) -> Any:
        def raise_it(path: Path) -> AsyncLM:
            assert transformers.AutoConfig.from_pretrained(path).model_type == "llama"
            raise error

        return raise_it

    result = measured(model, fail)
    assert result.status == "fails"
    assert "IndexError: beyond the window" in result.reason
    result = measure_family(load(ModelLoadError("no such window")), model)
    assert (result.status, result.reason) == ("refused", "no such window")
    result = measure_family(load(AssertionError("a kernel")), model)
    assert (result.status, result.reason) == ("fails", "at load: AssertionError: a kernel")
