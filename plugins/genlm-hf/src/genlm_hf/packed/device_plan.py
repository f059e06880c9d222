"""A plan's numbers as tensors on one device, and the masks made from them.

A model spread over several devices has one of these for each.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    """The plan of one forward pass on one device."""

    def __init__(self, plan: PackedPlan, device: torch.device) -> None:
        self.writes = torch.from_numpy(plan.writes).to(device)
        self.groups = [DeviceGroup(group, device) for group in plan.groups]
        self.runs = [DeviceRun(run, device) for run in plan.runs]


class DeviceGroup:
    """Rows with a common trunk, on one device."""

    def __init__(self, group: RowGroup, device: torch.device) -> None:
        positions = np.array([row.position for row in group.rows], np.int64)
        self.count, self._tail = group.tails.shape
        self.trunk_length = len(group.trunk)
        self._tails = torch.from_numpy(group.tails.reshape(-1)).to(device)
        self._trunk = _Slots(group.trunk, device)
        self._ragged = int(positions.min()) + 1 < self.trunk_length + self._tail
        self._longest = int(positions.max()) + 1
        self._positions = torch.from_numpy(positions).to(device)
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
    """Consecutive tokens of one sequence, on one device."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.past, self.length = run.past, run.length
        self._device = device
        self._slots = _Slots(run.slots, device)

    def all_of(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values of past and run, `(heads, past + run, width)`."""
        return self._slots.of(states)

    def seen(self, first: int, end: int, window: int | None) -> slice:
        """Return where of past and run all is that the tokens `first ... end - 1` see."""
        begin = 0 if window is None else max(0, self.past + first + 1 - window)
        return slice(begin, self.past + end)

    def visible(self, first: int, end: int, window: int | None) -> torch.Tensor:
        """Return what the tokens `first ... end - 1` of the run see, (tokens, past + run)."""
        key = torch.arange(self.past + self.length, device=self._device)
        position = key[self.past + first : self.past + end, None]
        visible = key <= position
        return visible if window is None else visible & (key > position - window)


class _Slots:
    """Slots to read: a slice where they lie in one piece, else an index."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        in_one_piece = len(slots) > 0 and bool((np.diff(slots) == 1).all())
        self._slice = slice(int(slots[0]), int(slots[-1]) + 1) if in_one_piece else None
        self._index = None if in_one_piece else torch.from_numpy(slots).to(device)

    def of(self, states: torch.Tensor) -> torch.Tensor:
        if self._index is None:
            return states[:, self._slice]
        return states.index_select(1, self._index)
