"""`EngineProbe`: a wrapper with which a check records and pauses calls of an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from genlm import Capability, Completion, Engine, Query, Vocabulary
from genlm.plugin import TokenSequence
from genlm.testing.check import CheckTimeout
from genlm.testing.fixture import on_thread


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
            CheckTimeout: It was not entered in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._entered >= count, self._timeout_s):
                wait = f"waiting for entry {count} into {type(self).__name__}"
                raise CheckTimeout(wait, self._timeout_s)


class GatedQuery(Query):
    """A query whose sequence can be read when a gate is open.

    An engine that reads it waits inside its methods, in contrast to a held step of the probe.
    """

    __slots__ = ("_gate",)

    def __init__(self, query: Query, gate: StepGate) -> None:
        super().__init__(
            query.query_id,
            query.sequence,
            query.adapter,
            outputs=query.outputs,
            targets=query.targets,
        )
        self._gate = gate

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, once the gate is open."""
        self._gate.enter()
        return super().token_ids

    @property
    def sequence(self) -> TokenSequence:
        """The sequence, once the gate is open."""
        self._gate.enter()
        return super().sequence


class EngineProbe(StepGate):
    """A wrapper around an engine that records its calls and can pause its steps.

    Pass it as `watch` to `EngineTarget.load`, once. `hold` pauses the engine's steps.

    Args:
        timeout_s: Maximum wait of a held step.

    Attributes:
        in_step: Number of unanswered queries at each step.
        finished: Number of queries that each step completed.
        closed: Number of calls of `close`.
        engine: The wrapped engine, once it is built.
        query_gate: A gate for reading the sequences of later queries; None for no gate.
        skipped: Number of next steps that return nothing and do not step the engine, which
            receives the aborts of the callers first.
    """

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]
    engine: Engine

    def __init__(self, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s)
        self.in_step: list[int] = []
        self.finished: list[int] = []
        self.closed = 0
        self.query_gate: StepGate | None = None
        self.skipped = 0
        self._unanswered: set[int] = set()

    def __call__(self, engine: Engine) -> EngineProbe:
        """Wrap an engine."""
        self.engine = engine
        return self

    @asynccontextmanager
    async def held(self, *requests: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
        """Start requests; hold the engine's next step, which has begun, during the context."""
        self.hold()
        try:
            tasks: list[asyncio.Future[Any]] = list(map(asyncio.ensure_future, requests))
            await on_thread(self.wait_until_entered, len(self.in_step) + 1)
            yield tasks
        finally:
            self.release()

    # -- the engine -------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Record and forward a query."""
        gate = self.query_gate
        self.engine.submit(query if gate is None else GatedQuery(query, gate))
        self._unanswered.add(query.query_id)

    def step(self) -> Iterable[Completion]:
        """Step the engine once the gate is open."""
        self.enter()
        self.in_step.append(len(self._unanswered))
        completions: list[Completion] = []
        if self.skipped:
            self.skipped -= 1
        else:
            completions = list(self.engine.step())
        answered = self._unanswered.intersection(
            completion.query_id for completion in completions
        )
        self._unanswered -= answered
        self.finished.append(len(answered))
        return completions

    def abort(self, query_id: int) -> None:
        """Forward the call."""
        self._unanswered.discard(query_id)
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
        return getattr(self.engine, name)  # the vocabulary, adapters, prefixes
