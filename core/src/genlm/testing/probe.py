"""`Probe`: an engine around an engine, which a check can hold, break and watch.

The engine inside does all the work and is called exactly as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from genlm import BatchEngine, Capability, Completion, Engine, Query, Vocabulary
from genlm.testing.failure import NeverEnded
from genlm.testing.turnstile import Turnstile

__all__ = ["Injected", "Probe"]


class Injected(Exception):
    """The exception that a check puts into an engine."""


class Probe(Turnstile):
    """Passes everything on to an engine; can hold its steps and make it fail.

    Use as `watch` of `EngineTarget.load`, once. `hold` makes the engine's steps wait.

    Args:
        patience_s: How long a held step waits to be released.

    Attributes:
        submitted: Every query that the engine was given.
        aborted: Ids that it was told to forget.
        in_step: How many queries were unanswered at each step.
        finished: How many each step answered.
        refuse: Queries for which this is true are refused by `submit`.
        poison: Queries for which this is true make `evaluate` raise.
        spoil: Given each query and its result, returns the result to hand over.
        break_step: Raised by the next step instead of stepping, then forgotten.
        closed: How many times the engine was closed.
        engine: The engine inside, once there is one.
    """

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]
    engine: Engine

    def __init__(self, patience_s: float = 60.0) -> None:
        super().__init__(patience_s)
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

    def __call__(self, engine: Engine) -> Probe:
        """Put the probe around an engine."""
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
        """Block until `step` has ended `count` times in all."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self.finished) >= count, self._patience_s
            ):
                raise NeverEnded(f"step {count} of the engine", self._patience_s)

    # -- the engine -------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Pass a query on, unless it is to be refused."""
        if self.refuse(query):
            raise Injected("refused")
        self.engine.submit(query)
        self.submitted.append(query)
        self._unanswered[query.query_id] = query

    def step(self) -> Iterable[Completion]:
        """Step the engine, when the check lets it."""
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
        """Pass it on."""
        self.aborted.append(query_id)
        self._unanswered.pop(query_id, None)
        self.engine.abort(query_id)

    def close(self) -> None:
        """Pass it on."""
        self.closed += 1
        self.engine.close()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Pass it on."""
        return self.engine.statistics()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)  # adapters, prefixes

    def _poison_batches(self, engine: BatchEngine) -> None:
        evaluate = engine.evaluate

        def poisoned(queries: Any) -> Any:
            if any(self.poison(query) for query in queries):
                raise Injected("poisoned")
            return evaluate(queries)

        engine.evaluate = poisoned  # type: ignore[method-assign]
