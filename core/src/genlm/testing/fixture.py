"""`Fixture`: examples and time limits for one check, and the profiles of runs.

One fixture serves one check of one target and closes everything that the check opened. All
threads are daemon threads: a call that never returns must not keep the process alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Self, TypeVar

import hypothesis
from hypothesis import strategies as st

from genlm.plugin import call_on_thread, describe_error
from genlm.testing.check import CheckTimeout, expect

T = TypeVar("T")


_SETTINGS = hypothesis.settings(
    database=None,  # with these settings, the same seed gives the same examples
    deadline=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)

QUICK = hypothesis.settings(_SETTINGS, max_examples=20)
"""Hypothesis' settings of the profile `"quick"`."""

FULL = hypothesis.settings(_SETTINGS, max_examples=150)
"""Hypothesis' settings of the profile `"full"`."""

PROFILES = {"quick": QUICK, "full": FULL}


class Fixture:
    """Examples and bookkeeping for one check; a context manager.

    Args:
        profile: Hypothesis' settings, with the number of examples per property.
        seed: Random seed of the examples.
        timeout_s: Time limit of each call.

    Attributes:
        cases: Number of occurrences of each case that the check must cover.
        devices: Devices of the results seen so far.
    """

    def __init__(self, profile: hypothesis.settings, seed: int, timeout_s: float) -> None:
        self.profile = profile
        self.seed = seed
        self.timeout_s = timeout_s
        self.cases: Counter[str] = Counter()
        self.devices: set[str] = set()
        self._resources = contextlib.ExitStack()
        self._logged = self._resources.enter_context(_logged_errors())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error:  # further errors are most likely a consequence
            with contextlib.suppress(CheckTimeout):
                self._resources.close()
            return
        self._resources.close()
        expect(not self._logged, "no error in the log", "; ".join(self._logged[:3]))

    def saw(self, case: str, occurred: bool = True) -> None:
        """Record whether a case occurred that the check must cover."""
        self.cases[case] += occurred

    def for_all(
        self,
        holds: Callable[..., None],
        *,
        examples: int | None = None,
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Test a property on many examples; raise the error of the smallest failing one.

        Args:
            holds: Takes one keyword argument per strategy; raises if the property is violated.
            examples: Number of examples; by default the profile's.
            **strategies: Strategies of the arguments.
        """
        settings = hypothesis.settings(
            self.profile, max_examples=examples or self.profile.max_examples
        )

        # `@given` is applied here and not to a method: one method shared by several targets
        # fails Hypothesis' health check on differing executors.
        @hypothesis.seed(self.seed)
        @settings
        @hypothesis.given(**strategies)
        def test_example(**values: Any) -> None:
            holds(**values)

        test_example()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a new event loop on a separate thread.

        Raises:
            CheckTimeout: It took longer than `timeout_s`.
        """
        what = f"the coroutine {getattr(coroutine, '__qualname__', coroutine)}"
        return call_within(lambda: asyncio.run(coroutine), self.timeout_s, what)

    def gather(
        self, requests: Iterable[Awaitable[Any]], *, return_exceptions: bool = False
    ) -> list[Any]:
        """Await requests concurrently, as `asyncio.gather` does, and return their results."""

        async def await_all() -> list[Any]:
            return await asyncio.gather(*requests, return_exceptions=return_exceptions)

        return self.run(await_all())

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function with some arguments on a separate thread.

        Raises:
            CheckTimeout: It took longer than `timeout_s`.
        """
        what = f"the call {getattr(function, '__qualname__', repr(function))}"
        return call_within(functools.partial(function, *arguments), self.timeout_s, what)

    def expect_error(
        self,
        error: type[BaseException],
        function: Callable[..., Any],
        /,
        *arguments: Any,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless a call, or the coroutine it returns, raises `error`."""
        result: Any
        try:
            result = self.call(function, *arguments)
            if inspect.isawaitable(result):
                [result] = self.gather([result])
        except Exception as raised:  # noqa: BLE001 - checked below
            result = raised
        self.expect_raised(error, result, **example)

    def expect_raised(
        self, error: type[BaseException], result: object, /, **example: Any
    ) -> None:
        """Raise `CheckFailure` unless `result` is an exception of the class `error`."""
        expect(isinstance(result, error), error.__name__, repr(result), **example)


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the logged errors, which no caller can see.

    The core logs those of methods for which no request waits; asyncio logs those that reach the
    exception handler of an event loop.
    """
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            shown = f": {describe_error(cause)}" if cause else ""
            found.append(f"{record.getMessage()}{shown}")

    collector = Collector(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("genlm", "asyncio")]
    for logger in loggers:
        logger.addHandler(collector)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(collector)


# -- threads -------------------------------------------------------------------------------


def call_within(function: Callable[[], T], timeout_s: float, what: str) -> T:
    """Call a function on a separate thread.

    Args:
        function: The function.
        timeout_s: Time limit.
        what: Description of the call for `CheckTimeout`.

    Raises:
        CheckTimeout: The call took longer than `timeout_s`.
        BaseException: The exception that the function raised.
    """
    future = call_on_thread(function)
    done, _ = concurrent.futures.wait([future], timeout_s)
    if not done:
        raise CheckTimeout(what, timeout_s)
    return future.result()


def on_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call a function on a daemon thread; await the result on the running event loop.

    With `asyncio.to_thread` a lost request would keep the process from exiting.
    """
    return asyncio.wrap_future(call_on_thread(functools.partial(function, *arguments)))
