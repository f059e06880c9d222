"""The numbers of a plan as tensors on one device, and masks computed from them.

A model spread over several devices needs one `DevicePlan` for each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.plugin import moved
from genlm.prefix import Slots
from genlm_hf.packed.plan import Chunk, PackedPlan, QueryGroup

# Maximum bytes of suffixes gathered at once on a CPU, so that reads hit its cache. More is
# slower, especially beyond 32 MiB, where every allocation maps new pages.
_GATHERED_BYTES = 2**20

# Maximum slots of several chunks that are gathered at once: 128 MiB a layer at 2 KiB a slot.
_GATHERED_SLOTS = 2**16


class DevicePlan:
    """The plan of one forward pass on one device, copied in one transfer.

    Attributes:
        tokens, positions, writes, results: As in `PackedPlan`.
        groups: The groups of the plan, on the device.
        chunks: The chunks of the plan, on the device.
    """

    def __init__(self, plan: PackedPlan, device: torch.device) -> None:
        arrays: list[NDArray[np.integer]]
        arrays = [plan.tokens, plan.positions, plan.writes, plan.results]
        for group in plan.groups:
            arrays += [group.suffixes, group.prefix]
        arrays += [chunk.slots for chunk in plan.chunks]
        numbers = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        numbers = moved(numbers, device)
        parts = numbers.split_with_sizes([array.size for array in arrays])
        tensors = (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))
        self.tokens, self.positions, self.writes, self.results = itertools.islice(tensors, 4)
        self.groups, end = [], 0
        for group in plan.groups:
            tokens = slice(end, end := end + len(group.members))
            shortest = int(plan.positions[tokens].min()) + 1
            positions, suffixes, prefix = self.positions[tokens], next(tensors), next(tensors)
            self.groups.append(DeviceGroup(group, shortest, positions, suffixes, prefix))
        self.chunks = [DeviceChunk(chunk, next(tensors)) for chunk in plan.chunks]
        total = sum(len(chunk.slots) for chunk in plan.chunks)
        self._plan, self._chunk_slots = plan, numbers[len(numbers) - total :]

    @functools.cached_property
    def merged_chunks(self) -> list[DeviceChunks]:
        """The chunks of the plan, in order, merged up to a number of slots."""
        merged, first = [], 0
        for chunks in _consecutive(self._plan.chunks):
            end = first + sum(len(chunk.slots) for chunk in chunks)
            merged.append(DeviceChunks(chunks, self._chunk_slots[first:end]))
            first = end
        return merged


class DeviceGroup:
    """Query tokens with a shared prefix, on one device.

    Args:
        group: The query tokens.
        shortest: Length of the shortest sequence, up to its query token.
        positions: Positions of the query tokens in their sequences, on the device.
        suffixes: The suffixes of the group, on the device.
        prefix: The prefix of the group, on the device.

    Attributes:
        count: Number of query tokens.
        prefix: Slots of the prefix.
        prefix_length: Number of these slots.
    """

    def __init__(
        self,
        group: QueryGroup,
        shortest: int,
        positions: torch.Tensor,
        suffixes: torch.Tensor,
        prefix: torch.Tensor,
    ) -> None:
        self.count, self._suffix = group.suffixes.shape
        self.prefix_length = len(group.prefix)
        self._suffixes = suffixes.reshape(-1)
        self.prefix = SlotIndex(group.prefix, prefix)
        self._longest = self.prefix_length + self._suffix
        self._ragged = shortest < self._longest
        self._positions = positions
        self._hidden: dict[int | None, torch.Tensor | None] = {}

    def suffixes_of(self, states: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield tokens and their suffixes' keys or values, `(heads, tokens, suffix, width)`."""
        heads, _, width = states.shape
        step = self.count
        if states.device.type == "cpu":
            token_bytes = heads * self._suffix * width * states.itemsize
            step = max(1, _GATHERED_BYTES // token_bytes)
        for first in range(0, self.count, step):
            slots = self._suffixes[first * self._suffix : (first + step) * self._suffix]
            suffixes = states.index_select(1, slots)
            yield slice(first, first + step), suffixes.view(heads, -1, self._suffix, width)

    def hidden(self, window: int | None) -> torch.Tensor | None:
        """Return which keys are hidden from each query token, `(tokens, prefix + suffix)`.

        The result is None if all keys are visible.
        """
        if window not in self._hidden:
            self._hidden[window] = self._compute_hidden(window)
        return self._hidden[window]

    def _compute_hidden(self, window: int | None) -> torch.Tensor | None:
        if window is not None and self._longest <= window:
            window = None
        if not self._ragged and window is None:
            return None
        key = torch.arange(self.prefix_length + self._suffix, device=self._positions.device)
        hidden = key > self._positions[:, None]
        if window is not None:
            hidden |= key <= self._positions[:, None] - window
        return hidden


class DeviceChunk:
    """A prefill chunk, on one device.

    Attributes:
        past, length: Number of tokens before the chunk, and in it.
        slots: Slots of the past and of the chunk.
    """

    def __init__(self, chunk: Chunk, slots: torch.Tensor) -> None:
        self.past, self.length = chunk.past, chunk.length
        self._device = slots.device
        self.slots = SlotIndex(chunk.slots, slots)
        self._visible: dict[int | None, torch.Tensor] = {}

    def visible_range(self, first: int, end: int, window: int | None) -> slice:
        """Return the range of past and chunk visible to the tokens `first ... end - 1`."""
        begin = 0 if window is None else max(0, self.past + first + 1 - window)
        return slice(begin, self.past + end)

    def visible(self, first: int, end: int, window: int | None) -> torch.Tensor:
        """Return the mask of the tokens `first ... end - 1`, `(tokens, past + chunk)`.

        The mask of the whole chunk is computed once for all layers of one window.
        """
        if end - first < self.length:
            return self._compute_visible(first, end, window)
        if window not in self._visible:
            self._visible[window] = self._compute_visible(first, end, window)
        return self._visible[window]

    def _compute_visible(self, first: int, end: int, window: int | None) -> torch.Tensor:
        key = torch.arange(self.past + self.length, device=self._device)
        position = key[self.past + first : self.past + end, None]
        visible = key <= position
        return visible if window is None else visible & (key > position - window)


class DeviceChunks:
    """Several prefill chunks, on one device.

    Args:
        chunks: The chunks.
        slots: Slots of the past and of the tokens of each chunk, chunk by chunk.

    Attributes:
        length: Number of tokens of all chunks.
        max_length: Number of tokens of the longest chunk.
        max_total: Largest number of tokens of a chunk and its past.
        ends: For each chunk, the end of its tokens among all tokens, shape `(chunks + 1,)`,
            int32, beginning with 0.
        total_ends: The same of its tokens and its past.
        slots: As the argument.
    """

    def __init__(self, chunks: Sequence[Chunk], slots: torch.Tensor) -> None:
        lengths = np.array([(chunk.length, len(chunk.slots)) for chunk in chunks], np.int32)
        self.length = int(lengths[:, 0].sum())
        self.max_length, self.max_total = lengths.max(axis=0).tolist()
        ends = np.zeros((2, len(chunks) + 1), np.int32)
        ends[:, 1:] = lengths.cumsum(axis=0).T
        self.ends, self.total_ends = moved(torch.from_numpy(ends), slots.device)
        self.slots = SlotIndex(np.concatenate([chunk.slots for chunk in chunks]), slots)


class SlotIndex:
    """An index of slots: a slice if they are contiguous, else a tensor."""

    def __init__(self, slots: Slots, index: torch.Tensor) -> None:
        is_contiguous = len(slots) > 0 and bool((np.diff(slots) == 1).all())
        self._slice = slice(int(slots[0]), int(slots[-1]) + 1) if is_contiguous else None
        self._index = index

    def select(self, states: torch.Tensor) -> torch.Tensor:
        """Return the keys or values of the slots, `(heads, slots, width)`."""
        if self._slice is not None:
            return states[:, self._slice]
        return states.index_select(1, self._index)


def _consecutive(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Divide chunks into lists with a limited number of slots, at least one chunk each."""
    part: list[Chunk] = []
    total = 0
    for chunk in chunks:
        if part and total + len(chunk.slots) > _GATHERED_SLOTS:
            yield part
            part, total = [], 0
        part.append(chunk)
        total += len(chunk.slots)
    if part:
        yield part
