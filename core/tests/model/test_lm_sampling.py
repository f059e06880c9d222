"""Continuations repeat with their seed, whatever else is in their batch."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine, oracle_row

from genlm.core.base.errors import EmptySequenceError, EvaluationError, TokenIdError
from genlm.core.model.lm import AsyncLM
from genlm.core.rows.sampling import draw_tokens, stream_seeds, stream_uniform

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]
OPTIONS: dict[str, Any] = {"stop": [4], "temperature": 0.8, "seed": 2}


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
    assert drawn == batch_sample(llm, prompts, 8, stop=(), temperature=temperature, seed=11)


def test_each_continuation_may_have_its_seed(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    prompts, seeds = [[1, 2], [3], [1, 2], [1, 2]], [5, 2**70, 5, 0]
    expected = [
        asyncio.run(llm.sample(prompt, 10, seed=seed))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert batch_sample(llm, prompts, 10, seed=seeds) == expected
    assert batch_sample(llm, prompts, 10, seed=np.array([5, 1, 5, 0]))[2] == expected[0]
    assert expected[0] != expected[3]
    with pytest.raises(ValueError, match="3 seeds for 4 contexts; pass one for each"):
        batch_sample(llm, prompts, 10, seed=[1, 2, 3])
    with pytest.raises(ValueError, match="seed=-1"):
        batch_sample(llm, prompts, 10, seed=[1, 2, 3, -1])


def test_a_draw_does_not_depend_on_what_else_is_asked(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE), max_batch_size=2)
    alone = asyncio.run(llm.sample([1, 2], 10, seed=5))
    assert batch_sample(llm, [[1, 2]], 10, seed=5) == [alone]
    assert batch_sample(llm, [[1, 2], [3], [4]], 10, seed=5)[0] == alone
    llm.clear_output_cache()
    assert batch_sample(llm, [[1, 2], *([[9]] * 20)], 10, seed=5)[0] == alone


@pytest.mark.parametrize("smallest_group", [2, 100])
def test_concurrent_continuations_share_the_passes_of_the_engine(
    make_model: MakeModel, smallest_group: int
) -> None:
    engine: Any = ScriptedEngine(VOCAB_SIZE)
    engine.smallest_group = smallest_group
    llm = make_model(engine)
    prompts = [[1 + i // 4, i % 4] for i in range(40)]

    async def alone() -> list[list[int]]:
        return await asyncio.gather(*(llm.sample(ids, 8, seed=5) for ids in prompts))

    drawn = asyncio.run(alone())
    [stream] = stream_seeds(5, 1)
    assert drawn == [chain(ids, 8, stream, 1.0) for ids in prompts]
    assert len(engine.batches) == 8
    assert all(len(batch) == 40 for batch in engine.batches)
    expected = [
        chain(ids, 8, stream, 1.0)
        for ids, stream in zip(prompts, stream_seeds(5, 40), strict=True)
    ]
    assert batch_sample(llm, prompts, 8, seed=5) == expected
    assert len(engine.batches) == 16
    assert llm.population(prompts).sample_sync(8, seed=5).token_ids.tolist() == expected


class Joining(ScriptedEngine):
    """Draws continuations that are pending together as one group."""

    def __init__(self, **options: Any) -> None:
        super().__init__(VOCAB_SIZE, **options)
        self.group_sizes: list[int] = []
        self.kept: list[Any] = []

    def evaluate_groups(self, parts: Any) -> Any:
        [(group, _)] = parts
        self.group_sizes.append(len(group.row_of))
        return super().evaluate_groups(parts)

    def keep_sequences(self, generation: Any) -> None:
        lineage = generation.lineage
        ids = [lineage.sequence(place).token_ids for place in range(len(lineage))]
        self.kept.append(sorted(ids))


def test_continuations_that_are_pending_together_are_drawn_as_one_group(
    make_model: MakeModel,
) -> None:
    engine = Joining()
    llm = make_model(engine)
    prompts = [[1 + i % 3, i % 4] for i in range(20)]
    lengths = [1 + i % 7 for i in range(20)]
    temperatures = [0.5 + i / 10 for i in range(20)]
    requests = list(zip(prompts, lengths, temperatures, strict=True))

    async def main() -> list[list[int]]:
        return await asyncio.gather(
            *(
                llm.sample(ids, count, temperature=temperature, seed=i, stop=3)
                for i, (ids, count, temperature) in enumerate(requests)
            )
        )

    expected = []
    for i, (ids, count, temperature) in enumerate(requests):
        [stream] = stream_seeds(i, 1)
        drawn = chain(ids, count, stream, temperature)
        expected.append(drawn[: drawn.index(3)] if 3 in drawn else drawn)
    assert asyncio.run(main()) == expected
    unfinished = [
        sum(
            len(drawn) >= t and t < count
            for drawn, count in zip(expected, lengths, strict=True)
        )
        for t in range(7)
    ]
    # Groups of fewer than 8 members become separate queries.
    assert engine.group_sizes == [count for count in unfinished if count >= 8]
    [kept] = engine.kept
    ends = {(*ids, *drawn) for ids, drawn in zip(prompts, expected, strict=True)}
    assert {ids[:-1] if ids[-1] == 3 and ids not in ends else ids for ids in kept} == ends
    assert llm.statistics().pending == 0


def test_different_settings_and_few_continuations_are_not_joined(make_model: MakeModel) -> None:
    engine = Joining()
    llm = make_model(engine)

    async def main() -> list[list[int]]:
        return await asyncio.gather(
            *(llm.sample([1, i % 4], 3, seed=i, top_k=5 + i // 8) for i in range(12))
        )

    drawn = asyncio.run(main())
    assert engine.group_sizes == [8, 8, 8]
    assert drawn == [
        llm.sample_sync([1, i % 4], 3, seed=i, top_k=5 + i // 8) for i in range(12)
    ]
    assert engine.group_sizes == [8, 8, 8]


def test_an_error_fails_one_of_the_continuations_that_are_drawn_together(
    make_model: MakeModel,
) -> None:
    poisoned = Joining()
    llm = make_model(poisoned)
    [stream] = stream_seeds(5, 1)
    prompts = [[1 + i // 4, i % 4] for i in range(16)]
    expected = [chain(ids, 6, stream, 1.0) for ids in prompts]
    poison = expected[3][2]
    poisoned.poison = {poison}

    async def main() -> list[Any]:
        samples = (llm.sample(ids, 6, seed=5) for ids in prompts)
        return await asyncio.gather(*samples, return_exceptions=True)

    for ids, drawn, found in zip(prompts, expected, asyncio.run(main()), strict=True):
        if poison in ids + drawn[:-1]:
            assert isinstance(found, EvaluationError)
            assert isinstance(found.__cause__, ArithmeticError)
        else:
            assert found == drawn
    assert poisoned.kept == []
    assert llm.statistics().pending == 0


@pytest.mark.parametrize("other", ["sample", "row"])
def test_continuations_that_are_drawn_together_share_later_passes_with_other_requests(
    make_model: MakeModel, other: str
) -> None:
    class Joined(Joining):
        def evaluate_groups(self, parts: Any) -> Any:
            if len(self.group_sizes) == 2:
                asyncio.run_coroutine_threadsafe(start(), loop).result(10)
            return super().evaluate_groups(parts)

    async def start() -> None:
        request = llm.sample([5], 9, seed=7) if other == "sample" else llm.top_tokens([5], 1)
        later.append(asyncio.ensure_future(request))
        await asyncio.sleep(0)

    async def main() -> list[Any]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        samples = [
            llm.sample(ids, 3 + i % 6, seed=5, stop=[3, b"\x01\x02"])
            for i, ids in enumerate(prompts)
        ]
        return [*await asyncio.gather(*samples), await later[0]]

    engine, loop, later = Joined(), None, []  # type: ignore[var-annotated]
    llm = make_model(engine)
    prompts = [[1 + i // 4, i % 4] for i in range(16)]
    *found, last = asyncio.run(main())
    assert engine.group_sizes == [16, *engine.group_sizes[1:3]]
    unfinished = engine.group_sizes[2]
    together = len(engine.batches[3])
    assert unfinished - 4 <= together <= unfinished + 1
    assert any(ids[0] == 5 for ids in engine.batches[3])
    assert len(engine.batches) == (12 if other == "sample" else 8)
    assert len(engine.kept) == 1
    alone = make_model(ScriptedEngine(VOCAB_SIZE))
    for i, (ids, drawn) in enumerate(zip(prompts, found, strict=True)):
        options: Any = {"seed": 5, "stop": [3, b"\x01\x02"]}
        assert drawn == alone.sample_sync(ids, 3 + i % 6, **options)
    if other == "sample":
        assert last == alone.sample_sync([5], 9, seed=7)
    assert llm.statistics().pending == 0
    assert not engine._groups


@pytest.mark.parametrize("cancelled", [range(1), range(0, 16, 3), range(16)], ids=len)
def test_cancelled_continuations_leave_those_that_are_drawn_with_them(
    make_model: MakeModel, cancelled: range
) -> None:
    class Cancelling(Joining):
        def evaluate_groups(self, parts: Any) -> Any:
            if len(self.group_sizes) == 2:
                loop.call_soon_threadsafe(cancel)
                assert is_cancelled.wait(10)
            return super().evaluate_groups(parts)

    def cancel() -> None:
        for i in cancelled:
            tasks[i].cancel()
        loop.call_soon(is_cancelled.set)

    async def main() -> list[Any]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        tasks.extend(asyncio.ensure_future(llm.sample(ids, 6, seed=5)) for ids in prompts)
        return await asyncio.gather(*tasks, return_exceptions=True)

    engine, is_cancelled, tasks = Cancelling(), threading.Event(), []  # type: ignore[var-annotated]
    loop: Any = None
    llm = make_model(engine)
    [stream] = stream_seeds(5, 1)
    prompts = [[1 + i // 4, i % 4] for i in range(16)]
    found = asyncio.run(main())
    for i, ids in enumerate(prompts):
        if i in cancelled:
            assert isinstance(found[i], asyncio.CancelledError)
        else:
            assert found[i] == chain(ids, 6, stream, 1.0)
    remaining = 16 - len(cancelled)
    assert engine.group_sizes[:2] == [16, 16]
    assert set(engine.group_sizes[4:]) <= {remaining}
    assert llm.next_token_logprobs_sync([2]).shape == (VOCAB_SIZE,)
    assert llm.statistics().pending == 0
    assert not engine._groups


def test_a_batch_of_several_adapters_is_drawn_with_each(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    llm.load_lora("folder", "a")
    prompts = [llm.context([1]), llm.context([1], lora_name="a"), llm.context([2, 3])]
    streams = stream_seeds(8, 3)
    expected = [
        chain(prompt.token_ids, 6, stream, 1.0, prompt.lora_name)
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    assert batch_sample(llm, prompts, 6, seed=8) == expected


def test_an_adapter_is_kept_until_its_continuations_are_drawn(make_model: MakeModel) -> None:
    class Removing(ScriptedEngine):
        def remove_adapter(self, name: str) -> None:
            del self.adapters[name]

    engine = Removing(VOCAB_SIZE)
    llm = make_model(engine)
    llm.load_lora("folder", "a")
    engine.hold()
    [stream] = stream_seeds(2, 1)

    async def main() -> list[int]:
        drawing = asyncio.create_task(llm.sample([1], 6, seed=2, lora_name="a"))
        await asyncio.to_thread(engine.wait_until_entered)
        llm.unload_lora("a")
        assert len(engine.adapters) == 1
        engine.release()
        return await drawing

    assert asyncio.run(main()) == chain([1], 6, stream, 1.0, "a")


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
    ids = asyncio.run(llm.sample(kind([1]), 12, stop=kind([stop]), seed=3))
    assert ids == endless[: endless.index(stop)]


def test_a_continuation_ends_when_the_context_is_full(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE, max_context=4))
    assert list(map(len, batch_sample(llm, [[1], [1, 2, 3], [1] * 4], 9))) == [4, 2, 1]


def test_a_limit_within_the_context_is_that_of_a_model_without_one(
    make_model: MakeModel,
) -> None:
    prompts = [[1], [1, 2, 3], [1, 2, 3, 4]]
    unlimited = make_model(ScriptedEngine(VOCAB_SIZE))
    llm = make_model(ScriptedEngine(VOCAB_SIZE, max_context=6))
    drawn = batch_sample(unlimited, prompts, 5, stop=(), seed=1)
    for limit in (0, 1, 3, 4, 5):
        rooms = [6, 4, 3]
        expected = [ids[: min(limit, room)] for ids, room in zip(drawn, rooms, strict=True)]
        assert batch_sample(llm, prompts, limit, stop=(), seed=1) == expected


def test_continuations_are_divided_into_queries_of_so_many(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    llm.load_lora("folder", "a")
    prompts = [[1], [2], llm.context([1], lora_name="a"), [3], [4], [5]]
    expected = batch_sample(llm, prompts, 3, stop=(), seed=1)
    requests = llm.statistics().requests
    llm._requests.sampled_together = 2
    assert batch_sample(llm, prompts, 3, stop=(), seed=1) == expected
    assert llm.statistics().requests == 2 * requests


def test_a_continuation_uses_the_adapter_it_was_asked_with(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    llm.load_lora("folder", "a")
    [stream] = stream_seeds(2, 1)

    async def main() -> list[int]:
        drawing = asyncio.create_task(llm.with_lora("a").sample([1], 6, seed=2))
        await asyncio.sleep(0)
        base = asyncio.create_task(llm.with_lora(None).sample([1], 6, seed=2))
        assert await base == chain([1], 6, stream, 1.0)
        return await drawing

    assert asyncio.run(main()) == chain([1], 6, stream, 1.0, "a")


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
    for wrong in ([None], 3.5, [[3]]):
        with pytest.raises(TypeError, match=r"expected .*token ids"):
            batch_sample(llm, [[1]], max_tokens, stop=wrong)
    assert engine.batches == []


@pytest.mark.parametrize("smallest_group", [2, 100])
@pytest.mark.parametrize("prompts", [[[7]], [[1], [7], [2], [7, 7]]])
def test_an_error_comes_plain_with_its_cause_and_ends_the_others(
    make_model: MakeModel, smallest_group: int, prompts: list[list[int]]
) -> None:
    engine: Any = ScriptedEngine(VOCAB_SIZE, poison=[7])
    engine.smallest_group = smallest_group
    llm = make_model(engine)
    with pytest.raises(EvaluationError, match="ArithmeticError: poisoned") as error:
        batch_sample(llm, prompts, 10_000, seed=0)
    assert isinstance(error.value.__cause__, ArithmeticError)
    assert error.value.places == tuple(i for i, ids in enumerate(prompts) if 7 in ids)
    with pytest.raises(EvaluationError, match="ArithmeticError: poisoned") as error:
        llm.sample_sync([7], 10_000)
    assert error.value.places == ()
    statistics = llm.statistics()
    assert statistics.pending == statistics.waiting == 0
    assert llm.next_token_logprobs_sync([1]).shape == (VOCAB_SIZE,)


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
    asyncio.run(llm.batch_sample([[1, 2, 3], [4]], 6, stop=range(VOCAB_SIZE), seed=0))
    assert not caplog.records


# -- stop texts, top-k, top-p, streams, threads ---------------------------------------


def bytes_of(ids: Iterable[int]) -> bytes:
    """The text of ids in `ScriptedEngine`, whose token i is byte i."""
    return bytes(ids)


def test_a_stop_text_ends_a_continuation_with_the_token_that_completes_it(
    make_model: MakeModel,
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    [stream] = stream_seeds(3, 1)
    whole = chain([1], 40, stream, 1.0)
    for first, second in [(whole[10], whole[11]), (whole[20], whole[21])]:
        stop = bytes_of([first, second])
        end = bytes_of(whole).index(stop) + 2
        for form in (stop, [stop], [stop.decode("latin-1"), b"zz"]):
            ids = asyncio.run(llm.sample([1], 40, seed=3, stop=form))
            assert ids == whole[:end]


def test_stop_takes_token_ids_as_well(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    [stream] = stream_seeds(3, 1)
    whole = chain([1], 40, stream, 1.0)
    for token_id in {*whole}:
        beginning = whole[: whole.index(token_id)]
        for form in (token_id, [token_id], np.array([token_id, token_id]), [b"zz", token_id]):
            assert llm.sample_sync([1], 40, seed=3, stop=form) == beginning


def test_a_continuation_ends_with_the_text_unless_other_ends_are_given(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    [stream] = stream_seeds(3, 1)
    whole = chain([1], 40, stream, 1.0)
    end, other = whole[9], whole[4]
    engine.vocabulary = dataclasses.replace(
        engine.vocabulary, tokenizer=SimpleNamespace(eos_token_id=end)
    )
    llm = make_model(engine)
    ended = whole[: whole.index(end)]
    assert llm.sample_sync([1], 40, seed=3) == ended
    assert llm.batch_sample_sync([[1]], 40, seed=3) == [ended]
    assert llm.sample_sync([1], 40, stop=(), seed=3) == whole
    assert llm.sample_sync([1], 40, stop=other, seed=3) == whole[: whole.index(other)]

    sampled = llm.population([1], 20).sample_sync(40, seed=4)
    drawn = [ids[ids >= 0].tolist() for ids in sampled.token_ids]
    assert all(end not in ids[:-1] for ids in drawn)
    assert sampled.population.finished.tolist() == [ids[-1] == end for ids in drawn]
    assert llm.population([1], 20).sample_sync(40, stop=(), seed=4).token_ids.shape == (20, 40)


def test_stop_texts_may_be_of_one_token_and_longer_than_any(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    [stream] = stream_seeds(3, 1)
    whole = chain([1], 30, stream, 1.0)
    long = bytes_of(whole[5:25])
    assert asyncio.run(llm.sample([1], 30, seed=3, stop=long)) == whole[:25]
    text = bytes_of(whole[7:8])
    end = bytes_of(whole).index(text) + 1
    assert asyncio.run(llm.sample([1], 30, seed=3, stop=text)) == whole[:end]


def test_top_k_and_top_p_leave_the_likeliest_tokens(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    for options in ({"top_k": 3}, {"top_p": 0.4}, {"top_k": 1}):
        drawn = asyncio.run(llm.sample([1], 60, seed=5, temperature=2.0, **options))  # type: ignore[arg-type]
        sequence = [1]
        for token_id in drawn:
            row = oracle_row(sequence, None, VOCAB_SIZE).double()
            order = (row / 2).softmax(0).sort(descending=True)
            share = order.values.cumsum(0) - order.values
            count = options.get("top_k") or int((share < options["top_p"]).sum())
            assert token_id in order.indices[: int(count)].tolist()
            sequence.append(token_id)


def test_a_stream_has_the_tokens_of_sample_and_their_log_probabilities(
    make_model: MakeModel,
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))

    async def streamed() -> list[Any]:
        tokens = llm.stream([1], 12, seed=9, temperature=0.7, stop=b"zz", top_k=5, min_p=0.2)
        return [token async for token in tokens]

    tokens = asyncio.run(streamed())
    ids = [token.token_id for token in tokens]
    options: dict[str, Any] = {"seed": 9, "temperature": 0.7, "top_k": 5, "min_p": 0.2}
    assert ids == asyncio.run(llm.sample([1], 12, **options))
    for place, token in enumerate(tokens):
        row = oracle_row([1, *ids[:place]], None, VOCAB_SIZE)
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-6)


def test_a_stream_ends_before_a_stop_id_and_after_a_stop_text(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    ids = chain([1, 2], 8, stream_seeds(5, 1)[0], 1.0)

    async def streamed(stop: Any) -> list[int]:
        return [token.token_id async for token in llm.stream([1, 2], 8, stop=stop, seed=5)]

    assert asyncio.run(streamed([])) == ids
    for place, token_id in enumerate(ids):
        assert asyncio.run(streamed([token_id])) == ids[: ids.index(token_id)]
        text = bytes_of(ids[place : place + 2])
        end = bytes_of(ids).index(text) + len(text)
        assert asyncio.run(streamed([text, b"zz"])) == ids[:end]


def test_a_stream_that_fills_the_context_is_logged(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE, max_context=4))

    async def streamed(max_tokens: int, stop: Any = ()) -> list[int]:
        tokens = llm.stream([1, 2], max_tokens, stop=stop, seed=5)
        return [token.token_id async for token in tokens]

    ids = asyncio.run(streamed(3))
    assert len(ids) == 3
    asyncio.run(streamed(9, ids[-1]))
    assert not caplog.records
    assert asyncio.run(streamed(9)) == ids
    assert "1 of 1 continuations ended before max_tokens=9" in caplog.text


def test_a_stream_that_is_left_asks_for_no_more(make_model: MakeModel) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)

    async def left() -> None:
        tokens = llm.stream([1], 100, seed=0)
        async for _ in tokens:
            break
        await tokens.aclose()  # type: ignore[attr-defined]

    asyncio.run(left())
    assert len(engine.batches) == 1


def test_sampling_without_an_event_loop_and_inside_one(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    expected = asyncio.run(llm.batch_sample([[1], [2, 3]], 6, **OPTIONS))
    assert llm.batch_sample_sync([[1], [2, 3]], 6, **OPTIONS) == expected
    alone = asyncio.run(llm.sample([1], 6, **OPTIONS))
    assert llm.sample_sync([1], 6, **OPTIONS) == alone

    async def inside() -> list[list[int]]:
        return llm.batch_sample_sync([[1], [2, 3]], 6, **OPTIONS)

    assert asyncio.run(inside()) == expected
    with pytest.raises(EmptySequenceError):
        llm.sample_sync([], 3)


WRONG_LIMITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stop": [b"a", b""]}, ValueError, "stop has an empty text"),
    ({"stop": 1.5}, TypeError, "stop=1.5; expected texts or token ids"),
    ({"stop": ["a", None]}, TypeError, "stop has None; expected str or bytes, or token ids"),
    ({"stop": True}, TypeError, "stop=True; expected"),
    ({"stop": [3, VOCAB_SIZE]}, TokenIdError, "stop"),
    ({"top_k": 0}, ValueError, "top_k=0; it must be 1 or more"),
    ({"top_k": VOCAB_SIZE + 1}, ValueError, "top_k=17 of a vocabulary of 16"),
    ({"top_p": 0.0}, ValueError, "top_p=0.0; it must be above 0"),
    ({"min_p": 1.5}, ValueError, "min_p=1.5; it must be from 0 to 1"),
    ({"top_p": "1"}, TypeError, "top_p='1'; expected a number"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG_LIMITS)
def test_wrong_limits_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, make_model: MakeModel
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    with pytest.raises(error, match=message):
        llm.sample_sync([1], 2, **options)
    assert llm.statistics().requests == 0


def test_an_interrupt_ends_the_wait_for_samples(make_model: MakeModel) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    engine.hold()

    def interrupt() -> None:
        engine.wait_until_entered()
        while not interrupted.wait(0.01):  # a signal may arrive just before the wait
            signal.pthread_kill(main, signal.SIGINT)
        engine.release()

    def raising(*_: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    interrupted = threading.Event()
    main = threading.get_ident()
    handler = signal.signal(signal.SIGINT, raising)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.sample_sync([1], 10**6, seed=0)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)
    assert asyncio.run(llm.sample([1], 2, seed=0)) == chain([1], 2, stream_seeds(0, 1)[0], 1.0)


def test_an_unknown_argument_is_reported_with_the_public_name_of_the_method() -> None:
    with AsyncLM.from_name("demo", "reference") as llm:
        for method in (llm.sample_sync, llm.batch_draw_sync, llm.score_sync):
            unknown: dict[str, Any] = {"max_new_tokens": 3}
            with pytest.raises(TypeError, match=r"^AsyncLM\.\w+\(\) got an unexpected"):
                method([[1]], **unknown)
