"""Functions that convert exceptions to `GenlmError`, and add the place where they occurred."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from genlm.core.base.errors import (
    EvaluationError,
    GenlmError,
    MissingRequirementError,
    describe_error,
)

ErrorT = TypeVar("ErrorT", bound=BaseException)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_MAX_LISTED_PLACES = 20
"""Maximum number of places of a batch in a message."""


def import_required(module: str, purpose: str, install: str | None = None) -> Any:
    """Import an optional library; raise `MissingRequirementError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        command = f"pip install {install or name}"
        raise MissingRequirementError(purpose, (name,), command) from error


def as_genlm_error(error: BaseException) -> GenlmError:
    """Return a `GenlmError` unchanged, another error as the cause of an `EvaluationError`."""
    if isinstance(error, GenlmError):
        return error
    wrapper = EvaluationError(f"the engine raised {describe_error(error)}")
    wrapper.__cause__ = error
    return wrapper


class errors_of:  # noqa: N801 - used as a function
    """Raise the exceptions of a user's function as `EvaluationError`; a `GenlmError` unchanged.

    Only the `KeyboardInterrupt` of Ctrl-C, which Python raises on the main thread, is not
    converted. All other exceptions, such as `SystemExit`, are errors of the request and do not
    end the engine's thread. `contextlib.contextmanager` would not convert a `StopIteration`.

    Args:
        function: Name of the function for the message.
    """

    def __init__(self, function: str) -> None:
        self._function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, GenlmError):
            return
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, KeyboardInterrupt):
            return
        raise EvaluationError(f"{self._function} raised {describe_error(error)}") from error


def free_locals(error: BaseException) -> None:
    """Free the local variables of the finished frames in which an error was raised.

    These frames and their callers, to which frames refer, would otherwise keep their tensors as
    long as the error exists. That is until a garbage collection if a frame refers to the error.
    """
    for raised in (error, error.__cause__):
        trace = None if raised is None else raised.__traceback__
        traceback.clear_frames(trace)
        frame = None if trace is None else trace.tb_frame.f_back
        with contextlib.suppress(RuntimeError):  # the frame is running, like its callers
            while frame is not None:
                frame.clear()
                frame = frame.f_back


def result_count_error(reduction: type, found: int, expected: int) -> EvaluationError:
    """Return the error of a reduction whose `compute` did not return a result per request."""
    return EvaluationError(
        f"{reduction.__name__}.compute returned {found} results for {expected} requests; "
        f"return one for each"
    )


def with_places(error: ErrorT, places: Sequence[int]) -> ErrorT:
    """Add the places of failed sequences in a batch to an error, and return it."""
    if len(places) == 1:
        note = f"Sequence {places[0]} of the batch failed."
    else:
        indices = ", ".join(map(str, places[:_MAX_LISTED_PLACES]))
        omitted = len(places) - _MAX_LISTED_PLACES
        indices += f" and {omitted} more" if omitted > 0 else ""
        note = f"Sequences {indices} of the batch failed; this is the error of {places[0]}."
    error.add_note(note)
    if isinstance(error, GenlmError):
        error.places = tuple(places)
    return error


def map_batch(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Apply a check to every item of a batch; raise the first error, with the places of all."""
    results: list[ResultT] = []
    errors: dict[int, Exception] = {}
    for place, item in enumerate(items):
        try:
            results.append(function(item))
        except Exception as error:  # noqa: BLE001 - raised below
            errors[place] = error
    if errors:
        places = list(errors)
        try:
            raise with_places(errors[places[0]], places)
        finally:
            errors.clear()  # whose tracebacks refer to this frame
    return results
