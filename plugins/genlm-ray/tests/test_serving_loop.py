"""A replica's engine is shared fairly, and what it leaves whole is reduced."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from genlm import DrawnToken, get_backend
from genlm.core.reductions import Draw
from genlm.plugin import Completion, Query
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
        found += loop.take_finished(name)[0]
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
    assert loop.take_finished("one") == ([], 1)
    loop.abort("one", [2])
    assert finished.is_set()
    assert loop.take_finished("one") == ([], 0)
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
