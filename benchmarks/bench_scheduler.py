"""How long does the scheduler take per request, on a no-op engine?

The physical limit is the time of asyncio to suspend and resume a coroutine. It is measured by a
trivial asyncio batcher: a list of futures, and a `call_soon` that completes all of them on the
same thread, without a cache, validation or cancellation. A single request must also reach the
engine's thread and return: two locks that two threads acquire alternately show the time of the
machine for this. It is several times longer between two cores of a virtual machine than on one
(`taskset -c 0`).

Each figure is the median over rounds, each of which runs all contestants. Garbage is collected
before each of them: a full collection, which takes 90 ms, would otherwise always fall into the
time of the same one.

The last lines are what a program pays that does not call `gc.freeze()` after it has loaded a
model: CPU time of all threads with the collections that Python starts by itself, with
transformers loaded, as it is and after `gc.freeze()`.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import threading
import time
from collections.abc import Awaitable, Callable

import torch
from report import print_report

from genlm import AsyncLM, BatchEngine, OutputCache, Query, Token, Vocabulary

CONCURRENT = 1000
LONE = 50
ROUNDS = 30
WAVES = 60
VOCAB_SIZE = 32


class FreeEngine(BatchEngine):
    """Answers every query with the same row, at no cost."""

    def __init__(self) -> None:
        tokens = [Token(i, bytes([i])) for i in range(VOCAB_SIZE)]
        self.vocabulary = Vocabulary(None, tokens, [str(i) for i in range(VOCAB_SIZE)])
        self._row = torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE).log()

    def evaluate(self, queries: list[Query]) -> torch.Tensor:
        return self._row.expand(len(queries), VOCAB_SIZE)


class TrivialBatcher:
    """The floor: futures in a list, answered together at the end of the turn."""

    def __init__(self) -> None:
        self._waiting: list[tuple[list[int], asyncio.Future[torch.Tensor]]] = []
        self._row = torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE).log()

    async def next_token_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._answer)
        self._waiting.append((token_ids, future))
        return await future

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        rows = self._row.expand(len(waiting), VOCAB_SIZE).unbind(0)
        for (_, future), row in zip(waiting, rows, strict=True):
            future.set_result(row.clone())


Ask = Callable[[list[int]], Awaitable[object]]


async def microseconds_each(ask: Ask, contexts: list[list[int]]) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(ask(context) for context in contexts))
    return (time.perf_counter() - start) / len(contexts) * 1e6


def microseconds_there_and_back(rounds: int = 200) -> float:
    """Median time for another thread to take a lock and release another one."""
    there, back = threading.Lock(), threading.Lock()
    there.acquire()
    back.acquire()

    def answer() -> None:
        for _ in range(rounds):
            there.acquire()
            back.release()

    thread = threading.Thread(target=answer)
    thread.start()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        there.release()
        back.acquire()
        times.append((time.perf_counter() - start) * 1e6)
    thread.join()
    return statistics.median(times)


async def measure() -> dict[str, list[float]]:
    contexts = [[i % 32, i // 32 % 32, *range(14)] for i in range(CONCURRENT)]
    uncached = AsyncLM(FreeEngine, output_cache=OutputCache(0))
    cached = AsyncLM(FreeEngine)
    contestants: dict[str, Ask] = {
        "trivial asyncio batcher": TrivialBatcher().next_token_logprobs,
        "genlm, no output cache": uncached.next_token_logprobs,
        "genlm, draws": lambda ids: uncached.draw(ids, seed=1),
        "genlm, filling the cache": cached.next_token_logprobs,
        "genlm, all in the cache": cached.next_token_logprobs,
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        cached.clear_output_cache()
        for name, ask in contestants.items():
            gc.collect()
            many = await microseconds_each(ask, contexts)
            seconds.setdefault(f"{name}, {CONCURRENT} at once", []).append(many)
        cached.clear_output_cache()
        hop = microseconds_there_and_back()
        seconds.setdefault("two threads, there and back, one alone", []).append(hop)
        for name, ask in contestants.items():
            alone = [await microseconds_each(ask, [context]) for context in contexts[:LONE]]
            seconds.setdefault(f"{name}, one alone", []).append(statistics.median(alone))
    uncached.close()
    cached.close()
    return seconds


async def with_collections() -> dict[str, list[float]]:
    """CPU time of requests in microseconds, with the garbage collections that they cause."""
    import transformers

    _ = transformers.LlamaForCausalLM
    contexts = [[i % 32, i // 32 % 32, *range(14)] for i in range(CONCURRENT)]
    llm = AsyncLM(FreeEngine, output_cache=OutputCache(0))
    seconds: dict[str, list[float]] = {}
    for name in ("all objects collected", "after gc.freeze()"):
        gc.collect()
        if name == "after gc.freeze()":
            gc.freeze()
        began = time.process_time()
        for _ in range(WAVES):
            await asyncio.gather(*map(llm.next_token_logprobs, contexts))
        each = (time.process_time() - began) / (WAVES * CONCURRENT) * 1e6
        seconds[f"{name}, {CONCURRENT} at once"] = [each]
    gc.unfreeze()
    llm.close()
    return seconds


def main() -> None:
    samples = asyncio.run(measure())
    samples |= asyncio.run(with_collections())
    floor = {
        suffix: statistics.median(samples[f"trivial asyncio batcher, {suffix}"])
        for suffix in (f"{CONCURRENT} at once", "one alone")
    }
    print_report(
        "scheduler",
        samples,
        unit="us a request",
        ratios={
            name: statistics.median(values) / floor[name.rsplit(", ", 1)[1]]
            for name, values in samples.items()
        },
    )


if __name__ == "__main__":
    main()
