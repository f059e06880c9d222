"""Law: a fault between a step and its delivery ends the requests concerned, no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from scripted import ScriptedEngine, oracle_row

from genlm import (
    AsyncLM,
    Capability,
    Completion,
    EvaluationError,
    OutputCache,
    Query,
    Reduction,
)
from genlm.core.scheduler import delivery, results, worker
from genlm.core.scheduler.request_table import RequestTable
from genlm.plugin import Reduced, TokenScores

LIMIT_S = 30
"""How long a request that should end is waited for."""

FAULTY = [5]
"""The sequence whose results are faulty."""


def answers(*requests: Any) -> list[Any]:
    """Wait for requests together; a request that never ends fails the test."""

    async def main() -> list[Any]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(main())


class Returning(ScriptedEngine):
    """Returns what a test wants for the queries of one sequence."""

    capabilities = frozenset({Capability.SCORE})

    def __init__(self, fault: Callable[[Query], Any]) -> None:
        super().__init__()
        self.fault = fault
        self.queries: dict[int, Query] = {}

    def submit(self, query: Query) -> None:
        self.queries[query.query_id] = query

    def step(self) -> Iterable[Any]:  # type: ignore[override]
        queries, self.queries = self.queries, {}
        for query in queries.values():
            if list(query.token_ids) == FAULTY:
                yield self.fault(query)
            else:
                yield Completion(query.query_id, oracle_row(query.token_ids, None, 16))

    def abort(self, query_id: int) -> None:
        self.queries.pop(query_id, None)


def completed(result: Any) -> Callable[[Query], Completion]:
    return lambda query: Completion(query.query_id, result)


SCORES = TokenScores(torch.zeros(1), torch.ones(1).bool())


@pytest.mark.parametrize(
    "result",
    [
        None,
        "a row",
        [1, 2],
        3.5,
        Reduced(()),
        Reduced((1, 2)),
        SCORES,
        torch.zeros(3),
        Ellipsis,
    ],
    ids=repr,
)
def test_a_result_of_the_wrong_kind_fails_its_request_alone(start, result) -> None:
    llm, _ = start(Returning(completed(result)))
    faulty, right, reduced = answers(
        llm.next_token_logprobs(FAULTY), llm.next_token_logprobs([4]), llm.top_tokens([6], 2)
    )
    assert isinstance(faulty, EvaluationError)
    torch.testing.assert_close(right, oracle_row([4], None, 16))
    torch.testing.assert_close(reduced.logprobs, oracle_row([6], None, 16).topk(2).values)


def test_rows_that_an_engine_has_checked_are_reduced(start) -> None:
    row = oracle_row(FAULTY, None, 16)
    llm, _ = start(Returning(lambda query: Completion(query.query_id, row, is_checked=True)))
    [alone] = answers(llm.top_tokens(FAULTY, 2))
    whole, joined = answers(llm.next_token_logprobs(FAULTY), llm.top_tokens(FAULTY, 3))
    assert torch.equal(whole, row)
    assert torch.equal(alone.logprobs, row.topk(2).values)
    assert torch.equal(joined.logprobs, row.topk(3).values)


def test_an_error_beside_a_row_fails_the_request(start) -> None:
    row, error = oracle_row(FAULTY, None, 16), EvaluationError("no row")
    llm, _ = start(Returning(lambda query: Completion(query.query_id, row, error)))
    [found] = answers(llm.next_token_logprobs(FAULTY))
    assert isinstance(found, EvaluationError)
    assert str(found) == "no row"


def test_notes_that_a_caller_adds_to_an_error_are_its_own(start) -> None:
    error = EvaluationError("no row")
    error.add_note("of the engine")
    llm, _ = start(Returning(lambda query: Completion(query.query_id, error=error)))
    first, second = answers(*(llm.next_token_logprobs(FAULTY) for _ in range(2)))
    first.add_note("of a caller")
    assert second.__notes__ == error.__notes__ == ["of the engine"]


@pytest.mark.parametrize(
    "result", [None, Reduced(()), Reduced(([1],)), torch.zeros(16), "text", SCORES], ids=repr
)
def test_a_continuation_of_the_wrong_kind_fails_its_request_alone(start, result) -> None:
    llm, _ = start(Returning(completed(result)))
    faulty, right = answers(llm.sample(FAULTY, 3), llm.next_token_logprobs([4]))
    assert isinstance(faulty, EvaluationError)
    torch.testing.assert_close(right, oracle_row([4], None, 16))


@pytest.mark.parametrize("result", [None, Reduced(()), torch.zeros(16), [0.5]], ids=repr)
def test_scores_of_the_wrong_kind_fail_their_request_alone(start, result) -> None:
    llm, _ = start(Returning(completed(result)))
    faulty, right = answers(llm.score([*FAULTY, 1]), llm.next_token_logprobs([4]))
    assert isinstance(faulty, EvaluationError)
    torch.testing.assert_close(right, oracle_row([4], None, 16))


def test_a_reduction_that_the_engine_answers_with_too_few_values_fails_alone(start) -> None:
    llm, _ = start(Returning(completed(Reduced((1,)))))
    mass, top, right = answers(
        *(llm.log_mass(FAULTY, [1]), llm.top_tokens(FAULTY, 2), llm.next_token_logprobs([4])),
    )
    for error in (mass, top):
        assert isinstance(error, EvaluationError)
        assert "1 values for a query with 2 outputs" in str(error)
    torch.testing.assert_close(right, oracle_row([4], None, 16))


@pytest.mark.parametrize("wrong", [None, (0, None), "done", 7, ()], ids=repr)
def test_what_is_no_completion_fails_the_step_and_the_engine_goes_on(start, wrong) -> None:
    llm, engine = start(Returning(lambda _query: wrong))
    for answer in answers(llm.next_token_logprobs(FAULTY), llm.next_token_logprobs([4])):
        assert isinstance(answer, EvaluationError)
        assert "Completion" in str(answer)
    engine.fault = lambda query: Completion(query.query_id, oracle_row(FAULTY, None, 16))
    [row] = answers(llm.next_token_logprobs(FAULTY))
    torch.testing.assert_close(row, oracle_row(FAULTY, None, 16))


@pytest.mark.parametrize("query_id", [[1], {}, None], ids=repr)
def test_an_impossible_query_id_ends_every_request_of_the_step(start, query_id) -> None:
    llm, _ = start(Returning(lambda _query: Completion(query_id, oracle_row([5], None, 16))))
    requests = [llm.next_token_logprobs(FAULTY)] if query_id != None else []  # noqa: E711
    for answer in answers(*requests):
        assert isinstance(answer, EvaluationError)
    [row] = answers(llm.next_token_logprobs([4]))
    torch.testing.assert_close(row, oracle_row([4], None, 16))


class Bug(Exception):
    """What a stage raises that has a bug."""


def raising(name: str, original: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Return a function that raises so many times, and then does what the original does."""
    remaining = [Bug(name)] * times

    def broken(*arguments: Any, **options: Any) -> Any:
        if remaining:
            raise remaining.pop()
        return original(*arguments, **options)

    return broken


STAGES: dict[str, tuple[Any, str]] = {
    "checking": (results, "invalid_rows"),
    "reducing": (results, "reduce_rows"),
    "storing": (OutputCache, "put"),
    "copying": (delivery, "copy_result"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_bug_at_any_stage_fails_requests_of_its_step_and_the_engine_goes_on(
    make_model: Callable[..., AsyncLM], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    class Whole(ScriptedEngine):
        """Ignores outputs, so that the core reduces."""

        def step(self) -> list[Completion]:
            pending = self._pending.take(lambda queries: queries, "Whole")
            return [
                Completion(query.query_id, oracle_row(query.token_ids, None, 16))
                for query in pending
            ]

    llm = make_model(Whole(), output_cache=OutputCache(10))
    owner, name = STAGES[stage]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(name, getattr(owner, name), 9))
        results = answers(
            llm.next_token_logprobs(FAULTY),
            llm.next_token_logprobs(FAULTY),
            llm.top_tokens([4], 2),
        )
    failed = [isinstance(result, EvaluationError) for result in results]
    expected = {
        "checking": [True, True, True],
        "reducing": [False, False, True],
        "storing": [True, True, True],
        "copying": [False, True, False],
    }
    assert failed == expected[stage]
    assert all(
        isinstance(result.__cause__, Bug) for result in results if isinstance(result, Exception)
    )
    again = answers(llm.next_token_logprobs(FAULTY), llm.top_tokens([4], 2))
    torch.testing.assert_close(again[0], oracle_row(FAULTY, None, 16))
    torch.testing.assert_close(again[1].logprobs, oracle_row([4], None, 16).topk(2).values)
    assert llm.statistics().pending == 0


class Unmeasurable:
    """An object whose memory cannot be determined."""

    @property
    def nbytes(self) -> int:
        raise Bug("nbytes")


class UnmeasurableResult(Reduction):
    """A reduction to an `Unmeasurable`."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> list[Any]:
        del rows
        return [Unmeasurable() for _ in requests]


class UnmeasurableReduction(Unmeasurable, UnmeasurableResult):
    """A reduction whose memory cannot be determined either."""


@pytest.mark.parametrize("kind", [UnmeasurableResult, UnmeasurableReduction])
def test_a_result_that_cannot_be_stored_fails_alone(
    make_model: Callable[..., AsyncLM], kind: type[Reduction]
) -> None:
    llm = make_model(ScriptedEngine(16), output_cache=OutputCache(10, max_bytes=10_000))
    row, other, failed, drawn = answers(
        llm.next_token_logprobs(FAULTY),
        llm.next_token_logprobs([4]),
        llm.reduce(FAULTY, kind()),
        llm.population([4], 3).draw(seed=1),
    )
    assert isinstance(failed, EvaluationError)
    assert isinstance(failed.__cause__, Bug)
    torch.testing.assert_close(row, oracle_row(FAULTY, None, 16))
    torch.testing.assert_close(other, oracle_row([4], None, 16))
    assert drawn.token_ids.shape == (3,)
    assert llm.cached_logprobs([4]) is not None


@pytest.mark.parametrize("stage", ["reduce_rows", "invalid_rows"])
@pytest.mark.parametrize("returned", [None, [], [None], {0: None}, 3], ids=repr)
def test_a_stage_that_returns_nonsense_ends_the_requests_of_its_step(
    make_model: Callable[..., AsyncLM],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    returned: Any,
) -> None:
    class Whole(ScriptedEngine):
        def step(self) -> list[Completion]:
            pending = self._pending.take(lambda queries: queries, "Whole")
            return [
                Completion(query.query_id, oracle_row(query.token_ids, None, 16))
                for query in pending
            ]

    llm = make_model(Whole(), output_cache=OutputCache(0))
    with monkeypatch.context() as patch:
        patch.setattr(results, stage, lambda *_: returned)
        answers(llm.top_tokens([4], 2), llm.next_token_logprobs(FAULTY))  # they end
    again = answers(llm.next_token_logprobs(FAULTY), llm.top_tokens([4], 2))
    torch.testing.assert_close(again[0], oracle_row(FAULTY, None, 16))
    torch.testing.assert_close(again[1].logprobs, oracle_row([4], None, 16).topk(2).values)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (worker, "distribute"),
        (RequestTable, "close_to_joiners"),
        (RequestTable, "finish"),
        (RequestTable, "count_batch"),
        (delivery.Delivery, "add"),
    ],
)
def test_a_bug_of_the_bookkeeping_itself_leaves_nobody_waiting(
    make_model: Callable[..., AsyncLM],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> None:
    llm = make_model(ScriptedEngine(), output_cache=OutputCache(0))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(name, getattr(owner, name), 1))
        for answer in answers(llm.next_token_logprobs(FAULTY), llm.next_token_logprobs([4])):
            assert isinstance(answer, EvaluationError)
            assert isinstance(answer.__cause__, Bug)
    statistics = llm.statistics()
    assert statistics.answered + statistics.failed == statistics.dispatched == 2
    assert statistics.abandoned == 0
    [row] = answers(llm.next_token_logprobs(FAULTY))
    torch.testing.assert_close(row, oracle_row(FAULTY, None, 16))
    assert llm.statistics().pending == 0


def test_completions_of_unknown_queries_and_those_that_come_twice_change_nothing(start) -> None:
    class Twice(ScriptedEngine):
        late: list[Completion] = []  # noqa: RUF012

        def step(self) -> list[Completion]:
            completions = super().step()
            again = [
                Completion(completion.query_id, torch.zeros(16)) for completion in completions
            ]
            late, self.late = self.late, again
            return [Completion(10**9, torch.zeros(16)), *late, *completions, *again]

    llm, _ = start(Twice())
    for token_id in range(3):
        row, top = answers(
            llm.next_token_logprobs([token_id]), llm.top_tokens([token_id, 1], 1)
        )
        torch.testing.assert_close(row, oracle_row([token_id], None, 16))
        assert top.token_ids.tolist() == [oracle_row([token_id, 1], None, 16).argmax()]
