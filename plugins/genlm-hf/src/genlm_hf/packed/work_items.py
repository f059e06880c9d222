"""The work items of a pass of query tokens, as numbers for the kernels.

A work item is a tile of consecutive query tokens and a range of slots that all of them see:
a part of a shared prefix, or a part of one token's suffix. A program of `kernels.attend`
computes a partial result for every token of its work item, and `kernels.combine` joins them.
Numbers are padded to a `StepSize`, since a CUDA graph has launches of one size.

Graphs have a size for each padded number of tokens, whatever the lengths and prefixes of the
sequences are, so that a population that grows is not captured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from genlm.prefix import SCRATCH_SLOT
from genlm_hf.packed.plan import Integers, PackedPlan

__all__ = [
    "FIELDS",
    "Sections",
    "StepSize",
    "WorkItems",
    "flattened",
    "graph_size",
    "power_of_two",
    "sections",
    "work_items",
]

Part = TypeVar("Part")

FIELDS = 5
"""Numbers of a work item: first query token, tokens, first slot, slots, first position."""

# Keys of a work item are a multiple of those that a program reads at once.
_KEYS = 64

# Programs for one head of keys that keep a GPU busy; more items only cost more joining.
_ITEMS_WANTED = 64

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StepSize:
    """Largest numbers that fit into a pass, padding included.

    Attributes:
        tokens: Query tokens.
        shared: Work items of shared prefixes.
        own: Work items of suffixes.
        tile: Query tokens of a work item of a shared prefix.
    """

    tokens: int
    shared: int
    own: int
    tile: int


@dataclass(frozen=True, slots=True)
class WorkItems:
    """The work items of a pass.

    Attributes:
        shared: Items of shared prefixes, shape (items, `FIELDS`).
        own: Items of suffixes, of one query token each, shape (items, `FIELDS`).
        slots: Slots of all prefixes and suffixes.
    """

    shared: Integers
    own: Integers
    slots: Integers

    def fit(self, size: StepSize) -> bool:
        """Whether a pass of this size has room for the items."""
        return len(self.shared) <= size.shared and len(self.own) <= size.own


def graph_size(tokens: int, tile: int) -> StepSize:
    """Return the size that a pass of that many query tokens is padded to.

    It has room for the suffixes of all tokens, and for the shared prefixes of tokens that are
    in few groups. `_divided` makes `_ITEMS_WANTED` items, or one for each tile.
    """
    padded = _padded_tokens(tokens)
    tiles = -(-padded // tile)
    return StepSize(padded, max(_ITEMS_WANTED, 2 * tiles), max(_ITEMS_WANTED, padded), tile)


class Sections(NamedTuple, Generic[Part]):
    """Ranges of a pass's numbers in one array, or tensors of these ranges."""

    tokens: Part
    positions: Part
    writes: Part
    results: Part
    offsets: Part
    rows: Part
    shared: Part
    own: Part
    slots: Part


def work_items(plan: PackedPlan, tile: int) -> WorkItems:
    """Divide the attention of a pass without prefill chunks.

    Args:
        plan: The pass.
        tile: Maximum number of query tokens of an item of a shared prefix.
    """
    shared, own, slots = [], [], []
    first = used = 0
    for group in plan.groups:
        count, longest = group.suffixes.shape
        prefix, end = len(group.prefix), first + count
        tokens = np.arange(first, end)
        if prefix:
            begins = tokens[::tile]
            tiles = (begins, np.minimum(tile, end - begins), used, prefix, 0)
            shared.append(_columns(*tiles))
        lengths = plan.positions[first:end] + 1 - prefix
        begins = used + prefix + longest * np.arange(count)
        own.append(_columns(tokens, 1, begins, lengths, prefix))
        slots += [group.prefix, group.suffixes.reshape(-1)]
        first, used = end, used + prefix + group.suffixes.size
    return WorkItems(_divided(shared), _divided(own), np.concatenate(slots))


def sections(size: StepSize) -> Sections[slice]:
    """Return the ranges of the numbers of a pass of this size."""

    def parts() -> Iterator[slice]:
        begin = 0
        for length in (
            *[size.tokens] * 4,
            size.tokens + 1,
            size.shared * size.tile + size.own,
            size.shared * FIELDS,
            size.own * FIELDS,
        ):
            yield slice(begin, begin + length)
            begin += -(-length // _ALIGNMENT) * _ALIGNMENT
        yield slice(begin, None)

    return Sections(*parts())


def flattened(plan: PackedPlan, items: WorkItems, size: StepSize) -> Integers:
    """Return the numbers of a pass, padded; `sections` tells where each is.

    Padding query tokens write to the scratch slot and belong to no work item; padding work
    items have neither query tokens nor slots. Slots, the last section, are not
    padded.
    """
    where = sections(size)
    numbers = np.zeros(where.slots.start + len(items.slots), np.int64)
    numbers[where.writes] = SCRATCH_SLOT
    offsets, rows = _partial_results(items, size)
    numbers[where.offsets] = offsets
    for section, values in (
        (where.tokens, plan.tokens),
        (where.positions, plan.positions),
        (where.writes, plan.writes),
        (where.results, plan.results),
        (where.rows, rows),
        (where.shared, items.shared.reshape(-1)),
        (where.own, items.own.reshape(-1)),
        (where.slots, items.slots),
    ):
        numbers[section.start : section.start + len(values)] = values
    return numbers


def _partial_results(items: WorkItems, size: StepSize) -> tuple[Integers, Integers]:
    """Return the rows of partial results of every query token.

    Returns:
        The first of each query token and the end of all, and the rows, token by token.
    """
    counts = items.shared[:, 1]
    within = _counting(counts)
    tokens = np.concatenate([np.repeat(items.shared[:, 0], counts) + within, items.own[:, 0]])
    rows = np.concatenate(
        [
            np.repeat(np.arange(len(counts)) * size.tile, counts) + within,
            size.shared * size.tile + np.arange(len(items.own)),
        ]
    )
    ends = np.cumsum(np.bincount(tokens, minlength=size.tokens))
    return np.concatenate([[0], ends]), rows[np.argsort(tokens, kind="stable")]


def _columns(*fields: Integers | int) -> Integers:
    """Return work items from their fields, each an array or the same for all."""
    return np.stack(np.broadcast_arrays(*fields), axis=1)


def _divided(parts: list[Integers]) -> Integers:
    """Split items of many slots, so that there are enough items for a GPU."""
    if not parts:
        return np.empty((0, FIELDS), np.int64)
    items = np.concatenate(parts)
    lengths = items[:, 3]
    cuts = max(1, _ITEMS_WANTED // len(items))
    most = -(-int(lengths.max()) // (cuts * _KEYS)) * _KEYS
    pieces = -(-lengths // most)
    skipped = _counting(pieces) * most
    found = np.repeat(items, pieces, axis=0)
    found[:, 2] += skipped
    found[:, 3] = np.minimum(found[:, 3] - skipped, most)
    found[:, 4] += skipped
    return found


def _counting(counts: Integers) -> Integers:
    """Return 0 ... count - 1 for each count, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _padded_tokens(count: int) -> int:
    """Round up: few sizes, and less than an eighth of padding above 64 tokens."""
    if count <= 64:
        return max(8, power_of_two(count))
    step = power_of_two(count) // 16
    return -(-count // step) * step


def power_of_two(count: int) -> int:
    """Return the smallest power of two from `count` on, 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
