"""A replica's engine is shared fairly, and what it leaves whole is reduced."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from genlm import DrawnToken, get_backend
from genlm.core.rows.reductions import Draw
from genlm.plugin import (
    Completion,
    EvaluationError,
    GroupReduction,
    PositionReduction,
    Query,
    Reduction,
)
from genlm_ray import serving_loop
from genlm_ray.serving_loop import SHARED_ROWS, ServingLoop

TIMEOUT_S = 60


class Gated:
    """The reference engine behind a gate, which records the batches that it evaluates."""

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
        self.pending = [one for one in self.pending if one.query_id != query_id]

    def step(self) -> Sequence[Completion]:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        batch, self.pending = self.pending, []
        self.batches.append(batch)
        rows = self.inner.evaluate(batch)  # whole, whatever was asked of them
        return [
            Completion(query.query_id, row.clone())
            for query, row in zip(batch, rows, strict=True)
        ]


def _started():
    engine = Gated()
    return ServingLoop(lambda: engine, on_death=lambda _error: None), engine


def _attached(loop, name):
    finished = threading.Event()
    loop.attach(name, finished.set)
    return finished


def _all_of(loop, name, finished, count):
    found = []
    while len(found) < count:
        assert finished.wait(TIMEOUT_S)
        finished.clear()
        finished_now, _ = loop.finished(name)
        loop.discard_finished(name, len(finished_now))
        found += finished_now
    return found


def test_a_driver_with_few_queries_does_not_wait_for_one_with_many():
    loop, engine = _started()
    many, few = _attached(loop, "many"), _attached(loop, "few")
    loop.submit("many", [Query(0, (1,))])
    assert engine.entered.wait(TIMEOUT_S)
    loop.submit("many", [Query(1 + i, (1, i % 250)) for i in range(1000)])
    loop.submit("few", [Query(i, (2, i)) for i in range(5)])
    engine.gate.set()
    assert len(_all_of(loop, "few", few, 5)) == 5
    _all_of(loop, "many", many, 1001)
    [with_few] = [batch for batch in engine.batches if any(q.token_ids[0] == 2 for q in batch)]
    assert engine.batches.index(with_few) == 1
    assert len(with_few) == SHARED_ROWS
    assert len(engine.batches[-1]) > SHARED_ROWS  # one driver alone fills the engine
    loop.close()


def test_a_driver_that_leaves_takes_its_queries_with_it():
    loop, engine = _started()
    _attached(loop, "gone")
    stays = _attached(loop, "stays")
    loop.submit("gone", [Query(i, (3, i)) for i in range(9)])
    assert engine.entered.wait(TIMEOUT_S)
    loop.submit("gone", [Query(9 + i, (4, i)) for i in range(9)])
    loop.detach("gone")
    engine.gate.set()
    loop.submit("stays", [Query(0, (5,))])
    _all_of(loop, "stays", stays, 1)
    assert loop.drivers == {"stays": 0}
    assert not any(query.token_ids[0] == 4 for batch in engine.batches for query in batch)
    loop.close()


def test_a_driver_is_told_when_its_last_query_is_aborted():
    loop, engine = _started()
    finished = _attached(loop, "one")
    loop.submit("one", [Query(0, (1,)), Query(1, (2,))])
    assert engine.entered.wait(TIMEOUT_S)
    loop.submit("one", [Query(2, (3,))])  # waits for the next step
    loop.abort("one", [0, 1])
    assert not finished.is_set()
    assert loop.finished("one") == ([], 1)
    loop.abort("one", [2])
    assert finished.is_set()
    assert loop.finished("one") == ([], 0)
    engine.gate.set()


def test_rows_are_reduced_where_the_engine_returns_them_whole():
    loop, engine = _started()
    finished = _attached(loop, "one")
    engine.gate.set()
    loop.submit("one", [Query(7, (65, 66), outputs=(Draw(0.5), None))])
    [completion] = _all_of(loop, "one", finished, 1)
    assert completion.query_id == 7
    drawn, row = completion.result.values
    assert isinstance(drawn, DrawnToken)
    torch.testing.assert_close(row.exp().sum(), torch.tensor(1.0))
    loop.close()


def test_an_engine_that_ends_its_thread_ends_the_process():
    died = []
    over = threading.Event()

    def on_death(error: BaseException) -> None:
        died.append(error)
        over.set()

    engine = Gated()
    engine.gate.set()

    def broken():
        raise SystemExit(3)

    engine.step = broken
    loop = ServingLoop(lambda: engine, on_death)
    _attached(loop, "one")
    loop.submit("one", [Query(0, (1,))])
    assert over.wait(TIMEOUT_S)
    assert isinstance(died[0], SystemExit)


def test_contexts_are_released_while_nothing_is_asked_whatever_the_engine_raises():
    loop, engine = _started()
    released = queue.SimpleQueue()

    def release_context(adapter, key):
        released.put((adapter, key))
        raise RuntimeError("no such context")

    engine.release_context = release_context
    for key in (b"one", b"two"):
        loop.release("poet", key)
        assert released.get(timeout=TIMEOUT_S) == ("poet", key)
    finished = _attached(loop, "one")
    engine.gate.set()
    loop.submit("one", [Query(0, (1,))])
    assert len(_all_of(loop, "one", finished, 1)) == 1
    loop.close()


@dataclass(frozen=True)
class Slow(Reduction):
    """A reduction of a driver, which waits for `go` or raises what ends a process."""

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


def _open(**options):
    engine = Gated()
    engine.gate.set()
    died: list[BaseException] = []
    return ServingLoop(lambda: engine, died.append, **options), engine, died


def test_a_drivers_own_reduction_does_not_hold_up_the_engine():
    loop, engine, _ = _open()
    slow, other = _attached(loop, "slow"), _attached(loop, "other")
    go = threading.Event()
    loop.submit("slow", [Query(0, (1,), outputs=(Slow(go), Draw(0.5), None))])
    loop.submit("slow", [Query(i, (1, i)) for i in (1, 2)])
    loop.submit("other", [Query(i, (2, i)) for i in range(5)])
    assert len(_all_of(loop, "other", other, 5)) == 5
    assert len(_all_of(loop, "slow", slow, 2)) == 2  # its other queries as well
    assert loop.drivers == {"slow": 1, "other": 0}
    assert all(query.outputs == (None,) for batch in engine.batches for query in batch)
    go.set()
    [reduced] = _all_of(loop, "slow", slow, 1)
    assert reduced.query_id == 0
    value, drawn, row = reduced.result.values
    assert value == "reduced"
    assert isinstance(drawn, DrawnToken)
    torch.testing.assert_close(row.exp().sum(), torch.tensor(1.0))
    loop.close()


def test_a_drivers_own_reduction_that_takes_too_long_fails_alone_and_gets_no_second_thread():
    loop, _, _ = _open(reduction_timeout_s=0.1)
    slow = _attached(loop, "slow")
    go = threading.Event()
    loop.submit("slow", [Query(0, (1,), outputs=(Slow(go),))])
    while not loop._drivers["slow"].finished:
        loop.fail_overdue_reductions()
    [failed] = _all_of(loop, "slow", slow, 1)
    assert "has run for more than 0.1 s" in str(failed.error)
    threads = threading.active_count()
    loop.submit("slow", [Query(1, (2,), outputs=(Slow(go),)), Query(2, (2,))])
    refused, row = sorted(_all_of(loop, "slow", slow, 2), key=lambda each: each.query_id)
    assert "until it returns" in str(refused.error)
    assert torch.is_tensor(row.result)
    assert threading.active_count() == threads
    go.set()
    while loop._drivers["slow"].reducer.seconds:
        pass
    loop.submit("slow", [Query(3, (3,), outputs=(Slow(go),))])
    [again] = _all_of(loop, "slow", slow, 1)
    assert again.query_id == 3  # and no second answer to the first one
    assert again.result.values == ("reduced",)
    loop.close()


def test_a_drivers_own_reduction_cannot_end_the_process():
    loop, _, died = _open()
    one = _attached(loop, "one")
    loop.submit("one", [Query(0, (1,), outputs=(Exiting(),))])
    [failed] = _all_of(loop, "one", one, 1)
    assert "the reductions raised SystemExit" in str(failed.error)
    assert not died
    loop.close()


def test_rows_that_wait_for_a_drivers_own_reductions_are_few():
    loop, engine, _ = _open()
    slow = _attached(loop, "slow")
    _attached(loop, "other")
    go = threading.Event()
    engine.gate.clear()
    loop.submit("other", [Query(0, (9,))])
    assert engine.entered.wait(TIMEOUT_S)
    queries = [Query(i, (1, i % 250), outputs=(Slow(go),)) for i in range(1000)]
    loop.submit("slow", queries)
    engine.gate.set()
    while loop._drivers["slow"].reducer is None:
        pass
    assert sum(len(batch) for batch in engine.batches) <= 3 * SHARED_ROWS
    go.set()
    assert len(_all_of(loop, "slow", slow, 1000)) == 1000
    loop.close()


class Places(GroupReduction):
    """The largest log-probability of each position, and its place; a driver's own code."""

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
    return Query(
        query_id, TEXT[:-1], outputs=(PositionReduction(reduction),), targets=TEXT[start:]
    )


def _with_small_parts(monkeypatch, **options):
    monkeypatch.setattr(serving_loop, "_TEXT_VALUES", 0)
    engine = get_backend("reference")("demo")
    died: list[BaseException] = []
    return ServingLoop(lambda: engine, died.append, **options), engine, died


def test_a_drivers_own_reduction_of_a_text_is_computed_in_parts_on_its_thread(monkeypatch):
    loop, engine, _ = _with_small_parts(monkeypatch)
    one, other = _attached(loop, "one"), _attached(loop, "other")
    go = threading.Event()
    slow = Places(lambda: go.wait(TIMEOUT_S))
    loop.submit("one", [_text(3, slow), Query(4, (5,))])
    loop.submit("other", [Query(i, (2, i)) for i in range(5)])
    assert len(_all_of(loop, "other", other, 5)) == 5
    [row] = _all_of(loop, "one", one, 1)  # its other query as well
    assert row.query_id == 4
    go.set()
    [found] = _all_of(loop, "one", one, 1)
    assert found.query_id == 3
    [(largest, places)] = found.result.values
    assert places.tolist() == list(range(190))
    rows = engine.evaluate([Query(i, TEXT[:i]) for i in range(10, 200)])
    torch.testing.assert_close(largest, rows.amax(-1))
    assert max(map(len, slow.pieces)) <= SHARED_ROWS
    assert slow.threads == {"genlm-reductions"}
    loop.close()


def test_a_drivers_own_reduction_of_a_text_fails_alone(monkeypatch):
    loop, _, died = _with_small_parts(monkeypatch)
    one = _attached(loop, "one")

    def refuse():
        raise ArithmeticError("no result")

    def leave():
        raise SystemExit(3)

    refused, left = Places(refuse), Places(leave)
    for reduction, message in ((refused, "Places.compute raised Arith"), (left, "SystemExit")):
        loop.submit("one", [_text(0, reduction)])
        [failed] = _all_of(loop, "one", one, 1)
        assert isinstance(failed.error, EvaluationError)
        assert message in str(failed.error)
        assert len(reduction.pieces) == 1  # the rest of the text is not computed
    loop.submit("one", [_text(1, Places(), 150)])
    [found] = _all_of(loop, "one", one, 1)
    assert found.result.values[0][1].tolist() == list(range(50))
    assert not died
    loop.close()


def test_a_text_whose_query_is_aborted_is_not_continued(monkeypatch):
    loop, _, _ = _with_small_parts(monkeypatch)
    one = _attached(loop, "one")
    entered, go = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert go.wait(TIMEOUT_S)

    aborted, later = Places(wait), Places()
    loop.submit("one", [_text(0, aborted)])
    assert entered.wait(TIMEOUT_S)
    loop.abort("one", [0])
    assert loop.finished("one") == ([], 0)
    loop.submit("one", [_text(1, later)])
    go.set()
    [found] = _all_of(loop, "one", one, 1)
    assert found.query_id == 1
    assert len(aborted.pieces) == 1
    assert len(later.pieces) == 3
    loop.close()


def test_a_drivers_own_reduction_of_a_text_has_a_time_limit(monkeypatch):
    loop, _, _ = _with_small_parts(monkeypatch, reduction_timeout_s=0.1)
    one = _attached(loop, "one")
    go = threading.Event()
    loop.submit("one", [_text(0, Places(lambda: go.wait(TIMEOUT_S)))])
    while not loop._drivers["one"].finished:
        loop.fail_overdue_reductions()
    loop.submit("one", [_text(1, Places())])
    first, second = _all_of(loop, "one", one, 2)
    assert "has run for more than 0.1 s" in str(first.error)
    assert "until it returns" in str(second.error)
    go.set()
    while loop._drivers["one"].reducer.seconds:
        pass
    loop.submit("one", [_text(2, Places())])
    [found] = _all_of(loop, "one", one, 1)
    assert found.query_id == 2
    assert len(found.result.values[0][0]) == 190
    loop.close()


def test_a_call_that_was_cancelled_does_not_end_the_engine():
    loop, engine, died = _open()
    engine.gate.clear()
    one = _attached(loop, "one")
    loop.submit("one", [Query(0, (1,))])
    assert engine.entered.wait(TIMEOUT_S)
    called = threading.Event()
    assert loop.call(lambda _: called.set()).cancel()
    after = loop.call(lambda _: "after")
    engine.gate.set()
    assert after.result(TIMEOUT_S) == "after"
    assert not called.is_set()
    assert len(_all_of(loop, "one", one, 1)) == 1
    assert not died
    loop.close()
