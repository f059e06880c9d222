"""`Trial`: what every check is given: examples, time limits, and a notebook.

One trial serves one check of one target and closes everything that the check opened.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

import hypothesis
import numpy as np
from hypothesis import strategies as st

from genlm.testing.background import LoopThread, call_together
from genlm.testing.failure import NeverEnded, expect
from genlm.testing.profile import Profile

__all__ = ["Trial", "hypothesis_settings"]

T = TypeVar("T")


def hypothesis_settings(
    examples: int, steps: int = 50, *, shrink: bool = True
) -> hypothesis.settings:
    """Settings under which the same seed gives the same examples, without a database."""
    phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=phases if shrink else phases[:1],
    )


class Trial:
    """Examples and bookkeeping for one check; a context manager.

    Args:
        profile: How thorough to be.
        seed: Decides every example.
        patience_s: How long any one call may take.

    Attributes:
        cases: How often each interesting case occurred.
        loop: An event loop.
    """

    def __init__(self, profile: Profile, seed: int, patience_s: float) -> None:
        self.profile = profile
        self.seed = seed
        self.patience_s = patience_s
        self.cases: Counter[str] = Counter()
        self._resources = contextlib.ExitStack()
        self._loops: list[LoopThread] = []
        self.loop = self.new_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._resources.close()
        # Where the check has failed already, an unreceived error is most likely a result.
        complaints = [text for loop in self._loops for text in loop.complaints]
        expect(
            bool(error) or not complaints,
            "no error that reaches an event loop's exception handler",
            "; ".join(complaints[:3]),
        )

    def saw(self, case: str, times: int = 1) -> None:
        """Note that an interesting case occurred."""
        self.cases[case] += times

    def generator(self) -> np.random.Generator:
        """A new source of randomness; the same one for the same seed."""
        return np.random.default_rng(self.seed)

    def for_all(
        self,
        law: Callable[..., None],
        *,
        examples: int | None = None,
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Call `law` with many examples; raise what it raised for the smallest failing one.

        Args:
            law: Takes one keyword argument per strategy.
            examples: How many; by default as many as the profile says.
            **strategies: Make the arguments.
        """

        # `@given` is applied here, not on a method: one shared by several targets would
        # fail Hypothesis' health check on differing executors.
        @hypothesis.seed(self.seed)
        @hypothesis_settings(examples or self.profile.examples, shrink=self.profile.shrink)
        @hypothesis.given(**strategies)
        def one_example(**values: Any) -> None:
            law(**values)

        one_example()

    def new_loop(self) -> LoopThread:
        """An event loop on a thread of its own, closed when the trial ends."""
        loop = LoopThread()
        self._loops.append(loop)
        self._resources.callback(loop.close)
        return loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the trial's event loop.

        Raises:
            NeverEnded: It took too long.
        """
        return self.loop.run(coroutine, self.patience_s)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread of its own.

        Raises:
            NeverEnded: It took too long.
        """
        return self.call_together([function])[0]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Block until a condition that no callback announces is true.

        Raises:
            NeverEnded: It took too long.
        """
        give_up_s = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > give_up_s:
                raise NeverEnded(f"waiting for {what}", self.patience_s)
            time.sleep(1e-4)

    def call_together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions at the same time, each on a thread of its own.

        Raises:
            NeverEnded: One took too long.
        """
        return call_together(functions, self.patience_s)
