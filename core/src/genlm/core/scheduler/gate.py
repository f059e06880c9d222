"""When a batch leaves: after the event loop has run what was ready, without a timer.

A request on an idle engine does not leave at once: the coroutines that are ready to
run in the same turn of the event loop are likely to ask too. So the first request of a
turn puts a callback at the end of the loop's queue. When a whole turn has added nothing,
that callback opens the gate; while requests keep arriving it goes to the end of the queue
again, a bounded number of times.

After a step the callers it answered are about to ask again. A request that arrived
during the step (a straggler) lingers for them: until the event loop has run them, or
for a small share of the step's duration, whichever is shorter.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from genlm.core.scheduler.board import Board
from genlm.core.validation import checked_integer, checked_number

__all__ = ["Gate", "Limits", "LoopTurns"]

MAX_TURNS = 8
"""Most turns of an event loop that a growing batch is held back."""

LINGER_SHARE = 0.1
"""Longest lingering, as a share of the last step. It costs at most that share of the
throughput; without it one straggler can split a population into two batches for good."""

MIN_LINGER_S = 1e-4
"""Below this, waiting costs more in thread switches than a split batch does."""


@dataclass(frozen=True)
class Limits:
    """How requests are batched; see `Scheduler`."""

    max_batch_size: int | None = None
    max_wait_s: float = 0.0
    max_pending: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_pending"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checked_integer(name, value, 1))
        # Python's own numbers from here on, and no longer than a lock can wait.
        max_wait_s = min(checked_number("max_wait_s", self.max_wait_s), threading.TIMEOUT_MAX)
        object.__setattr__(self, "max_wait_s", max_wait_s)


class Gate:
    """Says how long the inbox of an idle engine should wait; guarded by the worker's lock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._is_open = False
        self._linger_until_s: float | None = None

    def open(self, board: Board) -> None:
        """Let go what is in the inbox; a later request must open the gate again."""
        self._linger_until_s = None
        self._is_open = bool(board.inbox)

    def shut(self) -> None:
        """Hold what arrives from now on until the gate is opened."""
        self._linger_until_s = None
        self._is_open = False

    def linger(self, step_s: float) -> bool:
        """Hold stragglers for the callers whom a step of `step_s` seconds answered.

        Returns:
            Whether they are held, so that those callers' event loops should open the gate.
        """
        if LINGER_SHARE * step_s <= MIN_LINGER_S:
            return False
        self._is_open = False
        self._linger_until_s = time.perf_counter() + LINGER_SHARE * step_s
        return True

    def seconds_to_departure(self, board: Board) -> float | None:
        """When the inbox should leave if nothing else happens; None: when told to."""
        inbox, limits = board.inbox, self._limits
        if not inbox:
            return None
        if limits.max_batch_size is not None and len(inbox) >= limits.max_batch_size:
            return 0.0
        is_open = self._is_open or board.admitted_late
        if is_open and not limits.max_wait_s:
            return 0.0
        now_s = time.perf_counter()
        if is_open:
            return next(iter(inbox.values())).arrived_s + limits.max_wait_s - now_s
        return None if self._linger_until_s is None else self._linger_until_s - now_s


class LoopTurns:
    """Opens the gate once the running event loop has no more requests to add.

    Args:
        open_gate: Called on an event loop's thread.
        count_waiting: Number of requests in the inbox.
    """

    def __init__(self, open_gate: Callable[[], None], count_waiting: Callable[[], int]) -> None:
        self._open_gate = open_gate
        self._count_waiting = count_waiting
        # Several threads use it at once, by operations that are atomic, each on its own loop.
        self._scheduled: set[asyncio.AbstractEventLoop] = set()

    def open_after_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the gate when the running event loop has run what is ready now."""
        if loop not in self._scheduled:
            for other in list(self._scheduled):
                if other.is_closed():  # its turn will never end
                    self._scheduled.discard(other)
            self._scheduled.add(loop)
            loop.call_soon(self._turn, loop, 0, MAX_TURNS)

    def _turn(self, loop: asyncio.AbstractEventLoop, waiting_before: int, turns: int) -> None:
        waiting = self._count_waiting()
        if waiting > waiting_before and turns:
            loop.call_soon(self._turn, loop, waiting, turns - 1)
            return
        self._scheduled.discard(loop)
        self._open_gate()
