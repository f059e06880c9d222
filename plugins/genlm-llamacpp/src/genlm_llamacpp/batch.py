"""Sequences to extend by uncached tokens, their batch for `llama_decode`, and its logits.

Tokens that several sequences lack are in the batch once and belong to all of them, if their
cache is shared. All arrays are filled by numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "Extensions",
    "Integers",
    "Logits",
    "Part",
    "TokenBatch",
    "build_batch",
    "common_length",
    "ranges",
]

Integers = NDArray[np.int64]

_Ints = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Extensions:
    """Token sequences to compute, each after tokens that a sequence of llama.cpp holds.

    Attributes:
        sources: The sequence that holds the first tokens of each, -1 for none, shape `(n,)`.
        starts: Number of these tokens, shape `(n,)`.
        common: Number of tokens that the source has in common with each, shape `(n,)`; those
            after `starts` are computed again.
        token_ids: The tokens after the first ones, one sequence after the other.
        counts: Number of these tokens of each, at least one, shape `(n,)`.
        firsts: First position of each whose logits are requested, shape `(n,)`; those of all
            later ones are requested too.
        numbers: The sequence that will hold each; `Sequences.claim` sets it.
        is_new: Whether this sequence was empty before; `Sequences.claim` sets it.
    """

    sources: Integers
    starts: Integers
    common: Integers
    token_ids: Integers
    counts: Integers
    firsts: Integers
    numbers: Integers = field(init=False)
    is_new: NDArray[np.bool_] = field(init=False)

    @property
    def lengths(self) -> Integers:
        """Number of all tokens of each, shape `(n,)`."""
        return self.starts + self.counts

    @property
    def positions(self) -> Integers:
        """The position of each of `token_ids` in its sequence."""
        return ranges(self.starts, self.counts)


@dataclass(frozen=True, slots=True)
class Part:
    """Entries of a batch that are decoded at once.

    Attributes:
        first: The first entry.
        end: The entry after the last.
        outputs: The entries whose logits are wanted, in order.
    """

    first: int
    end: int
    outputs: Integers


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Arrays of `llama_batch`, and the entries of the requested logits.

    Attributes:
        tokens: Ids.
        positions: Their positions.
        counts: Number of sequences of each token.
        addresses: Memory addresses of these sequences' numbers.
        outputs: Whether the token's logits are requested.
        results: The entry of each requested position, one sequence after the other.
        numbers: The array that `addresses` point into.
    """

    tokens: _Ints
    positions: _Ints
    counts: _Ints
    addresses: NDArray[np.uintp]
    outputs: NDArray[np.int8]
    results: Integers
    numbers: _Ints

    def parts(self, most_tokens: int, most_outputs: int) -> Iterator[Part]:
        """Yield parts with limited numbers of tokens and outputs."""
        total = len(self.tokens)
        where = np.flatnonzero(self.outputs)
        first = 0
        while first < total:
            end = min(total, first + most_tokens)
            begin = int(np.searchsorted(where, first))
            if begin + most_outputs < len(where):
                end = min(end, int(where[begin + most_outputs]))
            yield Part(first, end, where[begin : np.searchsorted(where, end)])
            first = end


def build_batch(rows: Extensions, *, shared: bool) -> TokenBatch:
    """Lay out the tokens that claimed sequences lack.

    Args:
        rows: Claimed sequences, at least one.
        shared: Whether a token may belong to several sequences.
    """
    entries, places = _entries(rows, shared=shared), rows.positions
    owners = np.repeat(rows.numbers, rows.counts)[np.argsort(entries, kind="stable")]
    numbers = owners.astype(np.int32)
    counts = np.bincount(entries).astype(np.int32)
    tokens, positions = np.empty((2, len(counts)), np.int32)
    tokens[entries], positions[entries] = rows.token_ids, places
    results = entries[places >= np.repeat(rows.firsts, rows.counts)]
    outputs = np.zeros(len(counts), np.int8)
    outputs[results] = 1
    addresses = (numbers.ctypes.data + 4 * (np.cumsum(counts) - counts)).astype(np.uintp)
    return TokenBatch(tokens, positions, counts, addresses, outputs, results, numbers)


def _entries(rows: Extensions, *, shared: bool) -> Integers:
    """Return the entry of each token; those with equal entries are computed once."""
    counts = rows.counts
    common = np.zeros(len(counts), np.int64)
    if not shared:  # llama.cpp computes sequences at once whose numbers follow each other
        order = np.argsort(rows.numbers).tolist()
    elif counts.max() == 1:
        order = list(range(len(counts)))
    else:
        # Sequences that share tokens must have held equal ones before.
        parts = np.split(rows.token_ids, np.cumsum(counts)[:-1])
        columns = (rows.sources.tolist(), rows.starts.tolist(), map(np.ndarray.tolist, parts))
        keys = list(zip(*columns, strict=True))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        for before, row in itertools.pairwise(order):
            if keys[before][:2] == keys[row][:2]:
                common[row] = common_length(keys[before][2], keys[row][2])
    new = counts - common
    begins = np.empty_like(counts)
    begins[order] = np.cumsum(new[order]) - new[order]
    entries = ranges(begins - common, counts)
    offsets = np.cumsum(counts) - counts
    for before, row in itertools.pairwise(order) if common.any() else ():
        own, source = offsets[row], offsets[before]
        entries[own : own + common[row]] = entries[source : source + common[row]]
    return entries


def ranges(begins: Integers, counts: Integers) -> Integers:
    """Return consecutive numbers from each of `begins` on, one range after the other."""
    ends = np.cumsum(counts)
    found: Integers = np.arange(ends[-1]) + np.repeat(begins - ends + counts, counts)
    return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists or two tuples."""
    longest = min(len(one), len(other))
    if one[:longest] == other[:longest]:
        return longest
    return next(i for i in range(longest) if one[i] != other[i])


class Logits:
    """The logits of several sequences, which come in parts.

    It takes them as `PieceScores` of the core takes those of texts.

    Args:
        count: Number of sequences.
        width: Width of a row of logits.

    Attributes:
        values: The logits, shape `(count, width)`.
    """

    def __init__(self, count: int, width: int) -> None:
        self.values = np.empty((count, width), np.float32)

    def expect(self, keys: Integers, members: Integers) -> None:
        """Set the sequence, a number below `count`, to which each entry of a batch belongs."""
        self._member_of = np.full(keys.max() + 1, -1)
        self._member_of[keys] = members

    def add(self, keys: Integers, logits: torch.Tensor) -> None:
        """Copy the logits of some entries."""
        self.values[self._member_of[keys]] = logits.numpy()
