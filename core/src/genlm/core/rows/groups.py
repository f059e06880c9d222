"""The computation of a `GroupQuery` in parts, and the columns of its results.

The rows of a part are reduced to columns before the next part is computed, so memory does not
grow with the number of members.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from genlm.core.base.arrays import ranges
from genlm.core.base.error_handling import errors_of
from genlm.core.base.errors import EvaluationError
from genlm.core.queries.generations import Integers64, is_identity
from genlm.core.queries.query import (
    GroupQuery,
    GroupReduction,
    GroupResult,
    GroupValues,
    MembersOf,
)
from genlm.core.rows.logits import (
    checked_values,
    invalid_rows,
    known_logits,
    main_memory,
    moved,
    row_parts,
    rows_from_logits,
)
from genlm.core.vocab import Vocabulary


def compute_columns(
    reduction: GroupReduction,
    values: torch.Tensor,
    row_of: Integers64,
    members: Integers64,
    *,
    are_logits: bool = False,
) -> tuple[torch.Tensor, ...] | None:
    """Reduce rows or logits of some members, and check the columns.

    See `GroupReduction.compute` and `GroupReduction.compute_from_logits`.

    Returns:
        The columns; None if the reduction needs rows instead of these logits.

    Raises:
        EvaluationError: The reduction raised, or did not return a tuple of tensors with an
            entry for each member.
    """
    compute = reduction.compute_from_logits if are_logits else reduction.compute
    kind = type(reduction.reduction if isinstance(reduction, MembersOf) else reduction)
    name = f"{kind.__name__}.{compute.__name__}"
    columns: Any  # of a user's function, which may return anything
    with errors_of(name):
        columns = compute(values, torch.from_numpy(row_of), torch.from_numpy(members))
    if are_logits and columns is None:
        return None
    returned = f"{name} returned"
    if not isinstance(columns, tuple):
        raise EvaluationError(
            f"{returned} {type(columns).__name__}; expected a tuple of tensors"
        )
    for column in columns:
        if not isinstance(column, torch.Tensor):
            raise EvaluationError(
                f"{returned} a tuple with {type(column).__name__}; expected a tuple of tensors"
            )
        if column.shape[:1] != (len(members),):
            raise EvaluationError(
                f"{returned} a tensor of shape {tuple(column.shape)} for {len(members)} "
                f"members; its first dimension must have an entry for each"
            )
    return columns


class Columns:
    """The columns of a reduction, whose members are computed in parts and in any order."""

    def __init__(self, reduction: GroupReduction, count: int) -> None:
        self._reduction = reduction
        self._count = count
        self._columns: tuple[torch.Tensor, ...] = ()

    def reduce(
        self,
        values: torch.Tensor,
        row_of: Integers64,
        members: Integers64,
        *,
        are_logits: bool = False,
    ) -> bool:
        """Add the columns of `compute_columns`.

        Returns:
            False if the reduction needs rows instead of these logits.
        """
        columns = compute_columns(
            self._reduction, values, row_of, members, are_logits=are_logits
        )
        if columns is None:
            return False
        if len(members) == self._count:  # `add` need not copy them
            memory = values.untyped_storage().data_ptr()  # the memory of the values is reused
            columns = tuple(
                column.clone() if column.untyped_storage().data_ptr() == memory else column
                for column in columns
            )
        self.add(members, columns)
        return True

    def add(self, members: Integers64, columns: tuple[torch.Tensor, ...]) -> None:
        """Add the results of some members."""
        if is_identity(members, self._count):
            self._columns = columns
            return
        if not self._columns:
            self._columns = tuple(
                part.new_empty((self._count, *part.shape[1:])) for part in columns
            )
        places = torch.from_numpy(members)
        for column, part in zip(self._columns, columns, strict=True):
            column[moved(places, column.device)] = part.to(column.device)

    def result(self) -> tuple[torch.Tensor, ...]:
        """Return the columns, in main memory unless the reduction leaves them on the device."""
        if self._reduction.stays_on_device:
            return self._columns
        return main_memory(self._columns)


class GroupWork:
    """A group query that is computed part by part.

    Args:
        query: The query.
        vocabulary: Vocabulary of the rows.

    Attributes:
        errors: Errors of sequences, by their place in `query.wanted`.
    """

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        self.query = query
        self.errors: dict[int, Exception] = {}
        self._vocabulary = vocabulary
        self._remaining = np.arange(len(query.wanted))
        self._columns = Columns(query.reduction, len(query.row_of))

    @functools.cached_property
    def _is_identity(self) -> bool:
        """Whether member i has row i."""
        return is_identity(self.query.row_of, len(self.query.wanted))

    @functools.cached_property
    def _by_row(self) -> Integers64:
        """The members in the order of their rows, shape `(n,)`."""
        return np.argsort(self.query.row_of, kind="stable")

    @functools.cached_property
    def _bounds(self) -> Integers64:
        """Start of each row's members in `_by_row`, and the end of the last, `(rows + 1,)`."""
        places = np.arange(len(self.query.wanted) + 1)
        return np.searchsorted(self.query.row_of[self._by_row], places)

    @property
    def is_begun(self) -> bool:
        """Whether some sequences were computed or failed."""
        return len(self._remaining) < len(self.query.wanted)

    @property
    def is_complete(self) -> bool:
        """Whether all sequences were computed or failed."""
        return not len(self._remaining)

    def next_part(self, limit: int) -> Integers64:
        """Return the places of the next sequences to compute, and mark them as done."""
        count = max(1, limit)
        part, self._remaining = self._remaining[:count], self._remaining[count:]
        return part

    def put_back(self, place: int) -> None:
        """Mark a sequence as not done, because only a part of it was computed."""
        self._remaining = np.insert(self._remaining, 0, place)

    @torch.inference_mode(False)  # results are normal tensors, also of engines that use it
    def reduce(self, part: Integers64, computed: GroupValues) -> None:
        """Reduce the values of a part, a few rows at a time on a CPU.

        Args:
            part: Places in `query.wanted`, in any order.
            computed: Rows or logits of these places, in the same order.

        Raises:
            EvaluationError: They are not one row, or one row of logits, for each place.
        """
        size = self._vocabulary.size
        values = checked_values(computed, len(part), size, "evaluate_groups").values
        for begin, end in row_parts(len(part), values.shape[1], values.device):
            rows, places = values[begin:end], part[begin:end]
            members, row_of = self._members(places)
            if computed.are_logits:
                logits = known_logits(rows, self._vocabulary)
                is_complete = logits.shape[1] == self._vocabulary.size
                if is_complete and self._columns.reduce(
                    logits, row_of, members, are_logits=True
                ):
                    continue
                rows = rows_from_logits(logits, self._vocabulary, reuses_memory=True)
            invalid = invalid_rows(rows, self._vocabulary.size, normalised=computed.are_logits)
            if invalid:
                self.errors |= {int(places[i]): error for i, error in invalid.items()}
                valid = ~np.isin(row_of, list(invalid))
                members, row_of = members[valid], row_of[valid]
            if len(members):
                self._columns.reduce(rows, row_of, members)

    def put(self, columns: tuple[torch.Tensor, ...], errors: dict[int, Exception]) -> None:
        """Set the columns of all members, and the errors of sequences by place."""
        self._columns.add(np.arange(len(self.query.row_of)), columns)
        self.errors = errors

    def members_of(self, place: int) -> Integers64:
        """Return the members that have the sequence at a place in `query.wanted`."""
        return self._by_row[self._bounds[place] : self._bounds[place + 1]]

    def result(self) -> GroupResult:
        """Return the columns of all members, once."""
        # Tracebacks refer to this object, which must not wait for the garbage collector.
        errors, self.errors = self.errors, {}
        return GroupResult(self._columns.result(), errors)

    def _members(self, places: Integers64) -> tuple[Integers64, Integers64]:
        """Return the members of some rows, by row, and the place of each one's row."""
        if self._is_identity:
            return places, np.arange(len(places))
        begins = self._bounds[places]
        counts = self._bounds[places + 1] - begins
        row_of = np.repeat(np.arange(len(places)), counts)
        return self._by_row[ranges(begins, counts)], row_of
