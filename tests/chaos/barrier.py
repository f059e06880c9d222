"""`CallerBarrier`: pauses all callers, so that an idle model can be inspected.

If no request is answered for `timeout_s`, requests are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class CallerBarrier:
    """Callers wait here until all have arrived and the controller releases them."""

    def __init__(self, callers: int) -> None:
        self._callers = callers
        self._changed = threading.Condition()
        self._resting = 0
        self._times = 0
        self.failure: BaseException | None = None

    def rest(self) -> bool:
        """Wait, as a caller, until released; False if a caller has failed."""
        with self._changed:
            self._resting += 1
            times = self._times
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._times > times or self.failure is not None)
            return self.failure is None

    def fail(self, failure: BaseException) -> None:
        """Record a failure; only the first is kept."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def gather(self, progress: Callable[[], int], timeout_s: float) -> bool:
        """Wait, as the controller, until all callers have arrived; False without progress.

        Args:
            progress: A count that grows with every request and answer.
            timeout_s: How long the count may stay the same.

        Raises:
            BaseException: The failure of a caller.
        """
        with self._changed:
            while True:
                before = progress()
                done = self._changed.wait_for(
                    lambda: self._resting == self._callers or self.failure is not None,
                    timeout_s,
                )
                if self.failure is not None:
                    raise self.failure
                if done or progress() == before:
                    return done

    def release(self) -> None:
        """Let the callers continue."""
        with self._changed:
            self._resting = 0
            self._times += 1
            self._changed.notify_all()
