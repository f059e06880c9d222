"""A plan's numbers as tensors on one device, and the masks made from them.

A model spread over several devices has one of these for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from genlm.prefix import Slots
from genlm_hf.packed.plan import PackedPlan, Run
from genlm_hf.packed.rows import RowGroup

__all__ = ["DeviceGroup", "DevicePlan", "DeviceRun"]

# Most bytes of tails gathered at once on a CPU, so that they are read from its cache. More is
# slower, much so beyond 32 MiB: the system makes new pages for such a tensor each time.
_GATHERED_BYTES = 2**20


class DevicePlan:
    """The plan of one forward pass on one device, copied there in one piece.

    Attributes:
        tokens, positions, writes, results: As in the plan.
    """

    def __init__(self, plan: PackedPlan, device: torch.device) -> None:
        arrays = [plan.tokens, plan.positions, plan.writes, plan.results]
        for group in plan.groups:
            arrays += [_positions(group), group.tails, group.trunk]
        arrays += [run.slots for run in plan.runs]
        moved = iter(_moved(arrays, device))
        self.tokens, self.positions, self.writes, self.results = (next(moved) for _ in range(4))
        self.groups = [
            DeviceGroup(group, next(moved), next(moved), next(moved)) for group in plan.groups
        ]
        self.runs = [DeviceRun(run, next(moved)) for run in plan.runs]


def _moved(arrays: Sequence[Slots], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device, all at once: there each copy waits for the device."""
    numbers = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    parts = numbers.to(device).split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _positions(group: RowGroup) -> Slots:
    return np.array([row.position for row in group.rows], np.int64)


class DeviceGroup:
    """Rows with a common trunk, on one device.

    Args:
        group: The rows.
        positions: Of the rows in their sequences, on the device.
        tails: Slots, on the device.
        trunk: Slots, on the device.
    """

    def __init__(
        self,
        group: RowGroup,
        positions: torch.Tensor,
        tails: torch.Tensor,
        trunk: torch.Tensor,
    ) -> None:
        known = [row.position for row in group.rows]
        self.count, self._tail = group.tails.shape
        self.trunk_length = len(group.trunk)
        self._tails = tails.reshape(-1)
        self._trunk = _Slots(group.trunk, trunk)
        self._ragged = min(known) + 1 < self.trunk_length + self._tail
        self._longest = max(known) + 1
        self._positions = positions
        self._hidden: dict[int | None, torch.Tensor | None] = {}

    def trunk_of(self, states: torch.Tensor) -> torch.Tensor:
        """Return the trunk's keys or values, `(heads, trunk, width)`."""
        return self._trunk.of(states)

    def tails_of(self, states: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows and their tails' keys or values, `(heads, rows, tail, width)`."""
        heads, _, width = states.shape
        rows = self.count
        if states.device.type == "cpu":
            row_bytes = heads * self._tail * width * states.itemsize
            rows = max(1, min(rows, _GATHERED_BYTES // row_bytes))
        for first in range(0, self.count, rows):
            slots = self._tails[first * self._tail : (first + rows) * self._tail]
            tails = states.index_select(1, slots)
            yield slice(first, first + rows), tails.view(heads, -1, self._tail, width)

    def hidden(self, window: int | None) -> torch.Tensor | None:
        """Return which of trunk and tail a row must not see, `(rows, trunk + tail)`.

        None if every row sees all.
        """
        if window not in self._hidden:
            self._hidden[window] = self._make_hidden(window)
        return self._hidden[window]

    def _make_hidden(self, window: int | None) -> torch.Tensor | None:
        if window is not None and self._longest <= window:
            window = None
        if not self._ragged and window is None:
            return None
        key = torch.arange(self.trunk_length + self._tail, device=self._positions.device)
        hidden = key > self._positions[:, None]
        if window is not None:
            hidden |= key <= self._positions[:, None] - window
        return hidden


class DeviceRun:
    """Consecutive tokens of one sequence, on one device.

    Args:
        run: The tokens.
        slots: Of past and run, on the device.
    """

    def __init__(self, run: Run, slots: torch.Tensor) -> None:
        self.past, self.length = run.past, run.length
        self._device = slots.device
        self._slots = _Slots(run.slots, slots)
        self._visible: dict[int | None, torch.Tensor] = {}

    def all_of(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values of past and run, `(heads, past + run, width)`."""
        return self._slots.of(states)

    def seen(self, first: int, end: int, window: int | None) -> slice:
        """Return where of past and run all is that the tokens `first ... end - 1` see."""
        begin = 0 if window is None else max(0, self.past + first + 1 - window)
        return slice(begin, self.past + end)

    def visible(self, first: int, end: int, window: int | None) -> torch.Tensor:
        """Return what the tokens `first ... end - 1` of the run see, (tokens, past + run).

        Made once for all layers alike if it is asked for in one piece.
        """
        if end - first < self.length:
            return self._make_visible(first, end, window)
        if window not in self._visible:
            self._visible[window] = self._make_visible(first, end, window)
        return self._visible[window]

    def _make_visible(self, first: int, end: int, window: int | None) -> torch.Tensor:
        key = torch.arange(self.past + self.length, device=self._device)
        position = key[self.past + first : self.past + end, None]
        visible = key <= position
        return visible if window is None else visible & (key > position - window)


class _Slots:
    """Slots to read: a slice where they lie in one piece, else an index."""

    def __init__(self, slots: Slots, index: torch.Tensor) -> None:
        in_one_piece = len(slots) > 0 and bool((np.diff(slots) == 1).all())
        self._slice = slice(int(slots[0]), int(slots[-1]) + 1) if in_one_piece else None
        self._index = index

    def of(self, states: torch.Tensor) -> torch.Tensor:
        if self._slice is not None:
            return states[:, self._slice]
        return states.index_select(1, self._index)
