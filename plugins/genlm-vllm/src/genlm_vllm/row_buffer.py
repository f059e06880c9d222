"""`RowBuffer`: rows and scores of requests, until the engine fetches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from genlm.plugin import (
    EvaluationError,
    Reduced,
    Reduction,
    reduce_logits,
    reduce_rows,
    rows_from_logits,
)
from genlm.prefix import PieceScores, TextResult

if TYPE_CHECKING:
    from genlm.plugin import Vocabulary

__all__ = ["ROW_BUFFER", "RowBuffer", "VocabularyIds", "device_index", "without_frames"]

_MOST_FLAGS = 64
"""Number of tokens of a continuation after which their flags are combined into one."""

Outputs = tuple[Reduction | None, ...]
"""Requested outputs of a row, see `genlm.plugin.Query`."""

_ROW: Outputs = (None,)


@dataclass(frozen=True)
class VocabularyIds:
    """The part of a vocabulary that makes rows; a worker has no tokenizer.

    Attributes:
        size: Number of ids.
        missing_ids: Ids below `size` without a token.
    """

    size: int
    missing_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _BufferedRow:
    """Row `index` of a step's rows on a GPU, whose computation may not have finished.

    Attributes:
        rows: All rows of the step.
        index: Index of the row.
        outputs: The requested outputs of the row.
    """

    rows: torch.Tensor
    index: int
    outputs: Outputs


_Stored = _BufferedRow | PieceScores | torch.Tensor | Reduced | Exception


class RowBuffer:
    """Rows and scores by the key of their request.

    A request may be computed in several steps and, after it was preempted, begin again.

    Attributes:
        ids: The ids of the rows.
        active: Whether this process buffers rows: one of several tensor-parallel ranks does.
        alone: Whether no other rank computes the same logits, so that an error here may be
            handled here.
        tokens_copied: Tokens of forked requests that were copied instead of computed.
    """

    def __init__(self) -> None:
        self.ids = VocabularyIds(0)
        self.active = False
        self.alone = True
        self.tokens_copied = 0
        self._results: dict[int, _Stored] = {}
        self._invalid: dict[int, list[torch.Tensor]] = {}  # whether draws were invalid
        self._computed: Any = None  # torch.cuda.Event, after all that is stored

    def reset(self, ids: VocabularyIds, *, active: bool, alone: bool = True) -> None:
        """Drop all rows and set the attributes."""
        self._results.clear()
        self._invalid.clear()
        self.ids = ids
        self.active = active
        self.alone = alone
        self.tokens_copied = 0

    def put(
        self, keys: list[int], logits: torch.Tensor, outputs: Sequence[Outputs | None]
    ) -> None:
        """Store rows, or their requested outputs, in place of earlier ones of the same keys.

        A CPU stores results only. A GPU stores the rows and reduces them when they are
        fetched, because reducing them here would wait for the device.

        Args:
            keys: Key of each row.
            logits: Logits of these rows, shape `(len(keys), width)`.
            outputs: Requested outputs of each row; None for the row itself.
        """
        wanted = [_ROW if each is None else each for each in outputs]
        vocabulary = cast("Vocabulary", self.ids)
        results: Sequence[Any]
        if logits.device.type != "cpu":
            rows = rows_from_logits(logits, vocabulary)
            results = [_BufferedRow(rows, i, each) for i, each in enumerate(wanted)]
            self._record(rows)
        elif all(each == _ROW for each in wanted):
            results = _copies(rows_from_logits(logits, vocabulary))
        else:
            results = _unwrapped(reduce_logits(logits, vocabulary, wanted), wanted)
        self._results.update(zip(keys, results, strict=True))

    def add_scores(
        self,
        key: int,
        begin: Callable[[], PieceScores],
        wanted: range,
        logits: torch.Tensor,
    ) -> None:
        """Score some targets of a text, or reduce the rows that predict them.

        Args:
            key: Key of the text's request.
            begin: Returns the scorer of the text, or raises `EvaluationError`.
            wanted: Numbers of the targets.
            logits: Logits that predict them, shape `(len(wanted), width)`.
        """
        if key not in self._results:
            try:
                self._results[key] = begin()
            except EvaluationError as error:
                self.fail([key], error)
        scores = self._results[key]
        if isinstance(scores, PieceScores):
            scores.add(np.arange(wanted.start, wanted.stop), logits)

    def put_draws(self, keys: list[int], invalid: torch.Tensor) -> None:
        """Note for a token of each continuation whether its row was no distribution, `(n,)`."""
        for key, flag in zip(keys, invalid.unbind(), strict=True):
            flags = self._invalid.setdefault(key, [])
            flags.append(flag)
            if len(flags) == _MOST_FLAGS:
                flags[:] = [torch.stack(flags).any()]
        self._record(invalid)

    def _record(self, stored: torch.Tensor) -> None:
        """Have `take` wait for the stored results, on any stream."""
        if stored.is_cuda:
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed.record(torch.cuda.current_stream(stored.device))

    def _wait_on_current_stream(self, stored: torch.Tensor) -> None:
        """Have the current stream wait, and keep the memory until the stream has read it."""
        if stored.is_cuda:
            stream = torch.cuda.current_stream(stored.device)
            stream.wait_event(self._computed)
            stored.record_stream(stream)

    def fail(self, keys: list[int], error: Exception) -> None:
        """Store an error, such as out of memory, which would end vLLM if it were raised."""
        self._results.update(dict.fromkeys(keys, without_frames(error)))

    def take(
        self, keys: list[int], abandoned: list[int]
    ) -> dict[int, torch.Tensor | Reduced | TextResult | Exception]:
        """Remove what is stored for `keys` and return it.

        On a GPU everything is computed on the current stream, which waits for the rows.

        Args:
            keys: The keys of finished requests.
            abandoned: Keys of rows to drop.

        Returns:
            For each stored key the row, or a `Reduced`, or the error of a row that is not a
            distribution and has other requested outputs, or of a continuation with one;
            or the scores of a text if all are known: positions that vLLM's prefix cache
            served have no scores.
        """
        taken = {key: self._results.pop(key) for key in keys if key in self._results}
        invalid = [self._invalid.pop(key, []) for key in keys]
        for key in abandoned:
            self._results.pop(key, None)
            self._invalid.pop(key, None)
        steps: dict[int, dict[int, _BufferedRow]] = {}
        found: dict[int, Any] = dict(taken)
        for key, each in taken.items():
            if isinstance(each, PieceScores):
                del found[key]
                if each.is_complete:
                    [found[key]] = each.results()
            elif isinstance(each, _BufferedRow):
                steps.setdefault(id(each.rows), {})[key] = each
        for members in steps.values():
            self._wait_on_current_stream(next(iter(members.values())).rows)
            found |= zip(members, _computed(list(members.values())), strict=True)
        for key, flags in zip(keys, invalid, strict=True):
            for flag in flags:
                self._wait_on_current_stream(flag)
            if flags and key not in found and (problem := _problem(flags)) is not None:
                found[key] = problem
        return found

    def __len__(self) -> int:
        return len(self._results) + len(self._invalid)


def _computed(members: Sequence[_BufferedRow]) -> Sequence[torch.Tensor | Reduced | Exception]:
    """Return the requested outputs of rows of one step."""
    rows, outputs = members[0].rows, [each.outputs for each in members]
    indices = [each.index for each in members]
    try:
        with torch.inference_mode(False), torch.no_grad():
            if indices != list(range(len(rows))):
                rows = rows[device_index(indices, rows.device)]
            if all(each == _ROW for each in outputs):
                return _copies(rows)
            return _unwrapped(reduce_rows(rows, outputs, normalised=True), outputs)
    except Exception as error:  # noqa: BLE001 - out of memory; vLLM goes on
        return [without_frames(error)] * len(members)


def device_index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy integers to a device as int64, without waiting for its computation."""
    pinned = device.type == "cuda" and torch.cuda.is_available()
    return torch.tensor(values, pin_memory=pinned).to(device, non_blocking=True)


def _copies(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Copy each row: a view would keep all of them alive."""
    copies: Any = torch.unbind_copy(rows)  # type: ignore[func-returns-value]
    return list(copies)


def _unwrapped(
    results: Sequence[Reduced | Exception], outputs: Sequence[Outputs]
) -> list[torch.Tensor | Reduced | Exception]:
    """Return the row itself where only the row is requested."""
    return [
        result.values[0] if isinstance(result, Reduced) and each == _ROW else result
        for result, each in zip(results, outputs, strict=True)
    ]


def _problem(flags: list[torch.Tensor]) -> Exception | None:
    """Return the error of a continuation, given the flags of its tokens."""
    try:
        invalid = bool(torch.stack(flags).any())
    except Exception as error:  # noqa: BLE001 - out of memory; vLLM goes on
        return without_frames(error)
    if not invalid:
        return None
    return EvaluationError(
        "vLLM computed a row that is not a distribution in a continuation: NaN or infinite "
        "logits. Try dtype='float32'"
    )


def without_frames(error: Exception) -> Exception:
    """Return an error without the frames of its traceback, which would keep tensors alive."""
    error.__context__ = None
    return error.with_traceback(None)


ROW_BUFFER = RowBuffer()
"""The buffer of this process: vLLM creates logits processors itself, for one live engine."""
