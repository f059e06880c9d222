"""`Columns`: the results of a `GroupReduction`, assembled from parts of its members."""

from __future__ import annotations

import torch

from genlm.core.generations import Integers64
from genlm.core.query import GroupReduction
from genlm.core.rows import moved

__all__ = ["Columns"]


class Columns:
    """The columns of a reduction, whose members are computed in parts and in any order."""

    def __init__(self, reduction: GroupReduction, count: int) -> None:
        self._reduction = reduction
        self._count = count
        self._columns: tuple[torch.Tensor, ...] = ()

    def reduce(self, rows: torch.Tensor, row_of: Integers64, members: Integers64) -> None:
        """Reduce the rows of some members; see `GroupReduction.compute`."""
        places = torch.from_numpy(members)
        self.add(members, self._reduction.compute(rows, torch.from_numpy(row_of), places))

    def add(self, members: Integers64, columns: tuple[torch.Tensor, ...]) -> None:
        """Add the results of some members."""
        found: object = columns
        if not isinstance(found, tuple):
            raise TypeError(
                f"{type(self._reduction).__name__}.compute returned {type(found).__name__}; "
                f"expected a tuple of tensors"
            )
        for part in columns:
            if len(part) != len(members):
                raise ValueError(f"{len(part)} results for {len(members)} members")
        if not self._columns:
            self._columns = tuple(
                each.new_empty((self._count, *each.shape[1:])) for each in columns
            )
        places = torch.from_numpy(members)
        for column, part in zip(self._columns, columns, strict=True):
            column[moved(places, column.device)] = part.to(column.device)

    def result(self) -> tuple[torch.Tensor, ...]:
        """Return the columns, in main memory unless the reduction leaves them on the device."""
        if self._reduction.stays_on_device:
            return self._columns
        return tuple(column.cpu() for column in self._columns)
