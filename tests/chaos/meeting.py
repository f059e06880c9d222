"""`Meeting`: where callers rest, so that a quiet model can be looked at.

Waiting has an end: when for `patience_s` nothing was answered, requests are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Meeting:
    """Callers rest here until everybody has come and the host lets them go."""

    def __init__(self, callers: int) -> None:
        self._callers = callers
        self._changed = threading.Condition()
        self._resting = 0
        self._times = 0
        self.failure: BaseException | None = None

    def rest(self) -> bool:
        """Wait, as a caller, until the host lets go; False if somebody has failed."""
        with self._changed:
            self._resting += 1
            times = self._times
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._times > times or self.failure is not None)
            return self.failure is None

    def fail(self, failure: BaseException) -> None:
        """Say what went wrong; the first one counts."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def gather(self, progress: Callable[[], int], patience_s: float) -> bool:
        """Wait, as the host, until all rest; False if nothing happens any more.

        Args:
            progress: A count that grows whenever something happens.
            patience_s: How long nothing may happen.

        Raises:
            BaseException: What a caller failed with.
        """
        with self._changed:
            while True:
                before = progress()
                done = self._changed.wait_for(
                    lambda: self._resting == self._callers or self.failure is not None,
                    patience_s,
                )
                if self.failure is not None:
                    raise self.failure
                if done or progress() == before:
                    return done

    def let_go(self) -> None:
        """Have the callers continue."""
        with self._changed:
            self._resting = 0
            self._times += 1
            self._changed.notify_all()
