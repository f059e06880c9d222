"""A replica's engine is shared fairly, and user-defined reductions block no other driver."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlm import DrawnToken, get_backend
from genlm.core.rows.group_reductions import TopColumns
from genlm.core.rows.reductions import Draw
from genlm.core.rows.row_functions import ColumnsOfFunction, ReductionOfFunction
from genlm.plugin import (
    Completion,
    EvaluationError,
    Generation,
    GroupQuery,
    GroupReduction,
    Lineage,
    Query,
    Reduction,
)
from genlm_ray import client_reductions
from genlm_ray.client_reductions import SHARED_ROWS, has_client_code
from genlm_ray.session import Session, SharedEngine
from genlm_ray.spec import UNLIMITED, ServingLimits
from genlm_ray.wire import pack_queries, unpack_queries

TIMEOUT_S = 60


class Gated:
    """The reference engine; its steps wait for `gate` and are recorded in `batches`."""

    def __init__(self) -> None:
        self.inner = get_backend("reference")("demo")
        self.vocabulary, self.max_context = self.inner.vocabulary, None
        self.capabilities = frozenset()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.batches: list[list[Query]] = []
        self.pending: list[Query] = []
        self.statistics, self.close = self.inner.statistics, self.inner.close

    def submit(self, query: Query) -> None:
        self.pending.append(query)

    def abort(self, query_id: int) -> None:
        self.pending = [query for query in self.pending if query.query_id != query_id]

    def step(self) -> Sequence[Completion]:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        batch, self.pending = self.pending, []
        self.batches.append(batch)
        rows = self.inner.evaluate(batch)  # rows, also for queries of reductions
        return [
            Completion(query.query_id, row.clone())
            for query, row in zip(batch, rows, strict=True)
        ]


def test_functions_of_rows_are_user_code_like_classes():
    """Replicas that several programs share call them on a thread of the program."""
    assert has_client_code(Query(0, (1,), outputs=(ReductionOfFunction(len),)))
    generation, nothing = Generation(Lineage.of_sequences([])), np.arange(0)
    for reduction, expected in ((ColumnsOfFunction(len), True), (TopColumns(2, 0), False)):
        query = GroupQuery(0, generation, nothing, nothing, reduction)
        assert has_client_code(query) == expected
    assert not has_client_code(Query(0, (1,), outputs=(Draw(0.5), None)))


def _run(main, engine=None, *, is_open=True):
    """Run `main(shared, engine)` on an event loop with a timeout of a minute."""

    async def run():
        used = Gated() if engine is None else engine
        if is_open and isinstance(used, Gated):
            used.gate.set()
        shared = SharedEngine(lambda: used, 3600.0)
        try:
            await main(shared, used)
        finally:
            if isinstance(used, Gated):
                used.gate.set()
            await asyncio.to_thread(shared.close)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


async def _completions(session, count):
    completions = []
    while len(completions) < count:
        session.changed.clear()
        completions += session.finished
        session.finished = []
        if len(completions) < count:
            await session.changed.wait()
    return completions


def _session(shared, reduction_s=3600.0):
    return Session("driver", shared, ServingLimits(reduction_s=reduction_s))


async def _timed_out(session, count):
    """Return completions, while reductions are checked as `Replica` does."""
    while len(session.finished) < count:
        session.time_out_reductions()
        await asyncio.sleep(0)
    return await _completions(session, count)


def _is_overdue(session):
    return session._reducer.engine.reduction_s > session._limits.reduction_s


def _is_reducing(session):
    return session._reducer is not None and session._reducer.engine.reduction_s > 0


async def _entered(engine):
    assert await asyncio.to_thread(engine.entered.wait, TIMEOUT_S)


def test_a_driver_with_few_queries_does_not_wait_for_one_with_many():
    async def main(shared, engine):
        many, few = _session(shared), _session(shared)
        many.submit([Query(0, (1,))])
        await _entered(engine)
        few.submit([Query(0, (2,))])
        many.submit([Query(1 + i, (1, i % 250)) for i in range(1000)])
        few.submit([Query(1 + i, (2, i)) for i in range(5)])
        engine.gate.set()
        assert len(await _completions(few, 6)) == 6
        await _completions(many, 1001)
        batches = [[query.token_ids for query in batch] for batch in engine.batches]
        with_few = [place for place, batch in enumerate(batches) if (2, 4) in batch]
        assert with_few == [2]  # the engine had the second batch when it was submitted
        assert max(map(len, batches[:3])) <= SHARED_ROWS
        assert max(map(len, batches)) > SHARED_ROWS  # one driver alone fills the engine

    _run(main, is_open=False)


@pytest.mark.parametrize("has_company", [False, True])
def test_a_query_does_not_wait_for_all_queries_of_an_earlier_request(has_company):
    """If the session of another driver has queries, few are submitted, otherwise all."""
    gate, entered = threading.Event(), threading.Event()
    batches: list[list[tuple[int, ...]]] = []

    def choose(pending):
        entered.set()
        assert gate.wait(TIMEOUT_S)
        batches.append([query.token_ids for query in pending[:2]])
        return pending[:2]

    def step_of(token_ids):
        [step] = [step for step, chosen in enumerate(batches) if token_ids in chosen]
        return step

    engine = get_backend("reference")("demo")
    engine.choose = choose

    async def main(shared, engine):
        session, other = _session(shared), _session(shared)
        if has_company:
            other.submit([Query(0, (9,))])
        batch = [Query(i, (1, i), turn=1000 + i) for i in range(200)]  # after 1,000 turns
        session.submit(unpack_queries(pack_queries(batch)), turn=1000)
        if has_company:
            other.submit([Query(1 + i, (9, i), turn=1 + i) for i in range(200)])
        await _entered(SimpleNamespace(entered=entered))
        later = [Query(1000 + i, (2 + i,), turn=1001 + i) for i in range(2)]
        session.submit(later, turn=1001)
        session.drop([100, 1001])
        gate.set()
        await _completions(session, 200)
        assert step_of((1, 0)) <= 2
        # With company, the engine has up to `SHARED_ROWS` queries when it begins, and when the
        # later query is submitted; it computes two in each step.
        assert step_of((2,)) <= (SHARED_ROWS + 2 if has_company else 2)
        assert not session.unanswered

    _run(main, engine)


def test_a_driver_that_leaves_takes_its_queries_with_it():
    async def main(shared, engine):
        gone, stays = _session(shared), _session(shared)
        gone.submit([Query(i, (3, i)) for i in range(9)])
        await _entered(engine)
        gone.submit([Query(9 + i, (4, i)) for i in range(9)])
        gone.end()
        stays.submit([Query(0, (5,))])
        engine.gate.set()
        await _completions(stays, 1)
        assert gone.unanswered == stays.unanswered == 0
        assert not any(query.token_ids[0] == 4 for batch in engine.batches for query in batch)
        assert gone.finished == []

    _run(main, is_open=False)


def test_a_driver_is_told_when_its_last_query_is_aborted():
    async def main(shared, engine):
        session = _session(shared)
        session.submit([Query(0, (1,)), Query(1, (2,))])
        await _entered(engine)
        session.submit([Query(2, (3,))])  # waits for the next step
        session.drop([0, 1])
        assert (session.finished, session.unanswered) == ([], 1)
        session.changed.clear()
        session.drop([2])
        assert session.changed.is_set()
        assert (session.finished, session.unanswered) == ([], 0)

    _run(main, is_open=False)


def test_rows_are_reduced_where_the_engine_returns_them_whole():
    async def main(shared, _engine):
        session = _session(shared)
        session.submit([Query(7, (65, 66), outputs=(Draw(0.5), None))])
        session.submit([Query(8, (65, 66))])
        completion, row_completion = await _completions(session, 2)
        assert row_completion.is_checked  # the program does not check the row again
        assert completion.query_id == 7
        drawn, row = completion.result.values
        assert isinstance(drawn, DrawnToken)
        torch.testing.assert_close(row.exp().sum(), torch.tensor(1.0))

    _run(main)


def test_contexts_are_released_without_queries_and_although_the_engine_raises():
    released = queue.SimpleQueue()

    async def main(shared, engine):
        def release_context(adapter, key):
            released.put((adapter, key))
            raise RuntimeError("no such context")

        engine.release_context = release_context
        for key in (b"one", b"two"):
            shared.release([("poet", key)])
        for key in (b"one", b"two"):
            assert await asyncio.to_thread(released.get, timeout=TIMEOUT_S) == ("poet", key)
        session = _session(shared)
        session.submit([Query(0, (1,))])
        assert len(await _completions(session, 1)) == 1

    _run(main)


@dataclass(frozen=True)
class Slow(Reduction):
    """A user-defined reduction that waits for `go`."""

    go: threading.Event

    @classmethod
    def compute(cls, rows, requests):
        assert requests[0].go.wait(TIMEOUT_S)
        return ["reduced"] * len(requests)


@dataclass(frozen=True)
class Exiting(Reduction):
    @classmethod
    def compute(cls, rows, requests):
        raise SystemExit(3)


def test_a_user_defined_reduction_does_not_hold_up_the_engine():
    go = threading.Event()

    async def main(shared, engine):
        slow, other = _session(shared), _session(shared)
        slow.submit([Query(0, (1,), outputs=(Slow(go), Draw(0.5), None))])
        slow.submit([Query(i, (1, i)) for i in (1, 2)])
        other.submit([Query(i, (2, i)) for i in range(5)])
        assert len(await _completions(other, 5)) == 5
        assert len(await _completions(slow, 2)) == 2  # its other queries as well
        assert (slow.unanswered, other.unanswered) == (1, 0)
        assert all(query.outputs == (None,) for batch in engine.batches for query in batch)
        go.set()
        [reduced] = await _completions(slow, 1)
        assert reduced.query_id == 0
        value, drawn, row = reduced.result.values
        assert value == "reduced"
        assert isinstance(drawn, DrawnToken)
        torch.testing.assert_close(row.exp().sum(), torch.tensor(1.0))

    _run(main)


def test_a_user_defined_reduction_that_takes_too_long_fails_alone_and_gets_no_second_thread():
    go = threading.Event()

    async def main(shared, _engine):
        slow = _session(shared, reduction_s=0.1)
        slow.submit([Query(0, (1,), outputs=(Slow(go),))])
        [failed] = await _timed_out(slow, 1)
        assert "has run for more than 0.1 s" in str(failed.error)
        threads = set(threading.enumerate())
        slow.submit([Query(1, (2,), outputs=(Slow(go),)), Query(2, (2,))])
        refused, row = sorted(await _completions(slow, 2), key=lambda item: item.query_id)
        assert "until it returns" in str(refused.error)
        assert torch.is_tensor(row.result)
        assert threads.issuperset(threading.enumerate())
        go.set()
        while _is_overdue(slow):
            await asyncio.sleep(0)
        slow._limits = UNLIMITED  # the thread may wait for a core
        slow.submit([Query(3, (3,), outputs=(Slow(go),))])
        [again] = await _completions(slow, 1)
        assert again.query_id == 3  # the first query has no second completion
        assert again.result.values == ("reduced",)

    _run(main)


def test_a_user_defined_reduction_cannot_end_the_process():
    async def main(shared, _engine):
        session = _session(shared)
        session.submit([Query(0, (1,), outputs=(Exiting(),))])
        [failed] = await _completions(session, 1)
        [error] = failed.result.values
        assert "Exiting.compute raised SystemExit" in str(error)
        assert not shared.closed

    _run(main)


def test_few_rows_wait_for_user_defined_reductions():
    go = threading.Event()

    async def main(shared, engine):
        slow = _session(shared)
        slow.submit([Query(i, (1, i % 250), outputs=(Slow(go),)) for i in range(1000)])
        while not _is_reducing(slow):
            await asyncio.sleep(0)
        assert sum(len(batch) for batch in engine.batches) <= SHARED_ROWS
        go.set()
        assert len(await _completions(slow, 1000)) == 1000

    _run(main)


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_query_that_is_aborted_does_not_hold_up_those_that_are_reduced_with_it(aborted):
    go = threading.Event()

    async def main(shared, _engine):
        session = _session(shared)
        session.submit([Query(i, (1, i), outputs=(Slow(go),)) for i in range(3)])
        while not _is_reducing(session):
            await asyncio.sleep(0)
        session.drop([aborted])
        go.set()
        completions = await _completions(session, 2)
        assert {item.query_id for item in completions} == {0, 1, 2} - {aborted}
        assert all(item.result.values == ("reduced",) for item in completions)

    _run(main)


class Places(GroupReduction):
    """User-defined reduction: the largest log-probability of each position, and its index."""

    def __init__(self, act=lambda: None) -> None:
        self.act = act
        self.pieces: list[list[int]] = []
        self.threads: set[str] = set()

    def compute(self, rows, row_of, members):
        self.threads.add(threading.current_thread().name)
        self.pieces.append(members.tolist())
        self.act()
        return rows[row_of].amax(-1), members


TEXT = tuple((7 * i) % 250 for i in range(200))


def _text(query_id: int, reduction: GroupReduction, start: int = 10) -> Query:
    return Query(query_id, TEXT[:-1], outputs=(reduction,), targets=TEXT[start:])


def _run_with_small_parts(monkeypatch, main):
    monkeypatch.setattr(client_reductions, "_TEXT_VALUES", 0)
    _run(main, get_backend("reference")("demo"))


def test_a_user_defined_reduction_of_a_text_is_computed_in_parts_on_its_thread(monkeypatch):
    go = threading.Event()

    async def main(shared, engine):
        session, other = _session(shared), _session(shared)
        slow = Places(lambda: go.wait(TIMEOUT_S))
        session.submit([_text(3, slow), Query(4, (5,))])
        other.submit([Query(i, (2, i)) for i in range(5)])
        assert len(await _completions(other, 5)) == 5
        [row] = await _completions(session, 1)  # its other query as well
        assert row.query_id == 4
        go.set()
        [completion] = await _completions(session, 1)
        assert completion.query_id == 3
        [(largest, places)] = completion.result.values
        assert places.tolist() == list(range(190))
        rows = engine.evaluate([Query(i, TEXT[:i]) for i in range(10, 200)])
        torch.testing.assert_close(largest, rows.amax(-1))
        assert max(map(len, slow.pieces)) <= SHARED_ROWS
        assert slow.threads == {"genlm-reductions"}

    _run_with_small_parts(monkeypatch, main)


def test_a_user_defined_reduction_of_a_text_fails_alone(monkeypatch):
    def refuse():
        raise ArithmeticError("no result")

    def leave():
        raise SystemExit(3)

    async def main(shared, _engine):
        session = _session(shared)
        refused, left = Places(refuse), Places(leave)
        for reduction, message in (
            (refused, "Places.compute raised Arith"),
            (left, "SystemExit"),
        ):
            session.submit([_text(0, reduction)])
            [failed] = await _completions(session, 1)
            [error] = failed.result.values
            assert isinstance(error, EvaluationError)
            assert message in str(error)
            assert len(reduction.pieces) == 1  # the rest of the text is not computed
        session.submit([_text(1, Places(), 150)])
        [completion] = await _completions(session, 1)
        assert completion.result.values[0][1].tolist() == list(range(50))

    _run_with_small_parts(monkeypatch, main)


def test_a_text_whose_query_is_aborted_is_not_continued(monkeypatch):
    entered, go = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert go.wait(TIMEOUT_S)

    async def main(shared, _engine):
        session = _session(shared)
        aborted, later = Places(wait), Places()
        session.submit([_text(0, aborted)])
        assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
        session.drop([0])
        assert (session.finished, session.unanswered) == ([], 0)
        session.submit([_text(1, later)])
        go.set()
        [completion] = await _completions(session, 1)
        assert completion.query_id == 1
        assert len(aborted.pieces) == 1
        assert len(later.pieces) == 3

    _run_with_small_parts(monkeypatch, main)


def test_a_user_defined_reduction_of_a_text_has_a_time_limit(monkeypatch):
    go = threading.Event()

    async def main(shared, _engine):
        session = _session(shared, reduction_s=0.1)
        session.submit([_text(0, Places(lambda: go.wait(TIMEOUT_S)))])
        [first] = await _timed_out(session, 1)
        session.submit([_text(1, Places())])
        [second] = await _completions(session, 1)
        assert "has run for more than 0.1 s" in str(first.error)
        assert "until it returns" in str(second.error)
        go.set()
        while _is_overdue(session):
            await asyncio.sleep(0)
        session._limits = UNLIMITED
        session.submit([_text(2, Places())])
        [completion] = await _completions(session, 1)
        assert completion.query_id == 2
        assert len(completion.result.values[0][0]) == 190

    _run_with_small_parts(monkeypatch, main)
