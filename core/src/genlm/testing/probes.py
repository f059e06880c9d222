"""Instrumented engines and tries, through which a check records, pauses and breaks calls.

The engine or trie inside does all the work and is called exactly as without a probe.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from genlm import BatchEngine, Capability, Completion, Engine, Query, Vocabulary
from genlm.testing.check import CheckTimeout
from genlm.testing.fixture import on_thread

__all__ = ["EngineProbe", "InjectedFault", "StepGate", "TrieProbe"]


class StepGate:
    """A point that the code under test passes and a check can close.

    Args:
        timeout_s: Maximum wait of either side.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._held = False
        self._entered = 0

    def hold(self) -> None:
        """Make every thread that enters from now on wait for `release`."""
        self._held = True

    def release(self) -> None:
        """Open the gate to waiting threads and to later ones."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def enter(self) -> None:
        """Count an entry, then wait while the gate is held."""
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held, self._timeout_s)

    def wait_until_entered(self, count: int = 1) -> None:
        """Block until the gate was entered `count` times in all.

        Raises:
            CheckTimeout: It was not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._entered >= count, self._timeout_s):
                what = f"waiting for entry {count} into {type(self).__name__}"
                raise CheckTimeout(what, self._timeout_s)


class InjectedFault(Exception):
    """The exception that a check makes an engine raise."""


class EngineProbe(StepGate):
    """An engine around an engine: records calls, pauses steps and injects faults.

    Pass it as `watch` to `EngineTarget.load`, once. `hold` pauses the engine's steps.

    Args:
        timeout_s: Maximum wait of a held step.

    Attributes:
        submitted: Every query that was submitted.
        aborted: Query ids that were aborted.
        in_step: Number of unanswered queries at each step.
        finished: Number of queries that each step completed.
        refuse: `submit` raises for queries for which this is true.
        poison: `evaluate` raises for batches with a query for which this is true.
        spoil: Maps a query and its result to the result that is returned.
        break_step: Raised once, by the next step, instead of stepping.
        closed: Number of calls of `close`.
        engine: The engine inside, once it is built.
    """

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]
    engine: Engine

    def __init__(self, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s)
        self.submitted: list[Query] = []
        self.aborted: list[int] = []
        self.in_step: list[int] = []
        self.finished: list[int] = []
        self.refuse: Callable[[Query], bool] = lambda _query: False
        self.poison: Callable[[Query], bool] = lambda _query: False
        self.spoil: Callable[[Query, Any], Any] = lambda _query, result: result
        self.break_step: BaseException | None = None
        self.closed = 0
        self._unanswered: dict[int, Query] = {}

    def __call__(self, engine: Engine) -> EngineProbe:
        """Wrap an engine."""
        self.engine = engine
        self.vocabulary = engine.vocabulary
        self.max_context = engine.max_context
        self.capabilities = engine.capabilities
        if isinstance(engine, BatchEngine):
            self._poison_batches(engine)
        return self

    @property
    def is_batch_engine(self) -> bool:
        """Whether the engine has an `evaluate` that can be poisoned."""
        return isinstance(self.engine, BatchEngine)

    def wait_until_stepped(self, count: int = 1) -> None:
        """Block until `step` has returned `count` times in all.

        Raises:
            CheckTimeout: It has not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.finished) >= count, self._timeout_s):
                raise CheckTimeout(f"step {count} of the engine", self._timeout_s)

    async def start_held(self, *requests: Awaitable[Any]) -> list[asyncio.Future[Any]]:
        """Start requests and wait until the engine's next step, which is held, begins."""
        self.hold()
        tasks: list[asyncio.Future[Any]] = list(map(asyncio.ensure_future, requests))
        await on_thread(self.wait_until_entered, len(self.in_step) + 1)
        return tasks

    # -- the engine -------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Record and forward a query, or refuse it."""
        if self.refuse(query):
            raise InjectedFault("refused")
        self.engine.submit(query)
        self.submitted.append(query)
        self._unanswered[query.query_id] = query

    def step(self) -> Iterable[Completion]:
        """Step the engine once the gate is open."""
        self.enter()
        if self.break_step is not None:
            error, self.break_step = self.break_step, None
            raise error
        self.in_step.append(len(self._unanswered))
        completions, answered = [], 0
        for completion in self.engine.step():
            query = self._unanswered.pop(completion.query_id, None)
            if query is None:
                completions.append(completion)
            else:
                answered += 1
                result = self.spoil(query, completion.result)
                completions.append(completion._replace(result=result))
        with self._changed:
            self.finished.append(answered)
            self._changed.notify_all()
        return completions

    def abort(self, query_id: int) -> None:
        """Record and forward the call."""
        self.aborted.append(query_id)
        self._unanswered.pop(query_id, None)
        self.engine.abort(query_id)

    def close(self) -> None:
        """Count and forward the call."""
        self.closed += 1
        self.engine.close()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Forward the call."""
        return self.engine.statistics()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)  # adapters, prefixes

    def _poison_batches(self, engine: BatchEngine) -> None:
        evaluate = engine.evaluate

        def poisoned(queries: Any) -> Any:
            if any(self.poison(query) for query in queries):
                raise InjectedFault("poisoned")
            return evaluate(queries)

        engine.evaluate = poisoned  # type: ignore[method-assign]


class TrieProbe(StepGate):
    """A trie around a trie: records reductions; `hold` pauses them.

    Args:
        trie: The trie inside.
        timeout_s: Maximum wait of a held reduction.

    Attributes:
        reductions: Name and number of rows of each reduction, in the order of their starts.
    """

    def __init__(self, trie: Any, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.reductions: list[tuple[str, int]] = []
        self._trie = trie

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trie, name)
        if name.startswith(("weight_", "batch_weight_")):
            return functools.partial(self._reduced, name, value)
        return value

    def __len__(self) -> int:
        return len(self._trie)

    def _reduced(self, name: str, reduce: Callable[..., Any], ws: Any, **options: Any) -> Any:
        self.reductions.append((name, len(ws) if name.startswith("batch_") else 1))
        self.enter()
        return reduce(ws, **options)
