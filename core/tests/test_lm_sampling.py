"""Continuations repeat with their seed, whatever else is in their batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine, oracle_row

from genlm.core.engine import Capability
from genlm.core.errors import EmptySequenceError, EvaluationError, TokenTypeError
from genlm.core.lm import AsyncLM
from genlm.core.query import Completion, Query, SamplingParams
from genlm.core.sampling import draw_tokens, stream_seeds, stream_uniform

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]


class NativeEngine(ScriptedEngine):
    """Draws by itself: continues with the token ids that follow the last one."""

    capabilities = frozenset({Capability.LORA, Capability.SAMPLE})

    def __init__(self, poison: Sequence[int] = ()) -> None:
        super().__init__(VOCAB_SIZE, poison=poison)
        self.sampled: list[Query] = []

    def step(self) -> list[Completion]:
        drawing = [query for query in self._pending.values() if query.sampling is not None]
        for query in drawing:
            del self._pending[query.query_id]
        self.sampled += drawing
        return [*map(self._continued, drawing), *super().step()]

    def _continued(self, query: Query) -> Completion:
        assert query.sampling is not None
        if self.poison & set(query.token_ids):
            error = ArithmeticError(f"poisoned prompt {query.token_ids}")
            return Completion(query.query_id, error=error)
        last = query.token_ids[-1]
        return Completion(
            query.query_id, [last + 1 + i for i in range(query.sampling.max_tokens)]
        )


def chain(
    prompt: Sequence[int],
    count: int,
    stream: int,
    temperature: float,
    adapter: str | None = None,
) -> list[int]:
    """A continuation drawn from the oracle's rows, one token after the other."""
    sequence = list(prompt)
    for position in range(count):
        row = oracle_row(sequence, adapter, VOCAB_SIZE)[None]
        uniform = stream_uniform(stream, position)
        sequence.append(int(draw_tokens(row, [temperature], [uniform])))
    return sequence[len(prompt) :]


def batch_sample(
    llm: AsyncLM, prompts: Sequence[Any], *args: Any, **kw: Any
) -> list[list[int]]:
    return asyncio.run(llm.batch_sample(prompts, *args, **kw))


# -- drawn from rows ------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0, 2.0])
def test_continuation_i_is_drawn_from_the_rows_with_stream_i(
    make_model: MakeModel, temperature: float
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    prompts = [[1, 2], [1, 2], [3], [2, 1]]
    expected = [
        chain(prompt, 8, stream, temperature)
        for prompt, stream in zip(prompts, stream_seeds(11, 4), strict=True)
    ]
    drawn = batch_sample(llm, prompts, 8, temperature=temperature, seed=11)
    assert drawn == expected
    assert (drawn[0] == drawn[1]) == (temperature == 0)
    assert drawn == batch_sample(llm, prompts, 8, (), temperature, 11)


def test_a_draw_does_not_depend_on_what_else_is_asked(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE), max_batch_size=2)
    alone = asyncio.run(llm.sample([1, 2], 10, seed=5))
    assert batch_sample(llm, [[1, 2]], 10, seed=5) == [alone]
    assert batch_sample(llm, [[1, 2], [3], [4]], 10, seed=5)[0] == alone
    llm.clear_cache()
    assert batch_sample(llm, [[1, 2], *([[9]] * 20)], 10, seed=5)[0] == alone


def test_without_a_seed_every_call_draws_afresh(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    assert batch_sample(llm, [[1]], 20) != batch_sample(llm, [[1]], 20)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_stop_id_of_any_integer_kind_ends_the_continuation(
    make_model: MakeModel, kind: Callable[[Any], Any]
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    endless = asyncio.run(llm.sample([1], 12, seed=3))
    stop = endless[6]
    found = asyncio.run(llm.sample(kind([1]), 12, kind([stop]), seed=3))
    assert found == endless[: endless.index(stop)]


def test_a_continuation_ends_when_the_context_is_full(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE, max_context=4))
    assert list(map(len, batch_sample(llm, [[1], [1, 2, 3], [1] * 4], 9))) == [4, 2, 1]


def test_a_continuation_uses_the_adapter_it_was_asked_with(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    llm.add_new_lora("folder", "a")
    [stream] = stream_seeds(2, 1)

    async def main() -> list[int]:
        drawing = asyncio.create_task(llm.with_lora("a").sample([1], 6, seed=2))
        await asyncio.sleep(0)
        llm.set_lora("a")
        base = asyncio.create_task(llm.with_lora(None).sample([1], 6, seed=2))
        assert await base == chain([1], 6, stream, 1.0)
        return await drawing

    assert asyncio.run(main()) == chain([1], 6, stream, 1.0, "a")


def test_changing_the_default_adapter_spares_continuations_under_way(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    llm.add_new_lora("folder", "a")
    engine.during_evaluate = lambda: llm.set_lora("a")
    [stream] = stream_seeds(2, 1)
    assert asyncio.run(llm.sample([1], 6, seed=2)) == chain([1], 6, stream, 1.0)


def test_no_prompts_and_no_tokens_ask_nothing(make_model: MakeModel) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    assert batch_sample(llm, [], 5) == []
    assert batch_sample(llm, [[1], [2]], 0) == [[], []]
    assert engine.batches == []


# -- wrong requests and errors --------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"temperature": -0.5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"seed": -1},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(
    make_model: MakeModel, options: dict[str, Any]
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    with pytest.raises(ValueError, match="it must be"):
        batch_sample(make_model(engine), [[1]], **{"max_tokens": 2, **options})
    assert engine.batches == []


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_wrong_prompt_or_stop_id_is_refused_before_anything_is_drawn(
    make_model: MakeModel, max_tokens: int
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    with pytest.raises(EmptySequenceError):
        batch_sample(llm, [[1], []], max_tokens)
    for wrong in ([None], 3, "3"):
        with pytest.raises(TokenTypeError):
            batch_sample(llm, [[1]], max_tokens, wrong)
    assert engine.batches == []


@pytest.mark.parametrize(
    "engine_type", [lambda **kw: ScriptedEngine(VOCAB_SIZE, **kw), NativeEngine]
)
@pytest.mark.parametrize("prompts", [[[7]], [[1], [7], [2], [7, 7]]])
def test_an_error_comes_plain_with_its_cause_and_ends_the_others(
    make_model: MakeModel,
    engine_type: Callable[..., ScriptedEngine],
    prompts: list[list[int]],
) -> None:
    llm = make_model(engine_type(poison=[7]))
    with pytest.raises(EvaluationError, match="ArithmeticError: poisoned") as found:
        batch_sample(llm, prompts, 10_000, seed=0)
    assert isinstance(found.value.__cause__, ArithmeticError)
    statistics = llm.statistics()
    assert statistics.pending == statistics.waiting == 0
    assert llm.next_token_logprobs_sync([1]).shape == (VOCAB_SIZE,)


# -- drawn by the engine --------------------------------------------------------------


def sampling_of(queries: Iterable[Query]) -> dict[tuple[int, ...], SamplingParams | None]:
    return {query.token_ids: query.sampling for query in queries}


def test_an_engine_that_draws_gets_one_query_per_prompt(make_model: MakeModel) -> None:
    engine = NativeEngine()
    llm = make_model(engine)
    drawn = batch_sample(llm, [[1], [5], [1, 2]], 3, [9, 8], 0.5, seed=4)
    assert drawn == [[2, 3, 4], [6, 7, 8], [3, 4, 5]]
    streams = stream_seeds(4, 3)
    stop = frozenset({8, 9})
    assert sampling_of(engine.sampled) == {
        (1,): SamplingParams(3, 0.5, stop, streams[0]),
        (5,): SamplingParams(3, 0.5, stop, streams[1]),
        (1, 2): SamplingParams(3, 0.5, stop, streams[2]),
    }
    assert engine.batches == []
    statistics = llm.statistics()
    assert (statistics.requests, statistics.answered) == (3, 3)
    assert (statistics.tokens_asked, statistics.cache_entries) == (4, 0)


def test_equal_prompts_are_drawn_apart_and_rows_are_still_rows(make_model: MakeModel) -> None:
    engine = NativeEngine()
    llm = make_model(engine)
    llm.add_new_lora("folder", "a")

    async def main() -> tuple[list[list[int]], torch.Tensor]:
        return await asyncio.gather(
            llm.batch_sample([[1], [1]], 2, lora_name="a", seed=0),
            llm.next_token_logprobs([1], lora_name="a"),
        )

    drawn, row = asyncio.run(main())
    assert drawn == [[2, 3], [2, 3]]
    assert torch.equal(row, oracle_row([1], "a", VOCAB_SIZE))
    assert [query.adapter for query in engine.sampled] == ["a", "a"]
    seeds = [query.sampling.seed for query in engine.sampled if query.sampling]
    assert seeds == stream_seeds(0, 2)


def test_a_continuation_that_fills_the_context_is_logged(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE, max_context=6))
    asyncio.run(llm.batch_sample([[1, 2, 3], [4]], 6, seed=0))
    [record] = caplog.records
    assert record.message.startswith(
        "1 of 2 continuations ended before max_tokens=6: the model"
    )
    caplog.clear()
    asyncio.run(llm.batch_sample([[1, 2, 3], [4]], 4, seed=0))
    assert not caplog.records
