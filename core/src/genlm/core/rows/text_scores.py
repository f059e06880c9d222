"""Scores and reductions of all positions of texts, from logits that come in pieces.

A query with `targets` requests the log-probability of each target, or, with a `GroupReduction`
as its output, a reduction of the rows that predict the targets. Engines pass logits of a few
positions at a time, in any order; the rows of a text are never in memory together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from genlm.core.base.arrays import ranges
from genlm.core.base.error_handling import errors_of
from genlm.core.base.errors import EvaluationError, GenlmError
from genlm.core.queries.generations import Integers64
from genlm.core.queries.query import ROW_ONLY, GroupReduction, Query, Reduced, TokenScores
from genlm.core.rows.device_rows import has_kernels, log_sums_on_device
from genlm.core.rows.groups import Columns
from genlm.core.rows.logits import (
    invalid_computation,
    joined_parts,
    known_logits,
    moved,
    row_parts,
    rows_from_logits,
)
from genlm.core.vocab import Vocabulary

TextResult = TokenScores | Reduced | GenlmError
"""Result of a text: scores, columns or an error."""


class PieceScores:
    """Scores and reductions of texts, from logits that come in pieces and in any order.

    The targets of all texts are numbered consecutively. The logits that predict a target have
    a key, by default the number of the target; an engine with other keys, such as slots, passes
    them to `expect`.

    Args:
        texts: Queries with targets.
        vocabulary: Vocabulary of the rows.

    Attributes:
        targets: The targets of all texts, shape `(n,)`.
        ends: Number of targets of the texts before each, and of all, shape `(texts + 1,)`.
    """

    def __init__(self, texts: Sequence[Query], vocabulary: Vocabulary) -> None:
        self.targets = np.array([i for text in texts for i in text.targets], np.int64)
        self.ends = np.cumsum([0, *(len(text.targets) for text in texts)])
        self._vocabulary = vocabulary
        are_scored = [text.outputs == ROW_ONLY for text in texts]
        self._scored = np.repeat(are_scored, np.diff(self.ends)).astype(bool)
        self._reduced = {
            index: ReducedText(cast("GroupReduction", text.outputs[0]), len(text.targets))
            for index, text in enumerate(texts)
            if not are_scored[index]
        }
        self._is_added = np.zeros(len(self.targets), bool)
        self._parts: list[tuple[Integers64, torch.Tensor]] = []
        self._results: dict[int, TextResult] = {}
        numbers = np.arange(len(self.targets))
        self.expect(numbers, numbers)

    def expect(self, keys: Integers64, members: Integers64) -> None:
        """Set the targets of the positions of the next logits.

        Args:
            keys: Key of the position before each target; several targets may share a key.
            members: Numbers of the targets.
        """
        order = np.argsort(keys, kind="stable")
        self._keys, self._members = keys[order], members[order]

    @torch.inference_mode(False)  # results are normal tensors, also of engines that use it
    def add(self, keys: Integers64, logits: torch.Tensor) -> None:
        """Score or reduce the rows of some positions.

        Args:
            keys: Keys of positions; those that no target follows are ignored.
            logits: Shape `(len(keys), width)`, any floating dtype, any device.
        """
        begins = np.searchsorted(self._keys, keys, "left")
        counts = np.searchsorted(self._keys, keys, "right") - begins
        rows = np.repeat(np.arange(len(keys)), counts)
        members = self._members[ranges(begins, counts)]
        self._is_added[members] = True
        logits = logits.detach()
        scored = self._scored[members]
        if scored.any():
            scored_members = members[scored]
            scores = self._score(logits, rows[scored], self.targets[scored_members])
            self._parts.append((scored_members, torch.stack(scores)))
        if not scored.all():
            self._reduce(logits, rows[~scored], members[~scored])

    @property
    def is_complete(self) -> bool:
        """Whether every text has a result, or the logits before all of its targets."""
        return bool(self._is_added.all())

    def put(self, index: int, result: TextResult) -> None:
        """Set the result of a text that was computed by other means, or its error."""
        self._results[index] = result
        self._is_added[self.ends[index] : self.ends[index + 1]] = True

    @torch.inference_mode(False)  # results are normal tensors, also of engines that use it
    def results(self) -> list[TextResult]:
        """Return the result or the error of each text.

        The result is an `EvaluationError` for a text with a row that is not a distribution,
        with a reduction that raised, or with positions that were not computed.
        """
        shape = 2, len(self.targets)
        logprobs, highest = torch.full(shape, math.nan, dtype=torch.float32, device="cpu")
        for members, values in self._parts:
            places = torch.from_numpy(members)
            logprobs[places], highest[places] = values.cpu()
        results: list[TextResult] = []
        for index, (begin, end) in enumerate(zip(self.ends, self.ends[1:], strict=False)):
            if index in self._results:
                results.append(self._results[index])
            elif not self._is_added[begin:end].all():
                count = int(self._is_added[begin:end].sum())
                results.append(
                    EvaluationError(
                        f"the engine computed {count} of {end - begin} positions of a text"
                    )
                )
            elif index in self._reduced:
                results.append(self._reduced[index].result())
            else:
                results.append(_scores(logprobs[begin:end], highest[begin:end]))
        return results

    def _score(
        self, logits: torch.Tensor, rows: Integers64, targets: Integers64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each target, and the highest one of its row."""
        width = min(logits.shape[1], self._vocabulary.size)
        missing = targets >= width
        if self._vocabulary.missing_ids:
            missing |= np.isin(targets, np.array(self._vocabulary.missing_ids))
        numbers = np.stack([rows, np.where(missing, 0, targets), missing.astype(np.int64)])
        row, column, is_missing = moved(torch.from_numpy(numbers), logits.device)
        totals, highest = self._normalisers(logits)
        target_logits = logits[row, column].float().masked_fill(is_missing.bool(), -math.inf)
        return target_logits - totals[row], highest[row] - totals[row]

    def _normalisers(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logsumexp and the maximum of each row, some rows at a time."""
        if has_kernels(logits):
            return log_sums_on_device(known_logits(logits, self._vocabulary))

        def of_part(bounds: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
            known = known_logits(logits[slice(*bounds)], self._vocabulary).float()
            return known.logsumexp(-1), known.amax(-1)

        parts = row_parts(len(logits), logits.shape[1], logits.device)
        totals, highest = joined_parts(map(of_part, parts), len(logits))
        return totals, highest

    def _reduce(self, logits: torch.Tensor, rows: Integers64, members: Integers64) -> None:
        """Reduce the rows before some targets, separately for each text."""
        texts = np.searchsorted(self.ends, members, "right") - 1
        for index in np.unique(texts).tolist():
            in_text = texts == index
            places, text_rows = members[in_text] - self.ends[index], rows[in_text]
            for begin, end in row_parts(len(text_rows), self._vocabulary.size, logits.device):
                part = logits[moved(torch.from_numpy(text_rows[begin:end]), logits.device)]
                computed = rows_from_logits(part, self._vocabulary)
                self._reduced[index].add(places[begin:end], computed)


class ReducedText:
    """The columns of one text's reduction, computed in pieces and in any order.

    Args:
        reduction: Reduction of the rows that predict the targets.
        count: Number of targets.
    """

    def __init__(self, reduction: GroupReduction, count: int) -> None:
        self._columns = Columns(reduction, count)
        self._kind = type(reduction)
        self._count = count
        self._invalid: torch.Tensor | int = 0
        self._error: GenlmError | None = None

    def add(self, places: Integers64, rows: torch.Tensor) -> None:
        """Reduce the rows of some positions; after an error, do nothing.

        Args:
            places: Indices of targets.
            rows: Natural-log probabilities that predict them, shape
                `(len(places), vocab_size)`, float32.
        """
        if self._error is not None:
            return
        # Reading it here would wait for a GPU.
        self._invalid = self._invalid + rows[:, 0].isnan().sum()
        try:
            with errors_of(f"{self._kind.__name__}.compute"):
                self._columns.reduce(rows, np.arange(len(rows)), places)
        except GenlmError as error:  # it fails this text alone
            self._error = error

    @property
    def has_failed(self) -> bool:
        """Whether the reduction raised."""
        return self._error is not None

    def result(self) -> Reduced | GenlmError:
        """Return the columns, or the error of the text."""
        invalid = int(self._invalid)
        if invalid:
            return _not_distributions(invalid, self._count)
        if self._error is not None:
            return self._error
        return Reduced((self._columns.result(),))


def _scores(logprobs: torch.Tensor, highest: torch.Tensor) -> TokenScores | EvaluationError:
    invalid = int((~highest.isfinite()).sum())
    if invalid:
        return _not_distributions(invalid, len(highest))
    return TokenScores(logprobs.clone(), logprobs >= highest)


def _not_distributions(count: int, total: int) -> EvaluationError:
    return invalid_computation(
        f"{count} of {total} rows that are not distributions: logits are NaN, infinite or all "
        f"-inf"
    )
