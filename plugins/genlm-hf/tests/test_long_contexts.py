"""A context longer than a pass is computed in several steps, between which others run."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from genlm import AsyncLM, OutputCache, Query
from genlm.core.rows.reductions import TopK
from genlm_hf.engine import HFEngine

from .population import Oracle
from .test_scores import right_scores
from .tiny import alone, ids_of_lengths

PASS, LATE = 10, 299

Ids = list[int]
Request = Callable[[AsyncLM], Awaitable[Any]]


class Passes:
    """The ids of each forward pass of a model; the first pass waits for `let_go`."""

    def __init__(self, model: Any) -> None:
        self.ids: list[Ids] = []
        self.begun, self.let_go = threading.Event(), threading.Event()
        model.model.embed_tokens.register_forward_pre_hook(self._record)

    def _record(self, _: Any, args: Any) -> None:
        self.ids.append(args[0].flatten().tolist())
        self.begun.set()
        assert self.let_go.wait(60)

    def first_with(self, token_id: int) -> int:
        return next(place for place, ids in enumerate(self.ids) if token_id in ids)


TEXTS = [[i if i != LATE else 5 for i in ids] for ids in ids_of_lengths(60, 60, 60)]
MEMBERS = TEXTS * 4

# Requests for rows, and the sequences of the rows.
ROWS: dict[str, tuple[Request, list[Ids]]] = {
    "rows": (lambda llm: llm.batch_next_token_logprobs(TEXTS), TEXTS),
    "a context": (lambda llm: llm.context(TEXTS[0]).next_token_logprobs(), TEXTS[:1]),
    "a population": (
        lambda llm: llm.population(TEXTS[0], 20).next_token_logprobs(),
        TEXTS[:1] * 20,
    ),
    "populations": (lambda llm: llm.population(MEMBERS).next_token_logprobs(), MEMBERS),
}
LATE_REQUESTS: dict[str, tuple[Request, list[Ids]]] = {
    "a row": (lambda llm: llm.next_token_logprobs([LATE, 7]), [[LATE, 7]]),
    "a population": (
        lambda llm: llm.population([[LATE, i] for i in range(9)]).next_token_logprobs(),
        [[LATE, i] for i in range(9)],
    ),
}


@pytest.fixture(params=["packed", "slot_cache"])
def build(request: pytest.FixtureRequest, llama: Any, tokenizer: Any) -> Callable[[], HFEngine]:
    options = {"execution_path": request.param, "max_tokens_per_batch": PASS}
    return lambda: HFEngine.from_model(llama, tokenizer, self_test=False, **options)


def late_results(build: Callable[[], HFEngine], model: Any, long: Request, late: str) -> Any:
    """Send a request during the first pass of a long one; check the row and when it came.

    Returns:
        The result of the long request, and the number of passes.
    """
    oracle, engine = Oracle(model), build()
    passes = Passes(model)
    request, sequences = LATE_REQUESTS[late]

    async def main(llm: AsyncLM) -> list[Any]:
        first = asyncio.ensure_future(long(llm))
        await asyncio.to_thread(passes.begun.wait, 60)
        second = asyncio.ensure_future(request(llm))
        await asyncio.sleep(0)
        passes.let_go.set()
        return await asyncio.gather(first, second)

    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:
        result, rows = asyncio.run(main(llm))
    assert oracle.largest_error(sequences, list(rows.view(len(sequences), -1))) <= 1e-4
    assert passes.first_with(LATE) <= 2
    return result, len(passes.ids)


@pytest.mark.parametrize("late", LATE_REQUESTS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_request_waits_for_two_passes_of_rows(
    build: Callable[[], HFEngine], llama: Any, kind: str, late: str
) -> None:
    oracle = Oracle(llama)
    request, sequences = ROWS[kind]
    rows, passes = late_results(build, llama, request, late)
    rows = list(torch.as_tensor(rows).view(len(sequences), -1))
    assert oracle.largest_error(sequences, rows) <= 1e-4
    long_passes = 6 * len(set(map(tuple, sequences)))
    assert long_passes < passes <= long_passes + 4  # nine members are computed in parts


@pytest.mark.parametrize("late", LATE_REQUESTS)
def test_a_request_waits_for_two_passes_of_scores(
    build: Callable[[], HFEngine], llama: Any, late: str
) -> None:
    model = copy.deepcopy(llama)
    scores, _ = late_results(build, llama, lambda llm: llm.batch_score(TEXTS, 3), late)
    for ids, logprobs in zip(TEXTS, scores, strict=True):
        assert (logprobs - right_scores(model, ids, 3)[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("late", LATE_REQUESTS)
def test_a_request_waits_for_two_passes_of_a_reduction(
    build: Callable[[], HFEngine], llama: Any, late: str
) -> None:
    model, ids = copy.deepcopy(llama), TEXTS[0]
    columns, _ = late_results(build, llama, lambda llm: llm.reduce_text(ids, TopK(1)), late)
    for end, (logprobs, tokens) in enumerate(zip(*columns, strict=True), start=1):
        row = alone(model, ids[:end])
        assert abs(row[tokens[0]] - logprobs[0]) <= 1e-4
        assert abs(row.max() - logprobs[0]) <= 1e-4


@pytest.mark.parametrize("targets", [(), (7, 8)])
def test_weights_that_change_between_two_passes_apply_to_the_whole_context(
    build: Callable[[], HFEngine], llama: Any, targets: tuple[int, ...]
) -> None:
    engine, ids = build(), TEXTS[0]
    engine.submit(Query(0, tuple(ids), targets=tuple([*ids, 7][1:]) if targets else ()))
    assert engine.step() == []
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight += 0.3
    while not (completions := engine.step()):
        pass
    result: Any = completions[0].result
    if targets:
        expected = right_scores(llama, [*ids, 7], 1)[0]
        assert (result.logprobs - expected).abs().max() <= 1e-4
    else:
        assert (result - alone(llama, ids)).abs().max() <= 1e-4


def test_new_weights_wait_for_all_passes_of_earlier_contexts(
    build: Callable[[], HFEngine], llama: Any
) -> None:
    oracle, engine, ids = Oracle(llama), build(), TEXTS[0]
    passes = Passes(llama)
    changed = {name: value * 1.1 for name, value in llama.state_dict().items()}

    async def main(llm: AsyncLM) -> list[Any]:
        first = asyncio.ensure_future(llm.next_token_logprobs(ids))
        await asyncio.to_thread(passes.begun.wait, 60)
        update = asyncio.ensure_future(llm.aupdate_weights(changed))
        while not llm._scheduler._worker._calls:
            await asyncio.sleep(0)
        second = asyncio.ensure_future(llm.next_token_logprobs(ids))
        passes.let_go.set()
        return await asyncio.gather(first, update, second)

    with AsyncLM(lambda: engine) as llm:
        first, _, second = asyncio.run(main(llm))
    assert oracle.largest_error([ids], [first]) <= 1e-4
    assert (second - alone(llama, ids)).abs().max() <= 1e-4
    assert (second - first).abs().max() > 1e-3
