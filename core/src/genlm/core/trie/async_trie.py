"""`AsyncTokenCharacterTrie`: concurrent requests to a trie share its batches.

The reductions run on the thread of a `Scheduler`, so the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from genlm.core.forking import renew_in_forks
from genlm.core.plugins import get_trie
from genlm.core.query import Completion
from genlm.core.scheduler import Scheduler
from genlm.core.trie.protocol import TokenTrie
from genlm.core.trie.reductions import Operation
from genlm.core.trie.weights import Returns, check_returns

__all__ = ["AsyncTokenCharacterTrie"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """One row of weights to reduce."""

    query_id: int
    ws: Any
    operation: Operation
    returns: Returns


class ReductionEngine:
    """Reduces what was submitted, rows of the same operation in one batch."""

    def __init__(self, trie: TokenTrie) -> None:
        self._trie = trie
        self._pending: dict[int, Reduction] = {}

    def submit(self, query: Reduction) -> None:
        """Put a request into the next batch."""
        self._pending[query.query_id] = query

    def step(self) -> list[Completion]:
        """Answer everything that was submitted."""
        pending, self._pending = self._pending, {}
        alike: dict[tuple[Any, ...], list[Reduction]] = {}
        for query in pending.values():
            # Rows of one dtype and device can be stacked without changing any.
            kind = (getattr(query.ws, "dtype", None), str(getattr(query.ws, "device", "")))
            alike.setdefault((query.operation, query.returns, *kind), []).append(query)
        return [answer for batch in alike.values() for answer in self._answers(batch)]

    def abort(self, query_id: int) -> None:
        """Take a request out of the next batch."""
        self._pending.pop(query_id, None)

    def close(self) -> None:
        """Forget what is pending; the trie itself belongs to the caller."""
        self._pending.clear()

    def _answers(self, batch: list[Reduction]) -> Iterator[Completion]:
        """Answer a batch; if it fails, answer each alone, so that only the culprit does."""
        first = batch[0]
        if len(batch) > 1:
            reduce_rows = getattr(self._trie, f"batch_weight_{first.operation}")
            try:
                rows = reduce_rows([query.ws for query in batch], returns=first.returns)
            except Exception:  # noqa: BLE001 - found again below, for the query that causes it
                batches = [[query] for query in batch]
                yield from (answer for alone in batches for answer in self._answers(alone))
                return
            for query, row in zip(batch, rows, strict=True):
                # A view would keep the whole batch alive.
                own = row.clone() if first.returns == "torch" else row.copy()
                yield Completion(query.query_id, own)
            return
        try:
            reduce_row = getattr(self._trie, f"weight_{first.operation}")
            yield Completion(first.query_id, reduce_row(first.ws, returns=first.returns))
        except Exception as error:  # noqa: BLE001 - it fails this query alone
            yield Completion(first.query_id, error=error)


class AsyncTokenCharacterTrie:
    """A token trie for coroutines: concurrent calls become batches, without timers.

    The thread that works starts with the first call, or with `start`. A call that is
    cancelled, or whose weights are wrong, disturbs no other. Methods may be called from
    several event loops and threads. Use as an async context manager, or call `cleanup`.

    Args:
        trie: The trie that reduces; not copied, and usable directly meanwhile.

    Attributes:
        trie: The same.
    """

    def __init__(self, trie: TokenTrie) -> None:
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
            vocab: What the trie's class takes: a sequence of items or a `Vocabulary`.
            backend: Name of an installed trie (`"numpy"`, `"cuda"`, ...); None follows
                the order of choice of `genlm.get_trie`.
            **options: Further arguments of the trie's class.

        Raises:
            PluginError: As `genlm.get_trie`.
            VocabularyError: The vocabulary makes no trie.
        """
        return cls(get_trie(backend)(vocab, **options))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.trie!r}>"

    async def weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum the weights of the tokens below every node.

        Args:
            ws: One weight for each token; must not change until the answer is there.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            One value for each node; the caller's own.

        Raises:
            WeightsError: The shape or the kind of number is another.
            EvaluationError: The trie raised for this request; `__cause__` says what.
            EngineClosedError: `shutdown` or `cleanup` came before the answer.
        """
        return await self._answer(ws, "sum", returns)

    async def weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weight below every node; as `weight_sum`."""
        return await self._answer(ws, "max", returns)

    async def weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Add log-weights below every node, in the log domain; as `weight_sum`."""
        return await self._answer(ws, "logsumexp", returns)

    async def mass_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum probabilities below every node: an older name of `weight_sum`."""
        return await self.weight_sum(ws, returns=returns)

    def start(self) -> None:
        """Start the working thread if it is not running; calls do so by themselves."""
        self._running()

    async def cleanup(self) -> None:
        """End all unanswered calls with `EngineClosedError` and the thread, without blocking.

        A later call starts afresh. Doing it twice is allowed.
        """
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Do what `cleanup` does, and wait until the current batch is done."""
        with self._lock:
            scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.close()

    def _after_fork(self) -> None:
        """Start afresh in a forked process, which lacks the working thread."""
        self._lock = threading.Lock()
        self._scheduler = None

    async def __aenter__(self) -> AsyncTokenCharacterTrie:
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.cleanup()

    async def _answer(self, ws: Any, operation: Operation, returns: Returns) -> Any:
        check_returns(returns)
        query = Reduction(next(self._ids), ws, operation, returns)
        return await self._running().answer(query)

    def _running(self) -> Scheduler[ReductionEngine]:
        with self._lock:
            if self._scheduler is None:
                trie = self.trie
                self._scheduler = Scheduler(lambda: ReductionEngine(trie), name="genlm-trie")
            return self._scheduler
