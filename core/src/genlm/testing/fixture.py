"""`Fixture`: examples, time limits and event loops for one check, and the profile.

One fixture serves one check of one target and closes everything that the check opened.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import hypothesis
import numpy as np
from hypothesis import strategies as st

from genlm.testing.background import LoopThread, call_together
from genlm.testing.failure import CheckTimeout, expect

__all__ = ["FULL", "PROFILES", "QUICK", "Fixture", "Profile", "hypothesis_settings"]

T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """Profile of a run: its numbers of examples.

    Attributes:
        name: Value of the option `profile`.
        examples: Examples per property.
        programs: Random programs of the stateful test.
        program_steps: Maximum number of calls in a random program.
        shrink: Whether to search for the smallest failing example, which takes longer than
            finding one.
    """

    name: str
    examples: int
    programs: int
    program_steps: int
    shrink: bool = True


QUICK = Profile("quick", examples=20, programs=25, program_steps=20)
FULL = Profile("full", examples=150, programs=80, program_steps=50)

PROFILES = {profile.name: profile for profile in (QUICK, FULL)}


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


class Fixture:
    """Examples and bookkeeping for one check; a context manager.

    Args:
        profile: Profile of the run.
        seed: Random seed of the examples.
        timeout_s: Time limit of each call.

    Attributes:
        cases: Number of occurrences of each case that the check must cover.
        loop: An event loop on a dedicated thread.
    """

    def __init__(self, profile: Profile, seed: int, timeout_s: float) -> None:
        self.profile = profile
        self.seed = seed
        self.timeout_s = timeout_s
        self.cases: Counter[str] = Counter()
        self._resources = contextlib.ExitStack()
        self._loops: list[LoopThread] = []
        self.loop = self.new_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._resources.close()
        # If the check failed, unretrieved errors are most likely a consequence.
        unhandled = [text for loop in self._loops for text in loop.unhandled]
        expect(
            bool(error) or not unhandled,
            "no error that reaches an event loop's exception handler",
            "; ".join(unhandled[:3]),
        )

    def saw(self, case: str, times: int = 1) -> None:
        """Record that a case occurred."""
        self.cases[case] += times

    def generator(self) -> np.random.Generator:
        """A new random generator, seeded with the seed."""
        return np.random.default_rng(self.seed)

    def for_all(
        self,
        holds: Callable[..., None],
        *,
        examples: int | None = None,
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Test a property on many examples; raise what it raised for the smallest failing one.

        Args:
            holds: Takes one keyword argument per strategy; raises if the property is violated.
            examples: Number of examples; by default the profile's.
            **strategies: Generate the arguments.
        """

        # `@given` is applied here and not to a method: one method shared by several targets
        # fails Hypothesis' health check on differing executors.
        @hypothesis.seed(self.seed)
        @hypothesis_settings(examples or self.profile.examples, shrink=self.profile.shrink)
        @hypothesis.given(**strategies)
        def one_example(**values: Any) -> None:
            holds(**values)

        one_example()

    def new_loop(self) -> LoopThread:
        """An event loop on a dedicated thread, closed with the fixture."""
        loop = LoopThread()
        self._loops.append(loop)
        self._resources.callback(loop.close)
        return loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the fixture's event loop.

        Raises:
            CheckTimeout: It took too long.
        """
        return self.loop.run(coroutine, self.timeout_s)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a separate thread.

        Raises:
            CheckTimeout: It took too long.
        """
        return self.call_together([function])[0]

    def call_together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions concurrently, each on a separate thread.

        Raises:
            CheckTimeout: One took too long.
        """
        return call_together(functions, self.timeout_s)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until a condition is true.

        Raises:
            CheckTimeout: It took too long.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise CheckTimeout(f"waiting for {what}", self.timeout_s)
            time.sleep(1e-4)
