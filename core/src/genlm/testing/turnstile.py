"""`Turnstile`: a point that the code under test passes and a check can bar."""

from __future__ import annotations

import threading

from genlm.testing.failure import NeverEnded

__all__ = ["Turnstile"]


class Turnstile:
    """Counts who enters, and makes them wait while it is held.

    Args:
        patience_s: How long anybody waits, on either side.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._held = False
        self._entered = 0

    def hold(self) -> None:
        """Make everybody who enters from now on wait for `release`."""
        self._held = True

    def release(self) -> None:
        """Let go who waits, and let pass who comes later."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def enter(self) -> None:
        """Be counted, and wait while held."""
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held, self._patience_s)

    def wait_until_entered(self, count: int = 1) -> None:
        """Block until it has been entered `count` times in all.

        Raises:
            NeverEnded: It was not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._entered >= count, self._patience_s):
                what = f"waiting for entry {count} into {type(self).__name__}"
                raise NeverEnded(what, self._patience_s)
