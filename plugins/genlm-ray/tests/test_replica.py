"""A replica in this process: failed messages, limits and supervision."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections import deque

import numpy as np
import pytest

from genlm import AdapterLimitError, ModelLoadError
from genlm.plugin import (
    EvaluationError,
    Generation,
    GroupQuery,
    Lineage,
    Query,
    Rows,
    TokenSequence,
    pack_sequences,
)
from genlm_ray import wire
from genlm_ray.replica import Replica
from genlm_ray.spec import ReplicaSpec, ServingLimits
from genlm_ray.wire import ReplicaRequest

SPEC = ReplicaSpec("reference", "demo", driver_timeout_s=60.0, name="chat")


def _run(main, **changes):
    """Run a test with a replica of the reference engine and a timeout of a minute."""

    async def run():
        served = Replica(dataclasses.replace(SPEC, **changes))
        try:
            await main(served, (await served._wait_until_loaded()).engine.engine)
        finally:
            if served._supervisor is not None:
                served._supervisor.cancel()
            served._shared.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def _request(*prompts, first=0):
    queries = [Query(first + i, ids) for i, ids in enumerate(prompts)]
    return ReplicaRequest(wire.pack_queries(queries))


def _answers(response):
    return wire.TRANSPORT.unpack_completions(response[0])


def test_a_program_may_have_so_many_sequences_of_populations():
    async def main(served, _engine):
        await served.attach("driver", 1, {}, [])
        places = np.arange(3)
        lineage = Lineage.of_sequences([TokenSequence.of([i]) for i in range(3)])

        async def answered(number):
            group = GroupQuery(number, Generation(lineage), places, places, Rows())
            request = wire.ReplicaRequest(groups=[wire.pack_group(group, 0)])
            [completion] = _answers(await served.exchange(1, request))
            return completion.error

        assert await answered(0) is None
        with pytest.raises(EvaluationError, match=r"at most 5 sequences .* 6"):
            await answered(1)
        await served.notify(1, wire.ReplicaRequest(dropped=[0]))
        assert await answered(2) is None

    _run(main, limits=ServingLimits(sequences=5))


def test_only_the_sequences_of_the_last_step_count():
    """A replica that computes the population of a lost one receives the earlier steps too."""

    async def main(served, _engine):
        await served.attach("driver", 1, {}, [])
        generation = Generation(Lineage.of_sequences([TokenSequence.of([i]) for i in range(2)]))
        for _ in range(9):
            generation, _ = generation.extended(np.arange(2), np.arange(2)[:, None])
        [completion] = _answers(await served.exchange(1, _group_request(0, generation)))
        assert completion.error is None
        assert served._sessions[1].generations.sequences == 2

    _run(main, limits=ServingLimits(sequences=5))


def test_a_replica_serves_so_many_programs():
    async def main(served, _engine):
        await served.attach("one", 1, {}, [])
        with pytest.raises(ModelLoadError, match=r"at most 1 clients .* 2"):
            await served.attach("two", 2, {}, [])
        await served.attach("one", 3, {}, [])  # replaces the first session
        await served.detach(3)
        await served.attach("two", 4, {}, [])

    _run(main, limits=ServingLimits(clients=1))


def test_sessions_are_supervised_while_an_adapter_is_loaded():
    async def main(served, _engine):
        await served.attach("one", 1, {}, [])
        await served.attach("two", 2, {}, [])
        other = served._sessions[2]
        other.seen_s = math.inf
        checked = asyncio.Event()
        async with served._loading:
            while 1 in served._sessions:  # it ends, and waits until it can free its adapters
                await asyncio.sleep(0)
            other.time_out_reductions = checked.set
            await checked.wait()

    _run(main, driver_timeout_s=0.1)


def test_a_program_may_load_so_many_adapters(tmp_path):
    (tmp_path / "text.txt").write_text("roses are red\n\nviolets are blue\n")
    path = str(tmp_path)

    async def main(served, engine):
        await served.attach("driver", 1, {"poet": path}, [])
        with pytest.raises(AdapterLimitError, match=r"at most 1 adapters .* 2"):
            await served.configure(1, {"poet": path, "bard": path}, [])
        assert list(engine._adapters.loaded) == ["poet-driver"]
        assert await served.configure(1, {"bard": path}, [])
        assert list(engine._adapters.loaded) == ["bard-driver"]

    _run(main, limits=ServingLimits(adapters=1))


class RecordedPrefixes:
    """Records the cached prefixes of an engine."""

    def __init__(self, engine):
        self.prefixes = []
        engine.cache_prefix = lambda ids, adapter: self.prefixes.append((tuple(ids), adapter))
        engine.clear_prefix_cache = self.prefixes.clear


def test_prefixes_are_kept_for_their_program_and_as_long_as_it_is_attached():
    async def main(served, engine):
        recorded = RecordedPrefixes(engine)
        first, second, third = ((1, 2), None), ((3, 4), None), ((5,), None)
        await served.attach("one", 1, {}, [])
        await served.attach("two", 2, {}, [((7, 8), None)])
        assert await served.configure(1, {}, [first, second, first])
        with pytest.raises(EvaluationError, match=r"at most 4 prefix tokens .* 5"):
            await served.configure(1, {}, [first, second, third])
        assert recorded.prefixes == [((7, 8), None), first, second]
        await served.configure(1, {}, [])
        assert recorded.prefixes == [((7, 8), None)]
        await served.configure(1, {}, [third])
        await served.detach(2)
        assert recorded.prefixes == [third]

    _run(main, limits=ServingLimits(prefix_tokens=4))


def test_prefixes_of_an_adapter_that_was_freed_are_not_computed_again(tmp_path):
    (tmp_path / "text.txt").write_text("roses are red\n\nviolets are blue\n")

    async def main(served, engine):
        recorded = RecordedPrefixes(engine)
        await served.attach("one", 1, {"poet": str(tmp_path)}, [((1, 2), "poet")])
        assert recorded.prefixes == [((1, 2), "poet-one")]
        await served.configure(1, {}, [])
        await served.attach("two", 2, {}, [((3,), None)])
        await served.configure(2, {}, [])
        assert recorded.prefixes == []

    _run(main)


def test_prefixes_of_an_adapter_of_the_engine_are_freed():
    async def main(served, engine):
        recorded = RecordedPrefixes(engine)
        engine.adapters = ("poet",)
        description = await served.attach("one", 1, {}, [((1, 2), "poet")])
        assert description["adapters"] == ("poet",)
        assert recorded.prefixes == [((1, 2), "poet")]
        await served.configure(1, {}, [])
        assert recorded.prefixes == []

    _run(main)


def test_a_program_that_leaves_while_the_model_is_loaded_does_not_prevent_it(monkeypatch):
    may_load = threading.Event()
    build = Replica._build

    def slow(self):
        assert may_load.wait(60)
        return build(self)

    monkeypatch.setattr(Replica, "_build", slow)

    async def run():
        served = Replica(SPEC)
        attaching = asyncio.create_task(served.attach("driver", 1, {}, []))
        await asyncio.sleep(0)
        attaching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attaching
        may_load.set()
        description = await served.attach("other", 2, {}, [])
        assert description["max_context"] == served._shared.engine.max_context
        served._supervisor.cancel()
        served._shared.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def _group_request(number, generation):
    places = np.arange(len(generation.lineage))
    group = GroupQuery(number, generation, places, places, Rows())
    return ReplicaRequest(groups=[wire.pack_group(group, 0)])


def test_contexts_are_released_although_the_queries_of_the_message_are_refused(monkeypatch):
    async def main(served, _engine):
        await served.attach("driver", 1, {}, [])
        released = []
        monkeypatch.setattr(served._shared, "release", released.append)
        context = TokenSequence.of([1, 2])
        message = _group_request(0, Generation(Lineage.of_sequences([context, context])))
        message.released = [None], pack_sequences([context])
        with pytest.raises(EvaluationError, match="at most 1 sequences"):
            await served.exchange(1, message)
        assert released == [[(None, context.key)]]

    _run(main, limits=ServingLimits(sequences=1))


def test_a_message_may_arrive_after_the_generations_of_its_aborted_queries_are_dropped():
    """Ray starts a small message before a large one that was sent earlier."""

    async def main(served, _engine):
        await served.attach("driver", 1, {}, [])
        first = Generation(Lineage.of_sequences([TokenSequence.of([1, 2])]))
        await served.exchange(1, _group_request(9, first))
        first.keep(wire.PlacedGeneration(0, 9, deque()))
        lineage, _ = first.lineage.extended(np.arange(1), np.arange(1))
        message = _group_request(10, Generation(lineage, first))
        message.queries = _request([1], [2]).queries
        await served.notify(1, ReplicaRequest(dropped=[0, 10, 9]))
        await served.notify(1, message)
        session = served._sessions[1]
        assert session.generations.sequences == 0
        answered = set()
        while session.unanswered or session.finished:
            answers = _answers(await served.exchange(1, ReplicaRequest()))
            answered |= {query_id for query_id, *_ in answers}
        assert answered == {0, 1}  # the driver ignores the first, which it has aborted

    _run(main)
