"""Laws: an engine may let groups wait for callers that continue what it would free for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch

from genlm import AsyncLM, BatchEngine, Query, Token, Vocabulary
from genlm.core.queries.query import GroupQuery
from genlm.core.scheduler import batching

TIMEOUT_S = 60.0
SIZE = 8


class OneAtATime(BatchEngine):
    """Has room for one population: the one with the smallest first token."""

    def __init__(self) -> None:
        tokens = [Token(i, bytes([65 + i])) for i in range(SIZE)]
        self.vocabulary = Vocabulary(None, tokens, [str(token) for token in tokens])
        self.order: list[int] = []
        self.entered, self.released = threading.Event(), threading.Event()
        self.released.set()

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        self.entered.set()
        assert self.released.wait(TIMEOUT_S)
        self.order.append(queries[0].token_ids[0])
        return torch.full((len(queries), SIZE), 1 / SIZE).log()

    def choose_groups(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        return [min(pending, key=first_token)]

    def defers(self, pending: Sequence[GroupQuery]) -> bool:
        return True


def first_token(group: GroupQuery) -> int:
    return int(group.generation.lineage.sequence(0).token_ids[0])


async def steps(llm: AsyncLM, token: int, count: int) -> None:
    population = llm.population([token], SIZE)
    for step in range(count):
        drawn = await population.draw(seed=step)
        population = population.extend(drawn.token_ids)


def test_a_deferred_group_waits_while_callers_continue_their_populations(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(batching, "DEFERRAL_SHARE", 1e9)  # the callers decide, not the clock
    engine = OneAtATime()

    async def main(llm: AsyncLM) -> None:
        await asyncio.gather(*(steps(llm, token, 4) for token in (2, 1, 3)))

    with AsyncLM(lambda: engine) as llm:
        asyncio.run(asyncio.wait_for(main(llm), TIMEOUT_S))
    assert engine.order == [1] * 4 + [2] * 4 + [3] * 4


def test_a_deferred_group_is_computed_when_the_callers_ask_nothing_more(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(batching, "DEFERRAL_SHARE", 1e9)
    engine = OneAtATime()
    with AsyncLM(lambda: engine) as llm:

        async def main() -> None:
            waits = asyncio.Event()
            first = llm.population([1], SIZE)
            second = asyncio.create_task(llm.population([2], SIZE).draw(seed=0))
            await first.draw(seed=0)
            second.add_done_callback(lambda _: waits.set())
            await waits.wait()  # `first` is continued afterwards only
            await first.draw(seed=1)

        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert engine.order == [1, 2, 1]


def test_a_deferred_group_does_not_wait_for_an_event_loop_that_is_blocked() -> None:
    engine = OneAtATime()
    engine.released.clear()
    with AsyncLM(lambda: engine) as llm:
        other = threading.Thread(target=lambda: llm.population([2], SIZE).draw_sync(seed=0))

        async def main() -> None:
            request = asyncio.create_task(llm.population([1], SIZE).draw(seed=0))
            await asyncio.to_thread(engine.entered.wait, TIMEOUT_S)
            other.start()
            while llm.statistics().pending < 2:
                await asyncio.sleep(0)
            engine.released.set()
            other.join(TIMEOUT_S)  # blocks this event loop until the other one is served
            assert not other.is_alive()
            await request

        asyncio.run(main())
    assert sorted(engine.order) == [1, 2]


def test_a_closed_model_ends_deferred_groups(monkeypatch: Any) -> None:
    monkeypatch.setattr(batching, "DEFERRAL_SHARE", 1e9)
    engine = OneAtATime()

    async def main(llm: AsyncLM) -> None:
        tasks = [asyncio.create_task(steps(llm, token, 10**6)) for token in (1, 2)]
        while len(engine.order) < 5:
            await asyncio.sleep(0)
        llm.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)

    llm = AsyncLM(lambda: engine)
    asyncio.run(asyncio.wait_for(main(llm), TIMEOUT_S))
