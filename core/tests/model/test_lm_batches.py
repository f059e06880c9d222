"""Errors of methods with `batch` in their name tell which sequences they are about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine

from genlm import AsyncLM, EvaluationError, GenlmError, OutputCache, Query, TokenIdError

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]


@pytest.fixture
def llm(make_model: MakeModel) -> AsyncLM:
    engine = ScriptedEngine(VOCAB_SIZE, poison=[13])
    return make_model(engine, output_cache=OutputCache(0))


GOOD, BAD, POISONED = [1, 2], [1, VOCAB_SIZE], [13]
SEQUENCES = [GOOD, POISONED, GOOD, POISONED]

BATCHES: dict[str, Callable[[AsyncLM, list[Any]], Any]] = {
    "rows": lambda llm, ids: llm.batch_next_token_logprobs(ids),
    "token_logprobs": lambda llm, ids: llm.batch_token_logprobs(ids, [[1]] * len(ids)),
    "top_tokens": lambda llm, ids: llm.batch_top_tokens(ids, 2),
    "log_mass": lambda llm, ids: llm.batch_log_mass(ids, [[1]] * len(ids)),
    "draw": lambda llm, ids: llm.batch_draw(ids, seed=1),
    "sample": lambda llm, ids: llm.batch_sample(ids, 2, seed=1),
    "score": lambda llm, ids: llm.batch_score([[*token_id, 1] for token_id in ids]),
}


def caught(llm: AsyncLM, batch: str, sequences: list[Any]) -> BaseException:
    with pytest.raises(GenlmError) as raised:
        asyncio.run(BATCHES[batch](llm, sequences))
    return raised.value


@pytest.mark.parametrize("batch", BATCHES)
def test_an_error_of_the_checks_names_all_places(llm: AsyncLM, batch: str) -> None:
    error = caught(llm, batch, [GOOD, GOOD, BAD, BAD])
    assert isinstance(error, TokenIdError)
    assert error.places == (2, 3)
    [note] = error.__notes__
    assert note == "Sequences 2, 3 of the batch failed; this is the error of 2."
    assert llm.statistics().requests == 0


@pytest.mark.parametrize("batch", BATCHES)
def test_an_error_of_the_evaluation_names_all_places(llm: AsyncLM, batch: str) -> None:
    error = caught(llm, batch, SEQUENCES)
    assert isinstance(error, EvaluationError)
    assert error.places == (1, 3)
    [note] = error.__notes__
    assert note == "Sequences 1, 3 of the batch failed; this is the error of 1."
    assert llm.statistics().pending == 0


def test_checks_of_other_arguments_name_the_place_too(llm: AsyncLM) -> None:
    for ask in (
        lambda: llm.batch_token_logprobs_sync([GOOD] * 3, [[1], [1], [VOCAB_SIZE]]),
        lambda: llm.batch_log_mass_sync([GOOD] * 3, [[1], [1], [VOCAB_SIZE]]),
        lambda: llm.batch_draw_sync([GOOD] * 3, [[1], [1], [VOCAB_SIZE]]),
    ):
        with pytest.raises(TokenIdError) as raised:
            ask()
        assert raised.value.places == (2,)
    other = llm.context(GOOD)
    with (
        AsyncLM(lambda: ScriptedEngine(VOCAB_SIZE)) as model,
        pytest.raises(ValueError, match="belongs to a different model") as foreign,
    ):
        model.batch_next_token_logprobs_sync([GOOD, other])
    assert foreign.value.__notes__ == ["Sequence 1 of the batch failed."]


def test_an_error_that_is_shared_has_the_places_of_each_caller(llm: AsyncLM) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(
            llm.batch_next_token_logprobs([POISONED, GOOD]),
            llm.batch_next_token_logprobs([GOOD, POISONED]),
            llm.next_token_logprobs(POISONED),
            return_exceptions=True,
        )

    first, second, alone = asyncio.run(main())
    assert (first.places, second.places, alone.places) == ((0,), (1,), ())
    assert len(first.__notes__) == len(second.__notes__) == 1
    assert not hasattr(alone, "__notes__")


def test_many_places_are_cut_in_the_note_and_whole_in_the_attribute(llm: AsyncLM) -> None:
    error = caught(llm, "rows", [POISONED] * 30)
    assert error.places == tuple(range(30))  # type: ignore[attr-defined]
    assert error.__notes__[0].count(",") == 19
    assert "19 and 10 more of the batch" in error.__notes__[0]


def test_errors_of_one_request_have_no_places(llm: AsyncLM) -> None:
    for ask in (
        lambda: llm.next_token_logprobs_sync(BAD),
        lambda: llm.draw_sync(POISONED),
        lambda: llm.score_sync([*POISONED, 1]),
        lambda: llm.sample_sync(POISONED, 2),
    ):
        with pytest.raises(GenlmError) as raised:
            ask()
        assert raised.value.places == ()
        assert not hasattr(raised.value, "__notes__")


def test_a_batch_is_one_request_whose_equal_sequences_are_computed_once(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine, output_cache=OutputCache(0))
    rows = llm.batch_next_token_logprobs_sync([[1], [2], [1], [1]])
    assert engine.batches == [[(1,), (2,)]]
    assert torch.equal(rows[0], rows[2])
    assert rows[0].data_ptr() != rows[2].data_ptr()
    assert llm.statistics().joined == 2


def test_a_request_does_not_wait_for_all_sequences_of_an_earlier_batch(
    make_model: MakeModel,
) -> None:
    class PairEngine(ScriptedEngine):
        def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
            return pending[:2]

    engine = PairEngine(VOCAB_SIZE)
    llm = make_model(engine, output_cache=OutputCache(0))

    async def main() -> None:
        engine.hold()
        batch = asyncio.create_task(llm.batch_next_token_logprobs([[i] for i in range(6)]))
        await asyncio.to_thread(engine.wait_until_entered)
        single = asyncio.create_task(llm.next_token_logprobs([9]))
        async with asyncio.timeout(TIMEOUT_S):
            while llm.statistics().pending < 7:
                await asyncio.sleep(0)
        engine.release()
        await asyncio.gather(batch, single)

    asyncio.run(main())
    assert engine.batches == [[(0,), (1,)], [(9,), (2,)], [(3,), (4,)], [(5,)]]
