"""Execution paths: the ways to run a model, and the choice of the fastest correct one.

The config of a model does not show whether a path serves it correctly. A faster path must
therefore be built without an `UnsupportedModelError` and pass a `SelfTest` against a
reference path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from genlm.core.base.errors import ModelLoadError, describe_error
from genlm.core.base.progress import loading_stage
from genlm.core.base.validation import checked_integer
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.rows import PrefixRows
from genlm.prefix.uncached import UncachedPath

Path = TypeVar("Path", bound=PrefixRows)

_LONGEST_TEXT = 24

# Free slots that make sure that a batch of the self-test is one pass. Engines may store the
# tokens of a step twice.
_TEST_SLOTS = 10 * _LONGEST_TEXT

# The rounding error grows with the size of the model; the error of batching measures it.
_ROUNDING_FACTOR = 4


class UnsupportedModelError(ValueError):
    """An execution path does not support a model; the message states the reason."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Common options of the engines of `PrefixEngine`.

    Attributes:
        paths: Names of the engine's execution paths, fastest first; the last one has no
            prefix cache.
        max_tokens_per_batch: Maximum number of positions with padding in a pass; None
            for the engine's default.
        kv_budget_bytes: Maximum memory for cached keys and values; None for the default.
        max_context: Maximum context length in tokens, if less than that of the model.
        execution_path: One of `paths`, or None for the fastest path with correct rows.
        self_test: Whether to compare a faster path with the reference on loading.

    Raises:
        ValueError: An option has an invalid value.
        TypeError: A limit is not an integer.
    """

    paths: Sequence[str]
    max_tokens_per_batch: int | None = None
    kv_budget_bytes: int | None = None
    max_context: int | None = None
    execution_path: str | None = None
    self_test: bool = True

    def __post_init__(self) -> None:
        minimums = {"max_tokens_per_batch": 1, "kv_budget_bytes": 0, "max_context": 1}
        for name, minimum in minimums.items():
            if getattr(self, name) is not None:
                checked_integer(name, getattr(self, name), minimum)
        path = self.execution_path
        if path is not None and path not in self.paths:
            names = ", ".join(map(repr, self.paths))
            raise ValueError(f"no execution path {path!r}; choose one of {names}, or None")


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The execution path that serves a model.

    Attributes:
        name: One of the engine's `ServeOptions.paths`.
        path: Execution path that computes the rows.
        reason: Reason why no faster path was chosen, `"the fastest"` or `"requested"`.
        error: Largest error in log-probability in the self-test; None without a test.
    """

    name: str
    path: PrefixRows | UncachedPath
    reason: str
    error: float | None = None

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return name, reason and error as statistics."""
        error = {} if self.error is None else {"self_test_error": self.error}
        return {"execution_path": self.name, "execution_path_reason": self.reason, **error}


class SelfTest:
    """Compares an execution path with a reference that runs every sequence separately.

    Three batches of mixed lengths, forks, repeats, and one and several new tokens detect
    state that leaks between sequences, missing biases, wrong positions and short windows.
    Errors that need thousands of tokens (long windows, scaling of positions) must be excluded
    by other rules.

    Args:
        text: At least one token id; at most 24 ids are used.
        reference: Execution path with correct rows.
        tolerance: Largest accepted error in log-probability.
        max_context: Maximum length of a sequence in tokens; None for no limit.
        scale_tolerance: Whether to accept errors up to four times the difference that batching
            causes in the reference.
    """

    def __init__(
        self,
        text: Sequence[int],
        reference: UncachedPath,
        *,
        tolerance: float,
        max_context: int | None,
        scale_tolerance: bool = False,
    ) -> None:
        longest = min(_LONGEST_TEXT, max_context or _LONGEST_TEXT)
        self._steps = _steps((list(text) * _LONGEST_TEXT)[:longest])
        self._reference, self._tolerance = reference, tolerance
        self._scale_tolerance = scale_tolerance
        self._rows: dict[TokenSequence, torch.Tensor] = {}

    def largest_error(self, path: PrefixRows) -> float:
        """Return the largest error of a path's rows; its cache is empty afterwards.

        Raises:
            UnsupportedModelError: The error exceeds the tolerance, or the path raised.
        """
        tolerance, worst = self._tolerance, 0.0
        if self._scale_tolerance:
            batch = max(self._steps, key=len)
            rounding = self._error(self._reference.rows(None, batch), batch)
            tolerance = max(tolerance, _ROUNDING_FACTOR * rounding)
        for step in self._steps:
            try:
                rows = path.rows(None, step)
            except Exception as error:
                raise UnsupportedModelError(
                    f"in the self-test it raised {describe_error(error)}"
                ) from error
            worst = max(worst, self._error(rows, step))
        if not worst <= tolerance:
            raise UnsupportedModelError(
                f"in the self-test its log-probabilities were off by {worst:.1e}, more than "
                f"{tolerance:.1e}"
            )
        path.clear()
        return worst

    def _error(self, rows: torch.Tensor, step: Sequence[TokenSequence]) -> float:
        for sequence in step:
            if sequence not in self._rows:
                self._rows[sequence] = self._reference.rows(None, [sequence])[0]
        expected = torch.stack([self._rows[sequence] for sequence in step])
        finite = expected.isfinite()
        if not torch.equal(rows.isfinite(), finite):
            return float("inf")
        return float((rows - expected)[finite].abs().max())


def _steps(text: Sequence[int]) -> list[list[TokenSequence]]:
    long, other = tuple(text), text[0]
    short, middle = long[:2], long[: max(1, len(long) // 2)]
    first = [middle, long[:-2] or long, (*reversed(short),)]
    second = [middle, long[:-1] or long, (*middle[:-1], other), (*short, other)[: len(long)]]
    third = [long, middle[: max(1, len(middle) - 2)]]
    steps = (first, second, third)
    return [list(dict.fromkeys(map(TokenSequence.of, step))) for step in steps]


def choose_path(
    model_name: str,
    faster: Mapping[str, Callable[[int | None], Path]],
    reference: UncachedPath,
    *,
    options: ServeOptions,
    self_test: Callable[[Path], float],
    logger: logging.Logger,
) -> PathChoice:
    """Return the fastest path with correct rows, or the requested one.

    Args:
        model_name: Name of the model in messages.
        faster: Functions that build the paths except the last of `options.paths`, fastest
            first, or raise `UnsupportedModelError`. The argument is the memory for keys and
            values in bytes, None for the default. The self-test needs room for its batches:
            with a smaller budget, a path is built again for it.
        reference: The last of `options.paths`, which supports every model.
        options: Options of the engine.
        self_test: Function that returns the largest error of a faster path, or raises
            `UnsupportedModelError`; not called if `options.self_test` is False.
        logger: Logger of the choice, at level INFO.

    Raises:
        ModelLoadError: The requested path does not support the model.
    """
    requested = options.execution_path
    reason, refusals = "requested" if requested else "the fastest", []
    choice = None
    for name, build in faster.items():
        if requested not in {None, name}:
            continue
        loading_stage(f"preparing and testing the execution path {name!r}")
        try:
            path, error = build(options.kv_budget_bytes), None
            if options.self_test:
                needed = _TEST_SLOTS * path.bytes_per_token
                if path.budget_bytes >= needed:
                    error = self_test(path)
                else:
                    error = self_test(build(needed))
                    path = build(options.kv_budget_bytes)
        except UnsupportedModelError as unsupported:
            if requested is not None:
                raise ModelLoadError(
                    f"execution_path={name!r} cannot serve {model_name}: {unsupported}"
                ) from unsupported
            refusals.append(f"not {name}: {unsupported}")
        else:
            choice = PathChoice(name, path, "; ".join(refusals) or reason, error)
            break
    if choice is None:
        choice = PathChoice(options.paths[-1], reference, "; ".join(refusals) or reason)
    logger.info(
        "%s is served by the execution path %r (%s; %s)",
        model_name,
        choice.name,
        choice.reason,
        "not tested" if choice.error is None else f"self-test error {choice.error:.1e}",
    )
    return choice
