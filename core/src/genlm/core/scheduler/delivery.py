"""Delivery of results to waiting callers.

Callers wait on an `asyncio.Future` (coroutines) or a `concurrent.futures.Future` (threads).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
from collections.abc import Callable
from typing import Any

from genlm.core.base.error_handling import as_genlm_error, free_locals
from genlm.core.base.errors import EvaluationError, GenlmError, describe_error
from genlm.core.queries.query import GroupResult
from genlm.core.rows.output_cache import copy_result
from genlm.core.scheduler.request_table import Evaluation, Request


def distribute(evaluation: Evaluation) -> None:
    """Move the values of an evaluation to its requests.

    The first consumer of a result receives the result itself, further consumers receive copies.
    Every consumer receives its own exception object. If copying raises, the consumer receives
    the exception. Errors refer to no local variables of the engine.
    """
    for value in evaluation.values:
        for error in value.errors.values() if isinstance(value, GroupResult) else [value]:
            if isinstance(error, Exception):
                free_locals(error)
    delivered: set[int] = set()
    for request, place, output in evaluation.consumers:
        if request.is_abandoned:
            continue
        value = evaluation.values[output]
        try:
            if isinstance(value, Exception):
                value = _copy_error(value)
            elif output in delivered:
                value = copy_result(value)
            delivered.add(output)
        except Exception as error:  # noqa: BLE001 - out of memory
            value = _copy_error(error)
        request.values[place] = value
    evaluation.values = []  # frames to which a kept error refers may refer to the evaluation


class Delivery:
    """Finished requests, grouped by event loop, so that a delivery wakes each loop once.

    Used by one thread; callers may cancel the futures concurrently.
    """

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Any]]] = {}
        self._by_thread: list[tuple[Request, Any]] = []

    def add(self, request: Request) -> bool:
        """Add a request that has its values; call the function `then` of a coroutine's request.

        Returns:
            Whether the request was added: not if the function returned a future, which is then
            its only value.
        """
        raised: Exception | None = None
        is_of_thread = isinstance(request.future, concurrent.futures.Future)
        if request.then is not None and not is_of_thread and not request.is_abandoned:
            result, raised = _call(request.then, request.values)
            request.then, request.values = None, [result]
            if isinstance(result, concurrent.futures.Future):
                return False
        self._append(request, raised)
        return True

    def fail(self, request: Request, error: BaseException) -> None:
        """Add a request that finishes with a copy of an error."""
        self._append(request, _copy_error(error))

    def _append(self, request: Request, error: BaseException | None) -> None:
        future = request.future
        if isinstance(future, concurrent.futures.Future):
            self._by_thread.append((request, error))
        else:
            loop = future.get_loop()
            if loop not in self._by_loop:
                self._by_loop[loop] = []
            self._by_loop[loop].append((request, error))

    def add_late(self, request: Request, future: concurrent.futures.Future[Any]) -> None:
        """Add a request that finishes with the result or the error of a future."""
        error: BaseException | None = None
        try:
            request.values = [future.result()]
        except BaseException as raised:  # noqa: BLE001 - also that of a cancelled future
            error = raised
        self._append(request, error)

    @property
    def reaches_loops(self) -> bool:
        """Whether one of the requests is that of a coroutine."""
        return bool(self._by_loop)

    def send(
        self, afterwards: Callable[[asyncio.AbstractEventLoop], None] | None = None
    ) -> None:
        """Finish all futures; the futures of coroutines on the threads of their event loops.

        `afterwards` is then called with every event loop, on its thread.
        """
        for loop, finished in self._by_loop.items():
            try:
                loop.call_soon_threadsafe(_finish_on_loop, finished, loop, afterwards)
            except RuntimeError:
                # The loop is closed, so its futures can no longer be awaited.
                continue
        for request, error in self._by_thread:
            future = request.future
            assert isinstance(future, concurrent.futures.Future)  # noqa: S101 - see `add`
            if future.set_running_or_notify_cancel():  # cannot be cancelled afterwards
                _finish(request, error)


def _call(function: Callable[[Any], Any], values: Any) -> tuple[Any, Exception | None]:
    """Return the result of a function, or its error."""
    try:
        return function(values), None
    except GenlmError as error:
        return None, error.with_traceback(None)  # whose frames refer to other requests
    except Exception as error:  # noqa: BLE001 - raised in the coroutine
        return None, error


def _finish_on_loop(
    finished: list[tuple[Request, Any]],
    loop: asyncio.AbstractEventLoop,
    afterwards: Callable[[asyncio.AbstractEventLoop], None] | None,
) -> None:
    for request, error in finished:
        if not request.future.done():  # not cancelled by its caller
            _finish(request, error)
    if afterwards is not None:
        afterwards(loop)


def _finish(request: Request, error: BaseException | None) -> None:
    if error is None:
        request.future.set_result(request.values)
    else:
        request.future.set_exception(error)


def _copy_error(error: BaseException) -> BaseException:
    """Return a separate exception object, which one caller can raise and change."""
    if not isinstance(error, GenlmError):
        return as_genlm_error(error)
    error_copy: GenlmError
    try:
        error_copy = copy.copy(error)
    except Exception:  # noqa: BLE001 - a plugin's class may not be copyable
        error_copy = EvaluationError(f"the engine raised {describe_error(error)}")
    error_copy.__cause__ = error.__cause__ if type(error_copy) is type(error) else error
    if notes := getattr(error, "__notes__", None):
        error_copy.__notes__ = list(notes)
    return error_copy
