"""`AsyncTokenCharacterTrie`: batches concurrent requests to a token trie.

The reductions run on the thread of a `Scheduler`, so they do not block the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import dataclass
from typing import Any

from genlm.core.base.forking import renew_in_forks
from genlm.core.engine.halving import Halving, completions_of
from genlm.core.plugins.lookup import get_trie
from genlm.core.queries.query import Completion
from genlm.core.scheduler import Scheduler
from genlm.core.trie.reductions import Operation
from genlm.core.trie.trie import TokenCharacterTrie
from genlm.core.trie.weights import Returns, check_returns

_ROWS_AT_ONCE = 64
"""Maximum number of rows that are reduced at once. They are stacked and their results are
copied, which needs memory in addition to that of all results."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One row of weights to reduce."""

    query_id: int
    ws: Any
    operation: Operation
    returns: Returns


class ReductionEngine:
    """Reduces submitted rows; rows of one operation form batches."""

    def __init__(self, trie: TokenCharacterTrie) -> None:
        self._trie = trie
        self._pending: dict[int, Reduction] = {}

    def submit(self, query: Reduction) -> None:
        """Add a request to the next batch."""
        self._pending[query.query_id] = query

    def step(self) -> list[Completion]:
        """Reduce all submitted rows."""
        pending, self._pending = self._pending, {}
        batches: dict[tuple[Any, ...], list[Reduction]] = {}
        for query in pending.values():
            # Only rows of one dtype and device can be stacked without conversion.
            kind = (getattr(query.ws, "dtype", None), str(getattr(query.ws, "device", "")))
            batches.setdefault((query.operation, query.returns, *kind), []).append(query)
        return [
            completion
            for batch in batches.values()
            for begin in range(0, len(batch), _ROWS_AT_ONCE)
            for completion in self._completions(batch[begin : begin + _ROWS_AT_ONCE])
        ]

    def abort(self, query_id: int) -> None:
        """Remove a request from the next batch."""
        self._pending.pop(query_id, None)

    def close(self) -> None:
        """Drop pending requests; the trie itself belongs to the caller."""
        self._pending.clear()

    def _completions(self, batch: list[Reduction]) -> list[Completion]:
        """Reduce a batch; rows that raise fail alone."""
        return completions_of(batch, Halving(self._reduce).results(batch))

    def _reduce(self, batch: list[Reduction]) -> list[Any]:
        first = batch[0]
        if len(batch) == 1:
            reduce_row = getattr(self._trie, f"weight_{first.operation}")
            return [reduce_row(first.ws, returns=first.returns)]
        reduce_rows = getattr(self._trie, f"batch_weight_{first.operation}")
        rows = reduce_rows([query.ws for query in batch], returns=first.returns)
        # A view would keep the memory of the whole batch.
        return [row.clone() if first.returns == "torch" else row.copy() for row in rows]


class AsyncTokenCharacterTrie:
    """An asynchronous token trie that batches concurrent calls, without timers.

    The worker thread starts with the first call, or with `start`. Cancelling a call, or
    passing invalid weights, does not affect other calls. Methods may be called from several
    event loops and threads. Use as an async context manager, or call `cleanup`.

    Args:
        trie: The trie; not copied. It may be used directly at the same time.

    Attributes:
        trie: As above.

    Raises:
        TypeError: `trie` is not a trie.
    """

    def __init__(self, trie: TokenCharacterTrie) -> None:
        if not hasattr(trie, "batch_weight_sum"):
            raise TypeError(
                f"{type(self).__name__} takes a trie; found {type(trie).__name__}. "
                f"{type(self).__name__}.from_vocab takes a vocabulary"
            )
        self.trie = trie
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._scheduler: Scheduler[ReductionEngine] | None = None
        renew_in_forks(self)

    @classmethod
    def from_vocab(
        cls, vocab: Any, backend: str | None = None, **options: Any
    ) -> AsyncTokenCharacterTrie:
        """Build the trie of a vocabulary.

        Args:
            vocab: A sequence of items or a `Vocabulary`, as the trie's class takes it.
            backend: Name of an installed trie (`"numpy"`, `"cuda"`, ...); None chooses as
                `genlm.get_trie` does.
            **options: Further arguments of the trie's class.

        Raises:
            PluginError: As `genlm.get_trie`.
            VocabularyError: As `TokenCharacterTrie`.
        """
        return cls(get_trie(backend)(vocab, **options))

    def __reduce__(self) -> Any:
        raise TypeError(
            "an AsyncTokenCharacterTrie has a thread and cannot be pickled or copied; create "
            "another one from its attribute trie"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.trie!r}>"

    async def weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum the weights of the tokens below every node.

        Args:
            ws: One weight for each token; must not be changed until the call returns.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            One value for each node; the caller owns the result.

        Raises:
            WeightsError: The weights have another shape, or are not real numbers.
            EvaluationError: The trie raised `__cause__` for this request.
            EngineClosedError: `shutdown` or `cleanup` was called before the result.
        """
        return await self._request(ws, "sum", returns)

    async def weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weight below every node; arguments as for `weight_sum`."""
        return await self._request(ws, "max", returns)

    async def weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Compute the logsumexp of the log-weights below every node; as `weight_sum`."""
        return await self._request(ws, "logsumexp", returns)

    def start(self) -> None:
        """Start the worker thread if it is not running; the first call does so as well."""
        self._running_scheduler()

    async def cleanup(self) -> None:
        """Fail pending calls with `EngineClosedError` and stop the worker thread.

        Does not block the event loop. May be called twice; a later call starts a new thread.
        """
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """As `cleanup`, but blocks until the current batch has finished."""
        with self._lock:
            scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.close()

    def _after_fork(self) -> None:
        """Reset in a forked process, which does not have the worker thread."""
        self._scheduler = None

    async def __aenter__(self) -> AsyncTokenCharacterTrie:
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.cleanup()

    async def _request(self, ws: Any, operation: Operation, returns: Returns) -> Any:
        check_returns(returns)
        query = Reduction(next(self._ids), ws, operation, returns)
        return await self._running_scheduler().answer(query)

    def _running_scheduler(self) -> Scheduler[ReductionEngine]:
        with self._lock:
            if self._scheduler is None:
                trie = self.trie
                self._scheduler = Scheduler(lambda: ReductionEngine(trie), name="genlm-trie")
            return self._scheduler
