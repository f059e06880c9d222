"""`AsyncLM` gives each caller the right row, of its own, and evaluates none twice."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm.core.base.errors import (
    ContextLengthError,
    EmptySequenceError,
    EvaluationError,
    TokenIdError,
    TokenTypeError,
)
from genlm.core.model.lm import AsyncLM
from genlm.core.rows.output_cache import OutputCache

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]

# Every way to ask for the rows of several sequences.
Ask = Callable[[AsyncLM, Sequence[Any]], torch.Tensor]


def one_by_one(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    async def main() -> list[torch.Tensor]:
        return [await llm.next_token_logprobs(ids) for ids in sequences]

    return torch.stack(asyncio.run(main()))


def gathered(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(*map(llm.next_token_logprobs, sequences))

    return torch.stack(asyncio.run(main()))


def uncached(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    async def main() -> list[torch.Tensor]:
        requests = (llm.next_token_logprobs(ids, use_cache=False) for ids in sequences)
        return await asyncio.gather(*requests)

    return torch.stack(asyncio.run(main()))


def batch(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    return asyncio.run(llm.batch_next_token_logprobs(sequences))


def batch_sync(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    return llm.batch_next_token_logprobs_sync(sequences)


def batch_sync_in_a_loop(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    async def main() -> torch.Tensor:
        return llm.batch_next_token_logprobs_sync(sequences)

    return asyncio.run(main())


def sync(llm: AsyncLM, sequences: Sequence[Any]) -> torch.Tensor:
    return torch.stack([llm.next_token_logprobs_sync(ids) for ids in sequences])


ALL_WAYS: list[Ask] = [
    one_by_one,
    gathered,
    uncached,
    batch,
    batch_sync,
    batch_sync_in_a_loop,
    sync,
]
BATCH_WAYS = [batch, batch_sync, batch_sync_in_a_loop]
in_all_ways = pytest.mark.parametrize("ask", ALL_WAYS, ids=lambda ask: ask.__name__)
in_batch_ways = pytest.mark.parametrize("ask", BATCH_WAYS, ids=lambda ask: ask.__name__)


def expected_rows(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([oracle_row(ids, None, VOCAB_SIZE) for ids in sequences])


# Near misses of one another: reversed, rotated, one dropped, one appended, repeated.
SEQUENCES = [
    [1, 2, 3],
    [3, 2, 1],
    [2, 3, 1],
    [2, 3],
    [1, 2, 3, 0],
    [1, 2, 3],
    [1],
    [0, 1, 2, 3],
]


# -- the right row --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_long_lists_that_are_extended_and_changed_have_their_own_rows(
    make_model: MakeModel, kind: type
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE), output_cache=OutputCache(0))
    long = [i * i % VOCAB_SIZE for i in range(140)]
    ids: list[int] = []
    for changed in (
        *(long, [*long, 3], [*long, 3, 5], [*long, 3], [*long, 3, 4], [*long, 3, 6]),
        *([*long[:2], 1, *long[3:]], [*long[:2], 1, *long[3:], 3], long[1:], long[::-1]),
    ):
        ids[:] = changed
        row = llm.next_token_logprobs_sync(kind(ids))
        assert torch.equal(row, oracle_row(ids, None, VOCAB_SIZE))
        with pytest.raises(TokenIdError):
            llm.next_token_logprobs_sync(kind([*ids, VOCAB_SIZE]))


@in_all_ways
@pytest.mark.parametrize(
    "options", [{}, {"max_batch_size": 3}, {"output_cache": OutputCache(0)}]
)
def test_every_sequence_gets_its_own_row(
    make_model: MakeModel, ask: Ask, options: dict[str, Any]
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE), **options)
    for _ in range(2):
        rows = ask(llm, SEQUENCES)
        assert rows.shape == (len(SEQUENCES), VOCAB_SIZE)
        assert rows.dtype == torch.float32
        assert torch.equal(rows, expected_rows(SEQUENCES))


@in_all_ways
@pytest.mark.parametrize(
    "kind",
    [tuple, np.array, functools.partial(np.array, dtype=np.int32), torch.tensor],
    ids=["tuple", "numpy", "int32", "torch"],
)
def test_sequences_of_any_kind_are_one_and_the_same(
    make_model: MakeModel, ask: Ask, kind: Callable[[Any], Any]
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    rows = ask(llm, [kind([3, 4]), [3, 4]])
    assert torch.equal(rows, expected_rows([[3, 4], [3, 4]]))
    assert llm.statistics().cache_entries == 1


@in_batch_ways
def test_a_matrix_is_a_batch_of_its_rows(make_model: MakeModel, ask: Ask) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    expected = expected_rows([[0, 1], [2, 3], [4, 5]])
    assert torch.equal(ask(llm, torch.arange(6).reshape(3, 2)), expected)
    assert torch.equal(ask(llm, np.arange(6).reshape(3, 2)), expected)


@in_batch_ways
def test_an_empty_batch_has_no_rows_and_asks_nothing(make_model: MakeModel, ask: Ask) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        rows = ask(llm, [])
    finally:
        torch.set_default_dtype(previous)
    assert rows.shape == (0, VOCAB_SIZE)
    assert rows.dtype == torch.float32
    assert engine.batches == []


@in_batch_ways
def test_a_batch_is_evaluated_at_once_and_its_duplicates_once(
    make_model: MakeModel, ask: Ask
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    engine.hold()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, llm, [[1], [2], [1], [1]])
        engine.wait_until_entered()
        engine.release()
        rows = answer.result(TIMEOUT_S)
    assert torch.equal(rows, expected_rows([[1], [2], [1], [1]]))
    assert sorted(ids for batch in engine.batches for ids in batch) == [(1,), (2,)]


# -- wrong requests -------------------------------------------------------------------

WRONG: list[tuple[Any, type[Exception]]] = [
    ([], EmptySequenceError),
    ([1] * 9, ContextLengthError),
    ([1, VOCAB_SIZE], TokenIdError),
    ([-1, 1], TokenIdError),
    ([1, 2.0], TokenTypeError),
    (5, TokenTypeError),
]


@in_all_ways
@pytest.mark.parametrize(("wrong", "error"), WRONG, ids=[error.__name__ for _, error in WRONG])
def test_a_wrong_request_is_refused(
    make_model: MakeModel, ask: Ask, wrong: Any, error: type[Exception]
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE, max_context=8)
    llm = make_model(engine)
    with pytest.raises(error):
        ask(llm, [wrong])
    assert engine.batches == []
    assert llm.statistics().requests == 0


@in_batch_ways
@pytest.mark.parametrize("wrong", [ids for ids, _ in WRONG])
def test_one_wrong_sequence_of_a_batch_raises_before_any_is_evaluated(
    make_model: MakeModel, ask: Ask, wrong: Any
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE, max_context=8)
    llm = make_model(engine)
    with pytest.raises((ValueError, TypeError)):
        ask(llm, [[1], [2], wrong])
    assert engine.batches == []
    assert llm.statistics().requests == 0
    assert torch.equal(ask(llm, [[1] * 8]), expected_rows([[1] * 8]))


@in_all_ways
def test_what_the_engine_raised_is_the_cause_and_harms_no_other(
    make_model: MakeModel, ask: Ask
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE, poison=[7]))
    with pytest.raises(
        EvaluationError, match=r"ArithmeticError: poisoned sequence \(7, 1\)"
    ) as e:
        ask(llm, [[1], [7, 1], [2]])
    assert isinstance(e.value.__cause__, ArithmeticError)
    assert torch.equal(ask(llm, [[1], [2]]), expected_rows([[1], [2]]))


# -- ownership ------------------------------------------------------------------------


@in_all_ways
def test_changing_a_row_changes_no_later_answer(make_model: MakeModel, ask: Ask) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    for _ in range(3):
        rows = ask(llm, [[1], [2], [1]])
        assert torch.equal(rows, expected_rows([[1], [2], [1]]))
        rows.zero_()
