"""Uncached tokens of sequences, their batch for `llama_decode`, and its logits.

In a shared cache, an uncached token that several sequences have in common is in the batch once
and belongs to all of them. numpy fills all arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.plugin import ranges

Integers = NDArray[np.int64]

_Ints = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Extensions:
    """Rows of tokens to compute, each after a prefix that a sequence of llama.cpp holds.

    All arrays except `token_ids` have shape `(n,)`.

    Attributes:
        sources: Sequence that holds the prefix of each row, -1 for an empty prefix.
        starts: Length of the prefix.
        common: Length of the common prefix of row and source; tokens between `starts` and
            `common` are computed again.
        token_ids: Tokens after the prefixes, one row after the other.
        counts: Number of tokens after each prefix, at least one.
        firsts: First position whose logits are requested; the logits of all later positions
            are requested too.
        seq_ids: Sequence that will hold the row; `Sequences.claim` sets it.
        is_new: Whether this sequence was empty before; `Sequences.claim` sets it.
    """

    sources: Integers
    starts: Integers
    common: Integers
    token_ids: Integers
    counts: Integers
    firsts: Integers
    seq_ids: Integers = field(init=False)
    is_new: NDArray[np.bool_] = field(init=False)

    @property
    def lengths(self) -> Integers:
        """Total number of tokens of each row, shape `(n,)`."""
        return self.starts + self.counts

    @property
    def positions(self) -> Integers:
        """Position of each entry of `token_ids` in its row."""
        return ranges(self.starts, self.counts)


@dataclass(frozen=True, slots=True)
class Part:
    """Range of entries of a batch for one call of `llama_decode`.

    Attributes:
        first: First entry.
        end: Index after the last entry.
        outputs: Entries whose logits are requested, in order.
    """

    first: int
    end: int
    outputs: Integers


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Arrays of `llama_batch`, and the entries of the requested logits.

    Attributes:
        tokens: Token ids.
        positions: Position of each token.
        counts: Number of sequences to which each token belongs.
        addresses: Memory address of the ids of these sequences.
        outputs: Whether the token's logits are requested.
        results: Entry of each requested position, one sequence after the other.
        seq_ids: Array that `addresses` point into.
    """

    tokens: _Ints
    positions: _Ints
    counts: _Ints
    addresses: NDArray[np.uintp]
    outputs: NDArray[np.int8]
    results: Integers
    seq_ids: _Ints

    def parts(
        self, max_tokens: int, max_outputs: int, *, separately: bool = False
    ) -> Iterator[Part]:
        """Yield parts of at most `max_tokens` tokens and `max_outputs` outputs.

        Args:
            max_tokens: As above.
            max_outputs: As above.
            separately: Whether a part has tokens of only one sequence; tokens of several
                sequences must not be shared.
        """
        total = len(self.tokens)
        outputs = np.flatnonzero(self.outputs)
        first = 0
        while first < total:
            end = min(total, first + max_tokens)
            begin = int(np.searchsorted(outputs, first))
            if begin + max_outputs < len(outputs):
                end = min(end, int(outputs[begin + max_outputs]))
            if separately:
                end = first + int((self.seq_ids[first:end] == self.seq_ids[first]).sum())
            yield Part(first, end, outputs[begin : np.searchsorted(outputs, end)])
            first = end


def build_batch(rows: Extensions, *, shared: bool) -> TokenBatch:
    """Build the batch of claimed rows; if `shared`, a token may belong to several sequences."""
    entries, row_positions = _entries(rows, shared=shared), rows.positions
    owners = np.repeat(rows.seq_ids, rows.counts)[np.argsort(entries, kind="stable")]
    seq_ids = owners.astype(np.int32)
    counts = np.bincount(entries).astype(np.int32)
    tokens, positions = np.empty((2, len(counts)), np.int32)
    tokens[entries], positions[entries] = rows.token_ids, row_positions
    results = entries[row_positions >= np.repeat(rows.firsts, rows.counts)]
    outputs = np.zeros(len(counts), np.int8)
    outputs[results] = 1
    addresses = (seq_ids.ctypes.data + 4 * (np.cumsum(counts) - counts)).astype(np.uintp)
    return TokenBatch(tokens, positions, counts, addresses, outputs, results, seq_ids)


def _entries(rows: Extensions, *, shared: bool) -> Integers:
    """Return the batch entry of each token; tokens with equal entries are computed once."""
    counts = rows.counts
    common = np.zeros(len(counts), np.int64)
    if not shared:  # llama.cpp computes sequences with consecutive ids at once
        order = np.argsort(rows.seq_ids).tolist()
    elif counts.max() == 1:
        order = list(range(len(counts)))
    else:
        # Only rows with the same prefix of the same source can share tokens.
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
        target, source = offsets[row], offsets[before]
        entries[target : target + common[row]] = entries[source : source + common[row]]
    return entries


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists or two tuples."""
    longest = min(len(one), len(other))
    if one[:longest] == other[:longest]:
        return longest
    return next(i for i in range(longest) if one[i] != other[i])


class Logits:
    """Buffer for the logits of several sequences, with the interface of `PieceScores`.

    Args:
        count: Number of sequences.
        width: Width of a row of logits.

    Attributes:
        values: The logits, shape `(count, width)`.
    """

    def __init__(self, count: int, width: int) -> None:
        self.values = np.empty((count, width), np.float32)

    def expect(self, keys: Integers, members: Integers) -> None:
        """Set the row of `values`, below `count`, to which each entry of a batch belongs."""
        self._member_of = np.full(keys.max() + 1, -1)
        self._member_of[keys] = members

    def add(self, keys: Integers, logits: torch.Tensor) -> None:
        """Copy the logits of the entries `keys` into their rows."""
        self.values[self._member_of[keys]] = logits.numpy()
