"""Reductions of rows, in this process and in processes of vLLM."""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from row_oracle import Entropy, check_output, check_outputs, mask, outputs_of

from genlm import DrawnToken, EvaluationError
from genlm.core.rows.masks import Mask
from genlm.core.rows.reductions import Draw, LogMass, TopK
from genlm.core.rows.row_functions import ReductionOfFunction
from genlm.plugin import PackedCompletions, stream_uniform
from genlm.testing import TINY_VOCABULARY
from genlm_vllm.conformance import TinyLlama
from genlm_vllm.messages import TRANSPORT, Outputs
from genlm_vllm.worker import call_workers

from .interpreted_triton import SECOND_RUNNER
from .traffic import finish, prompts, rows, submit, unfetched

sys.path.insert(0, str(Path(__file__).parent))  # as for a program's modules

import user_reductions

TOKENS = 64
"""Maximum number of tokens of a step; longer prompts are computed in chunks."""


PROCESSES: dict[str, dict[str, Any]] = {
    "this process": {},
    "own process": {"multiprocess": True},
}
if SECOND_RUNNER:  # its kernels are interpreted
    del PROCESSES["own process"]


@pytest.fixture(scope="module", params=PROCESSES)
def engine(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[Any]:
    engine = tiny.engine(
        **PROCESSES[request.param],
        max_num_seqs=6,
        max_num_batched_tokens=TOKENS,
        max_loras=3,
    )
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    yield engine
    engine.close()


@pytest.fixture(params=["residents", "no residents"])
def either(request: pytest.FixtureRequest, engine: Any) -> Iterator[Any]:
    """The engine with resident contexts and without."""
    engine.clear_prefix_cache()
    engine.keeps_contexts = request.param == "residents"
    yield engine
    engine.keeps_contexts = True
    engine.step()
    assert unfetched(engine) == 0


def is_local(engine: Any) -> bool:
    return bool(engine.statistics()["processes"] == "this")


def test_each_reduction_is_that_of_its_row(either: Any, tiny: Any) -> None:
    contexts = prompts(*range(5, 29), 130, 70)
    for _ in range(3):  # begun, then continued
        outputs = [outputs_of(number, Entropy()) for number in range(len(contexts))]
        pairs = list(zip(contexts, outputs, strict=True))
        results = finish(either, [submit(either, ids, outputs=o) for ids, o in pairs])
        for (ids, requested), result in zip(pairs, results, strict=True):
            check_outputs(result, requested, tiny.logprobs(ids))
        contexts = [(*ids, 7) for ids in contexts]


def test_fifty_draws_of_one_context_are_the_reference_draws(either: Any, tiny: Any) -> None:
    [ids] = prompts(90, seed=5)
    draws = [
        Draw(stream_uniform(seed, 90), 0.5 + seed / 40, mask(seed) if seed % 2 else None)
        for seed in range(50)
    ]
    row = tiny.logprobs(ids)
    together = finish(either, [submit(either, ids, outputs=tuple(draws))])[0].values
    alone = finish(either, [submit(either, ids, outputs=(draw,)) for draw in draws])
    for draw, value, result in zip(draws, together, alone, strict=True):
        check_output(value, draw, row)
        assert result.values[0].token_id == value.token_id


def test_draws_do_not_depend_on_the_batch(either: Any) -> None:
    contexts = prompts(9, 40, 33, 100, 5)
    draws = [Draw(stream_uniform(seed, 1), 1.0, mask(seed)) for seed in range(5)]
    pairs = list(zip(contexts, draws, strict=True))
    one_by_one = [
        finish(either, [submit(either, ids, outputs=(draw,))])[0].values[0].token_id
        for ids, draw in pairs
    ]
    at_once = finish(either, [submit(either, i, outputs=(d,)) for i, d in pairs * 3])
    assert [result.values[0].token_id for result in at_once] == one_by_one * 3


def test_one_context_is_asked_again_while_it_is_computed(either: Any, tiny: Any) -> None:
    [prompt] = prompts(200, seed=2)
    row = tiny.logprobs(prompt)
    outputs = [TopK(3), LogMass(mask(1)), Draw(0.25, 1.0, mask(2)), Entropy(), None]
    first = submit(either, prompt, outputs=(outputs[0],))
    early = list(either.step())  # the prompt is computed in four chunks
    assert not (early and is_local(either))
    queries = [submit(either, prompt, outputs=(output,)) for output in outputs[1:]]
    early += either.step()
    results = {completion.query_id: completion.result for completion in early}
    waiting = [query for query in (first, *queries) if query.query_id not in results]
    assert len(waiting) >= len(queries) or not is_local(either)
    results |= zip((q.query_id for q in waiting), finish(either, waiting), strict=True)
    for query, output in zip((first, *queries), outputs, strict=True):
        result = results[query.query_id]
        check_output(result if output is None else result.values[0], output, row)


def test_two_continue_one_context_with_the_same_tokens(either: Any, tiny: Any) -> None:
    [prompt] = prompts(40, seed=8)
    finish(either, [submit(either, prompt, outputs=(TopK(1),))])
    for length in range(1, 8):
        ids = (*prompt, *prompts(length, seed=9)[0])
        first = submit(either, ids, outputs=(TopK(length),))
        second = submit(either, ids, outputs=(LogMass(mask(length)), TopK(2)))
        third = submit(either, ids)
        results = finish(either, [first, second, third])
        row = tiny.logprobs(ids)
        check_output(results[0].values[0], TopK(length), row)
        check_output(results[1].values[0], LogMass(mask(length)), row)
        check_output(results[1].values[1], TopK(2), row)
        check_output(results[2], None, row)


def test_what_is_asked_changes_from_step_to_step(either: Any, tiny: Any) -> None:
    """The parameters of a request that stays are sent again with each continuation."""
    [ids] = prompts(20, seed=3)
    for number in range(16):
        output = outputs_of(number, Entropy())[0]
        [result] = finish(either, [submit(either, ids, outputs=(output,))])
        value = result if output is None else result.values[0]
        check_output(value, output, tiny.logprobs(ids))
        ids = (*ids, 5 + number)


@pytest.mark.usefixtures("adapters")
def test_adapters_have_their_own_rows(either: Any, tiny: Any) -> None:
    sequences = prompts(70, 3, 40)
    names = (None, "red", "blue")
    queries = [submit(either, i, n, outputs=(TopK(4),)) for i in sequences for n in names]
    results = iter(finish(either, queries))
    for ids in sequences:
        for name in names:
            check_output(next(results).values[0], TopK(4), tiny.logprobs(ids, name))


# -- failures -------------------------------------------------------------------------


def test_a_reduction_that_fails_fails_alone(either: Any, tiny: Any) -> None:
    sequences = prompts(9, 20, 33, 5)
    outputs = [(user_reductions.Failing(number), TopK(2)) for number in range(4)]
    results = finish(
        either, [submit(either, i, outputs=o) for i, o in zip(sequences, outputs, strict=True)]
    )
    for number, (ids, result) in enumerate(zip(sequences, results, strict=True)):
        check_output(result.values[1], TopK(2), tiny.logprobs(ids))
        if number % 2:
            assert isinstance(result.values[0], Exception)
            assert "odd and wrong" in str(result.values[0])
        else:
            assert result.values[0] == number


def test_what_cannot_travel_fails_alone(either: Any, tiny: Any) -> None:
    [ids] = prompts(30)
    outputs = (
        user_reductions.HasFunction(),
        TopK(2),
        user_reductions.CannotBeLoaded(),
        user_reductions.ReturnsFunction(),
    )
    [result] = finish(either, [submit(either, ids, outputs=outputs)])
    check_output(result.values[1], TopK(2), tiny.logprobs(ids))
    if is_local(either):
        assert result.values[0] == result.values[2] == 1
        return
    messages = ["HasFunction cannot be sent", "cannot be loaded in vLLM's process"]
    messages.append("a result of type function cannot be returned")
    for place, message in zip((0, 2, 3), messages, strict=True):
        assert isinstance(result.values[place], EvaluationError)
        assert message in str(result.values[place])


def test_a_draw_from_tokens_without_probability_is_no_token(either: Any, tiny: Any) -> None:
    [ids] = prompts(30)
    outputs = (Draw(0.5, 1.0, Mask([], TINY_VOCABULARY)), LogMass(Mask([], TINY_VOCABULARY)))
    [result] = finish(either, [submit(either, ids, outputs=outputs)])
    assert result.values == (DrawnToken(-1, -math.inf, -math.inf, 0), -math.inf)


def test_cancelled_reductions_leave_nothing(either: Any, tiny: Any) -> None:
    sequences = prompts(250, 40, 200, 7, 90)
    for _ in range(2):
        queries = [submit(either, ids, outputs=(TopK(3), None)) for ids in sequences]
        early = list(either.step())
        for query in queries[::2]:
            either.abort(query.query_id)
        remaining = {query.query_id: query for query in queries[1::2]}
        done = {item.query_id: item.result for item in early if item.query_id in remaining}
        waiting = [query for number, query in remaining.items() if number not in done]
        done |= zip((q.query_id for q in waiting), finish(either, waiting), strict=True)
        for number, query in remaining.items():
            check_output(done[number].values[0], TopK(3), tiny.logprobs(query.token_ids))
    rows(either, sequences[:1])  # the fixture then checks that no other row is left


# -- where they are computed ----------------------------------------------------------


@pytest.mark.parametrize(
    "reduction",
    [user_reductions.ProcessId(), ReductionOfFunction(user_reductions.process_ids)],
)
def test_reductions_are_computed_in_vllms_process(engine: Any, reduction: Any) -> None:
    results = finish(engine, [submit(engine, i, outputs=(reduction,)) for i in prompts(3, 4)])
    processes = {int(result.values[0]) for result in results}
    assert len(processes) == 1
    assert (os.getpid() in processes) is is_local(engine)


def test_a_row_that_nobody_asked_for_is_not_copied(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_local(engine):
        pytest.skip("the buffer is in the other process")

    def copied(*arguments: Any) -> Any:
        raise AssertionError("a row was copied or stored")

    monkeypatch.setattr("genlm.core.rows.outputs.copied_rows", copied)
    monkeypatch.setattr("torch.split_with_sizes_copy", copied)
    sequences = prompts(9, 20, 33)
    finish(engine, [submit(engine, ids, outputs=(TopK(2), Entropy())) for ids in sequences])
    engine.cache_prefix(prompts(60, seed=6)[0], None)


def test_only_results_travel(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_local(engine):
        pytest.skip("nothing travels")
    replies: list[PackedCompletions] = []

    def recorded(vllm: Any, method: str, *arguments: Any) -> list[Any]:
        results = call_workers(vllm, method, *arguments)
        if method == "genlm_collect":
            replies.extend(packed for packed, _ in results if packed)
        return results

    monkeypatch.setattr("genlm_vllm.workers.call_workers", recorded)
    sequences = [(*prompts(30)[0], i) for i in range(50)]
    drawing = [
        submit(engine, ids, outputs=(Draw(stream_uniform(i, 31), 1.0, mask(i)),))
        for i, ids in enumerate(sequences)
    ]
    finish(engine, drawing)
    assert all(packed.rows is None for packed in replies)
    counts = [len(TRANSPORT.unpack_completions(packed)) for packed in replies]
    assert sum(counts) == 50
    for count, packed in zip(counts, replies, strict=True):
        # Four numbers each, the name of their class once.
        assert len(packed.data) <= 300 + 100 * count
    outputs = pickle.dumps(Outputs(drawing[0].outputs))
    assert len(outputs) <= 450 + TINY_VOCABULARY // 8  # the mask is packed
