"""The work items of a pass of query tokens, as numbers for the kernels.

A work item is a tile of consecutive query tokens and a range of slots that all of them attend
to: a part of a shared prefix, or a part of one token's suffix. A program of `kernels.attend`
computes a partial result for every token of its work item, and `kernels.combine` joins the
partial results. Numbers are padded to a `StepSize`, because a CUDA graph has launches of one
size.

Graphs have a size for each padded number of tokens, whatever the lengths and prefixes of the
sequences are, so that a population that grows is not captured again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from genlm.plugin import ranges
from genlm.prefix import SCRATCH_SLOT
from genlm_hf.packed.plan import Integers, PackedPlan

Part = TypeVar("Part")

FIELDS = 5
"""Numbers of a work item: first query token, tokens, first slot, slots, first position."""

# The number of keys of a work item is a multiple of this, which a program reads at once.
_KEYS = 64

# Number of programs per key head that occupies a GPU; more items only add joining.
_TARGET_ITEMS = 64

# Smallest number of query tokens that a pass is padded to.
_MIN_TOKENS = 8

# Sections begin at multiples of 128 bytes. Triton would compile the kernels again for pointers
# that are not multiples of 16 bytes.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a pass, padding included.

    Attributes:
        tokens: Number of query tokens.
        prefix_items: Number of work items of shared prefixes.
        suffix_items: Number of work items of suffixes.
        tile: Maximum number of query tokens of a work item of a shared prefix.
    """

    tokens: int
    prefix_items: int
    suffix_items: int
    tile: int


@dataclass(frozen=True, slots=True)
class WorkItems:
    """The work items of a pass.

    Attributes:
        prefix_items: Items of shared prefixes, shape (items, `FIELDS`).
        suffix_items: Items of suffixes, of one query token each, shape (items, `FIELDS`).
        slots: Slots of all prefixes and suffixes.
    """

    prefix_items: Integers
    suffix_items: Integers
    slots: Integers

    def fit(self, size: StepSize) -> bool:
        """Whether a pass of this size has room for the items."""
        return (
            len(self.prefix_items) <= size.prefix_items
            and len(self.suffix_items) <= size.suffix_items
        )


def graph_size(tokens: int, tile: int) -> StepSize:
    """Return the size that a pass of that many query tokens is padded to.

    It has room for the suffixes of all tokens, and for the shared prefixes of tokens that are
    in few groups. `_split_items` makes `_TARGET_ITEMS` items, or one for each tile.
    """
    padded = _padded_tokens(tokens)
    tiles = -(-padded // tile)
    return StepSize(padded, max(_TARGET_ITEMS, 2 * tiles), max(_TARGET_ITEMS, padded), tile)


class Sections(NamedTuple, Generic[Part]):
    """Ranges of a pass's numbers in one array, or tensors of these ranges."""

    tokens: Part
    positions: Part
    writes: Part
    results: Part
    offsets: Part
    rows: Part
    prefix_items: Part
    suffix_items: Part
    slots: Part


def work_items(plan: PackedPlan, tile: int) -> WorkItems:
    """Divide the attention of a pass without prefill chunks.

    Args:
        plan: The pass.
        tile: Maximum number of query tokens of an item of a shared prefix.
    """
    counts, longest = np.array([group.suffixes.shape for group in plan.groups]).T
    prefixes = np.array([len(group.prefix) for group in plan.groups])
    sizes = prefixes + counts * longest
    begins, first = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    tiles = np.where(prefixes > 0, -(-counts // tile), 0)
    owner, done = np.repeat(np.arange(len(tiles)), tiles), tile * ranges(0, tiles)
    prefix_items = _stack_fields(
        first[owner] + done,
        np.minimum(tile, counts[owner] - done),
        begins[owner],
        prefixes[owner],
        0,
    )
    owner = np.repeat(np.arange(len(counts)), counts)
    prefix = prefixes[owner]
    suffix_items = _stack_fields(
        np.arange(len(owner)),
        1,
        begins[owner] + prefix + longest[owner] * ranges(0, counts),
        plan.positions[: len(owner)] + 1 - prefix,
        prefix,
    )
    parts = [part for g in plan.groups for part in (g.prefix, g.suffixes.reshape(-1))]
    return WorkItems(
        _split_items(prefix_items), _split_items(suffix_items), np.concatenate(parts)
    )


def sections(size: StepSize) -> Sections[slice]:
    """Return the ranges of the numbers of a pass of this size."""
    lengths = (
        *[size.tokens] * 4,
        size.tokens + 1,
        size.prefix_items * size.tile + size.suffix_items,
        size.prefix_items * FIELDS,
        size.suffix_items * FIELDS,
    )
    aligned = (-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)
    *begins, end = itertools.accumulate(aligned, initial=0)
    parts = [slice(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
    return Sections(*[*parts, slice(end, None)])


def flattened(plan: PackedPlan, items: WorkItems, size: StepSize) -> Integers:
    """Return the numbers of a pass, padded; `sections` returns their ranges.

    Padding query tokens write to the scratch slot and belong to no work item; padding work
    items have neither query tokens nor slots. Slots, the last section, are not padded.
    """
    parts = sections(size)
    numbers = np.zeros(parts.slots.start + len(items.slots), np.int64)
    numbers[parts.writes] = SCRATCH_SLOT
    offsets, rows = _partial_results(items, size)
    numbers[parts.offsets] = offsets
    for section, values in (
        (parts.tokens, plan.tokens),
        (parts.positions, plan.positions),
        (parts.writes, plan.writes),
        (parts.results, plan.results),
        (parts.rows, rows),
        (parts.prefix_items, items.prefix_items.reshape(-1)),
        (parts.suffix_items, items.suffix_items.reshape(-1)),
        (parts.slots, items.slots),
    ):
        numbers[section.start : section.start + len(values)] = values
    return numbers


def _partial_results(items: WorkItems, size: StepSize) -> tuple[Integers, Integers]:
    """Return the rows of partial results of every query token.

    Returns:
        The index of each query token's first row, then the number of rows; and the rows,
        token by token.
    """
    counts = items.prefix_items[:, 1]
    within = ranges(0, counts)
    tokens = np.concatenate(
        [np.repeat(items.prefix_items[:, 0], counts) + within, items.suffix_items[:, 0]]
    )
    rows = np.concatenate(
        [
            np.repeat(np.arange(len(counts)) * size.tile, counts) + within,
            size.prefix_items * size.tile + np.arange(len(items.suffix_items)),
        ]
    )
    ends = np.cumsum(np.bincount(tokens, minlength=size.tokens))
    return np.concatenate([[0], ends]), rows[np.argsort(tokens, kind="stable")]


def _stack_fields(first: Integers, *fields: Integers | int) -> Integers:
    """Return work items from their fields; an integer is the same for all items."""
    items = np.empty((len(first), FIELDS), np.int64)
    for number, field in enumerate((first, *fields)):
        items[:, number] = field
    return items


def _split_items(items: Integers) -> Integers:
    """Split items of many slots, so that there are enough items to occupy a GPU."""
    if not 1 <= len(items) <= _TARGET_ITEMS // 2:
        return items
    cuts = _TARGET_ITEMS // len(items)
    lengths = items[:, 3]
    max_length = -(-int(lengths.max()) // (cuts * _KEYS)) * _KEYS
    pieces = -(-lengths // max_length)
    skipped = ranges(0, pieces) * max_length
    split = np.repeat(items, pieces, axis=0)
    split[:, 2] += skipped
    split[:, 3] = np.minimum(split[:, 3] - skipped, max_length)
    split[:, 4] += skipped
    return split


def _padded_tokens(count: int) -> int:
    """Round up to one of few sizes, with less than an eighth of padding above 64 tokens."""
    if count <= 64:
        return max(_MIN_TOKENS, power_of_two(count))
    step = power_of_two(count) // 16
    return -(-count // step) * step


def power_of_two(count: int) -> int:
    """Return the smallest power of two from `count` on, 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
