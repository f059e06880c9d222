"""`run_chaos`: send random concurrent requests to one engine through the public interface."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import psutil

from genlm import AsyncLM, Capability, EngineClosedError, EngineDiedError, OutputCache
from genlm.testing import EngineTarget
from genlm.testing.check import CheckFailure, CheckTimeout, expect
from genlm.testing.fixture import call_within

from .barrier import CallerBarrier
from .callers import Caller, LoopCaller, ThreadCaller
from .comparison import Comparison
from .memory import Memory, expect_flat, only_new_objects
from .plan import LARGEST_POPULATION, Setting

T = TypeVar("T")

MARKS, WARM_UP = 8, 2
"""Rests, and how many of them pass before memory must stay as it is."""

LOOPS, THREADS = 2, 3
THREAD_SHARE = 0.04  # of the requests, for each thread; the loops share the rest
CACHE_ENTRIES, CACHE_BYTES = 300, 2**18
LAST_REQUESTS = 8
SURELY_COMPARED = 400  # rows, in expectation, and a hundredth of the others


@dataclass(frozen=True)
class Settings:
    """What a user can choose.

    Attributes:
        requests: How many to make, at least.
        seed: Decides what is asked, by whom, and the limits of the scheduler.
        kill_worker: Whether to kill one of the engine's processes midway; the seed decides
            which.
        engine_options: Passed to the target's `build`.
        timeout_s: Time without an answer after which requests are lost; default: the target's.
    """

    requests: int
    seed: int = 0
    kill_worker: bool = False
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True)
class Report:
    """What a run without failures did.

    Attributes:
        requests: How many were made.
        ended: How many of them ended in which way.
        compared: Rows and drawn tokens compared with true rows.
        grown: By how much memory grew after the warm-up.
        statistics: The model's, at the end.
    """

    requests: int
    ended: Mapping[str, int]
    compared: int
    grown: Memory
    statistics: Mapping[str, Any]


def run_chaos(target: EngineTarget, settings: Settings) -> Report:
    """Run the plan of a seed and check every property.

    Raises:
        CheckFailure: A property does not hold.
        CheckTimeout: Requests got no answer.
    """
    return _Chaos(target, settings).run()


class _Chaos:
    def __init__(self, target: EngineTarget, settings: Settings) -> None:
        self._target = target
        self._settings = settings
        self._timeout_s = settings.timeout_s or target.timeout_s
        self._killed = threading.Event()
        self._random = random.Random(repr((settings.seed, "scheduler")))
        self._limits = {
            "max_batch_size": self._random.choice((None, None, 5)),
            "max_pending": self._random.choice((None, None, 12)),
        }

    def run(self) -> Report:
        lm = AsyncLM(
            functools.partial(self._target.build, **self._settings.engine_options),
            name=self._target.model,
            output_cache=OutputCache(CACHE_ENTRIES, max_bytes=CACHE_BYTES),
            **self._limits,
        )
        setting = self._setting(lm)
        try:
            return self._run(lm, setting)
        finally:  # a broken engine that steps for ever would slow down all that follows
            lm.close()

    def _run(self, lm: AsyncLM, setting: Setting) -> Report:
        for name in setting.adapters:
            lm.load_lora(self._target.adapters[name], name)
        share = min(1.0, 0.01 + SURELY_COMPARED / self._settings.requests)
        comparison = Comparison(lm, self._target, share, self._random)
        callers = self._callers(lm, setting, comparison)
        with only_new_objects():
            samples = self._carried_out(lm, callers, comparison)
        made = sum(caller.requests for caller in callers)
        ended = sum((caller.ended for caller in callers), Counter[str]())
        if self._settings.kill_worker:
            self._expect_dead(lm, ended)
        else:
            self._expect_sums(lm, callers)
        grown = expect_flat(samples[WARM_UP - 1 :], made * (MARKS - WARM_UP) // MARKS)
        statistics = asdict(lm.statistics())
        ended.update(self._close_amid_requests(lm, setting))
        return Report(made, dict(ended), comparison.compared, grown, statistics)

    def _setting(self, lm: AsyncLM) -> Setting:
        target = self._target
        ids = target.token_ids
        if ids is None:
            missing = set(lm.vocabulary.missing_ids)
            ids = [i for i in range(lm.vocab_size) if i not in missing]
        room = target.max_length if lm.max_context is None else lm.max_context
        return Setting(
            seed=self._settings.seed,
            token_ids=ids,
            vocab_size=lm.vocab_size,
            max_length=min(room, target.max_length),
            max_context=lm.max_context,
            adapters=tuple(target.adapters) if Capability.LORA in lm.capabilities else (),
            keeps_prefixes=Capability.PREFIX_CACHE in lm.capabilities,
        )

    def _callers(self, lm: AsyncLM, setting: Setting, comparison: Comparison) -> list[Caller]:
        loops = [
            LoopCaller(f"event loop {i}", lm, setting, comparison, LARGEST_POPULATION)
            for i in range(LOOPS)
        ]
        threads = [
            ThreadCaller(f"thread {i}", lm, setting, comparison, 4) for i in range(THREADS)
        ]
        callers: list[Caller] = [*loops, *threads]
        for caller in callers:
            caller.adapters = {name: self._target.adapters[name] for name in setting.adapters}
            caller.may_die = self._killed.is_set
        if self._settings.kill_worker:
            loops[0].midway = self._kill_worker
        return callers

    def _carried_out(
        self, lm: AsyncLM, callers: list[Caller], comparison: Comparison
    ) -> list[Memory]:
        """Start the callers and look at the model whenever they rest."""
        barrier = CallerBarrier(len(callers))
        threads_share = int(self._settings.requests * THREAD_SHARE)
        loops_share = (self._settings.requests - THREADS * threads_share) // LOOPS
        for caller in callers:
            share = loops_share if isinstance(caller, LoopCaller) else threads_share
            arguments = (max(share, MARKS), MARKS, barrier)
            threading.Thread(
                target=caller.run, args=arguments, name=f"chaos {caller.name}", daemon=True
            ).start()
        samples = []
        try:
            for _ in range(MARKS):
                if not barrier.gather(functools.partial(_progress, callers), self._timeout_s):
                    self._report_lost(callers)
                self._look(lm, comparison)
                samples.append(Memory.now())
                barrier.release()
        except BaseException as failure:
            barrier.fail(failure)  # callers that wait end
            raise
        return samples

    def _look(self, lm: AsyncLM, comparison: Comparison) -> None:
        """Compare rows, and empty the caches, so that what is left can be compared."""
        found = lm.statistics()
        expect(
            found.cache_bytes <= CACHE_BYTES and found.cache_entries <= CACHE_ENTRIES,
            f"at most {CACHE_ENTRIES} rows of {CACHE_BYTES} bytes in the output cache",
            f"{found.cache_entries} rows of {found.cache_bytes} bytes",
        )
        comparison.compare()
        lm.clear_output_cache()
        if self._killed.is_set():
            return
        self._waited_for(comparison.ask_again)
        lm.clear_output_cache()
        if Capability.PREFIX_CACHE in lm.capabilities:
            self._waited_for(lm.clear_kv_cache)

    def _waited_for(self, call: Callable[[], T]) -> T:
        return call_within(call, self._timeout_s, f"the call {call}")

    def _expect_sums(self, lm: AsyncLM, callers: list[Caller]) -> None:
        found = lm.statistics()
        expect(
            found.pending == found.waiting == 0,
            "no request pending or waiting at the end",
            f"{found.pending} pending, {found.waiting} waiting",
        )
        ends = found.cache_hits + found.joined
        grouped = sum(caller.grouped for caller in callers)
        ends += found.answered + found.failed + found.abandoned + grouped
        expect(
            found.requests == ends,
            f"requests = cache_hits + joined + answered + failed + abandoned + {grouped}",
            str(found),
        )
        counted = sum(caller.counted for caller in callers)
        draws = sum(caller.draws for caller in callers)
        expect(
            found.requests >= counted + draws,
            f"at least {counted} rows and {draws} continuations in `requests`",
            found.requests,
        )
        in_batches = sum(size * count for size, count in found.batch_sizes.items())
        expect(
            found.answered <= in_batches <= found.answered + found.failed + grouped,
            f"batches of {found.answered} evaluations, failed ones apart",
            in_batches,
        )

    def _kill_worker(self) -> None:
        """Kill one of the processes that this one started, in the middle of requests."""
        processes = [
            each for each in psutil.Process().children(recursive=True) if _computes(each)
        ]
        expect(bool(processes), "an engine with processes of its own", "none")
        processes.sort(key=lambda each: each.pid)  # the first ones have started the others
        process = processes[self._settings.seed % len(processes)]
        self._killed.set()
        os.kill(process.pid, signal.SIGKILL)

    def _expect_dead(self, lm: AsyncLM, ended: Counter[str]) -> None:
        expect(
            ended["answered"] > 0 and ended["died"] > 0,
            "answers before a process was killed and EngineDiedError after",
            dict(ended),
        )
        try:
            lm.next_token_logprobs_sync([0])
        except EngineDiedError:
            return
        raise CheckFailure("EngineDiedError once a process is dead", "an answer", {})

    def _close_amid_requests(self, lm: AsyncLM, setting: Setting) -> Counter[str]:
        """Close the model while it has requests: each ends with a row or that error.

        An engine may be fast enough for all of them; the one after closing gets the error.
        """
        ended: Counter[str] = Counter()

        async def ask() -> list[Any]:
            contexts = [setting.token_ids[:1] * n for n in range(1, LAST_REQUESTS + 1)]
            requests = [
                lm.next_token_logprobs(ids[: setting.max_length], use_cache=False)
                for ids in contexts
            ]
            before = [asyncio.ensure_future(request) for request in requests[1:]]
            await asyncio.sleep(0)
            lm.close()
            return await asyncio.gather(*before, requests[0], return_exceptions=True)

        for end in self._waited_for(lambda: asyncio.run(ask())):
            if isinstance(end, (EngineClosedError, EngineDiedError)):
                ended["closed"] += 1
            elif isinstance(end, BaseException):
                raise CheckFailure("EngineClosedError or a row", repr(end), {}) from end
            else:
                ended["answered"] += 1
        return ended

    def _report_lost(self, callers: list[Caller]) -> None:
        lost = [f"{each.name}: {ask}" for each in callers for ask in each.open.values()]
        raise CheckTimeout(
            f"{len(lost)} requests, such as {'; '.join(lost[:3])},", self._timeout_s
        )


def _progress(callers: list[Caller]) -> int:
    return sum(caller.requests + caller.ended.total() for caller in callers)


def _computes(process: psutil.Process) -> bool:
    """Whether it is none of the processes that serve `multiprocessing`."""
    command = " ".join(process.cmdline())
    is_fork_server = "forkserver" in command and process.ppid() == os.getpid()
    return not (is_fork_server or "resource_tracker" in command)
