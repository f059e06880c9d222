"""`GroupWork`: answers a `GroupQuery` part by part.

The rows of a part are reduced to columns before the next part is computed, so memory does not
grow with the number of members.
"""

from __future__ import annotations

import numpy as np
import torch

from genlm.core.generations import Integers64
from genlm.core.query import GroupQuery, GroupResult, GroupValues
from genlm.core.rows import invalid_rows, rows_from_logits
from genlm.core.vocab import Vocabulary

__all__ = ["GroupWork", "members_by_row"]

_VALUES_ON_CPU = 2**20
"""Maximum number of row entries per call of `compute` on a CPU: 4 MiB in float32."""

_VALUES_ON_DEVICE = 2**27
"""The same on other devices: 512 MiB in float32, 1,000 rows over 128,000 ids."""


class GroupWork:
    """A group query that is answered part by part.

    Args:
        query: The query.
        vocabulary: Vocabulary of the rows.

    Attributes:
        query: As above.
        errors: Errors of sequences, by their place in `query.wanted`.
    """

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        self.query = query
        self.errors: dict[int, Exception] = {}
        self._vocabulary = vocabulary
        self._done = 0
        self._columns: list[torch.Tensor] = []
        self._by_row = members_by_row(query.row_of)
        places = np.arange(len(query.wanted) + 1)
        self._bounds = np.searchsorted(query.row_of[self._by_row], places)

    @property
    def is_complete(self) -> bool:
        """Whether all sequences were computed or failed."""
        return self._done == len(self.query.wanted)

    def next_part(self, limit: int) -> Integers64:
        """Return the places of the next sequences to compute, which then count as done."""
        begin = self._done
        self._done = min(begin + max(1, limit), len(self.query.wanted))
        return np.arange(begin, self._done)

    def reduce(self, part: Integers64, computed: GroupValues) -> None:
        """Reduce what was computed for a part, a few rows at a time on a CPU.

        Args:
            part: Consecutive places in `query.wanted`.
            computed: Their values, in order.
        """
        values = computed.values
        on_cpu = values.device.type == "cpu"
        most = _VALUES_ON_CPU if on_cpu else _VALUES_ON_DEVICE
        step = max(1, most // max(1, values.shape[1]))
        for begin in range(0, len(part), step):
            rows, places = values[begin : begin + step], part[begin : begin + step]
            if computed.are_logits:
                rows = rows_from_logits(rows, self._vocabulary)
            invalid = invalid_rows(rows, self._vocabulary.size, normalised=computed.are_logits)
            self.errors |= {int(places[i]): error for i, error in invalid.items()}
            first, end = self._bounds[places[0]], self._bounds[places[-1] + 1]
            members = self._by_row[first:end]
            row_of = self.query.row_of[members] - places[0]
            if invalid:
                valid = ~np.isin(row_of, list(invalid))
                members, row_of = members[valid], row_of[valid]
            if len(members):
                self._add(members, self._computed(rows, row_of, members))

    def result(self) -> GroupResult:
        """Return the columns of all members, once."""
        stays = self.query.reduction.stays_on_device
        columns = self._columns if stays else [column.cpu() for column in self._columns]
        # Tracebacks refer to this object, which must not wait for the garbage collector.
        errors, self.errors = self.errors, {}
        return GroupResult(tuple(columns), errors)

    def _computed(
        self, rows: torch.Tensor, row_of: Integers64, members: Integers64
    ) -> tuple[torch.Tensor, ...]:
        return self.query.reduction.compute(
            rows, torch.from_numpy(row_of), torch.from_numpy(members)
        )

    def _add(self, members: Integers64, columns: tuple[torch.Tensor, ...]) -> None:
        count = len(self.query.row_of)
        if not self._columns:
            self._columns = [each.new_empty((count, *each.shape[1:])) for each in columns]
        places = torch.from_numpy(members)
        for column, part in zip(self._columns, columns, strict=True):
            column[places.to(column.device)] = part


def members_by_row(row_of: Integers64) -> Integers64:
    """Return the members, those of the first row first, shape `(n,)`."""
    if (row_of[1:] >= row_of[:-1]).all():
        return np.arange(len(row_of))
    return np.argsort(row_of, kind="stable")
