"""Batches of uncached tokens for `llama_decode`.

Tokens that several sequences lack are in the batch once and belong to all of them, if their
cache is unified. The arrays of the batch are filled by numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm_llamacpp.sequences import Claim

__all__ = ["Part", "TokenBatch", "build_batch", "common_length", "row_batch"]

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Member:
    """A request of a group whose tokens are laid out together."""

    index: int
    number: int
    start: int
    wanted: int
    ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


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
    outputs: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Arrays of `llama_batch`, and the entries of each request's logits.

    Attributes:
        tokens: Ids.
        positions: Their positions.
        counts: Number of sequences of each token.
        addresses: Memory addresses of these sequences' numbers.
        outputs: Whether the token's logits are requested.
        entries: For each request the entries of its wanted positions, in order.
        numbers: The arrays that `addresses` point into.
    """

    tokens: _Ints
    positions: _Ints
    counts: _Ints
    addresses: NDArray[np.uintp]
    outputs: NDArray[np.int8]
    entries: Sequence[NDArray[np.int64]]
    numbers: Sequence[_Ints]

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


def build_batch(
    claims: Sequence[Claim], first_wanted: Sequence[int], *, shared: bool
) -> TokenBatch:
    """Lay out the tokens that the claimed sequences lack.

    Args:
        claims: Claimed sequences, at least one.
        first_wanted: First requested position of each; all later ones are requested too.
        shared: Whether a token may belong to several sequences.
    """
    single = all(len(claim.tokens) - claim.start == 1 for claim in claims)
    # A divided cache computes sequences at once whose numbers follow each other.
    order: Sequence[int] = range(len(claims))
    if not shared:
        order = sorted(order, key=lambda index: claims[index].number)
    if not single:
        return _runs(claims, first_wanted, order, shared=shared)
    return row_batch(
        np.array([claim.number for claim in claims]),
        np.array([claim.start for claim in claims]),
        np.array([claim.tokens.ids_from(claim.start) for claim in claims]),
        np.asarray(order),
    )


def row_batch(
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64],
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
) -> TokenBatch:
    """Lay out the tokens that continue sequences; the logits after the last are wanted.

    Args:
        numbers: The sequence of each row, each once, shape `(n,)`.
        starts: Number of tokens that the sequence holds, shape `(n,)`.
        tokens: Further tokens, shape `(n, k)`, -1 for no token.
        order: The order of the rows in the batch.
    """
    tokens, starts = tokens[order], starts[order]
    is_token = tokens >= 0
    counts = is_token.sum(axis=1)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    sequences = np.repeat(numbers[order], counts).astype(np.int32)
    outputs = np.zeros(ends[-1], np.int8)
    outputs[ends - 1] = 1
    entries = np.empty((len(order), 1), np.int64)
    entries[order, 0] = ends - 1
    return TokenBatch(
        tokens=tokens[is_token].astype(np.int32),
        positions=positions.astype(np.int32),
        counts=np.ones(ends[-1], np.int32),
        addresses=(sequences.ctypes.data + 4 * np.arange(ends[-1])).astype(np.uintp),
        outputs=outputs,
        entries=list(entries),
        numbers=[sequences],
    )


def _runs(
    claims: Sequence[Claim], first_wanted: Sequence[int], order: Sequence[int], *, shared: bool
) -> TokenBatch:
    """Lay out runs of tokens, those that several sequences lack once."""
    groups: dict[tuple[int, int], list[_Member]] = {}
    for index in order:
        claim, wanted = claims[index], first_wanted[index]
        ids = claim.tokens.ids_from(claim.start)
        member = _Member(index, claim.number, claim.start, wanted, ids)
        # Sequences that share tokens must have held equal ones before.
        key = (claim.source, claim.start) if shared else (claim.number, claim.start)
        groups.setdefault(key, []).append(member)
    layout = _Layout(len(claims))
    for members in groups.values():
        layout.add_group(sorted(members, key=lambda member: member.ids))
    return layout.batch()


class _Layout:
    """Collects runs of consecutive tokens."""

    def __init__(self, requests: int) -> None:
        self._tokens: list[int] = []
        self._positions: list[_Ints] = []
        self._counts: list[_Ints] = []
        self._addresses: list[NDArray[np.uintp]] = []
        self._outputs: list[NDArray[np.int8]] = []
        self._numbers: list[_Ints] = []
        self._entries: list[list[NDArray[np.int64]]] = [[] for _ in range(requests)]

    def add_group(self, members: list[_Member]) -> None:
        """Add the missing tokens of requests with equal cached tokens, in sorted order."""
        waiting = [(members, 0)]
        while waiting:
            group, depth = waiting.pop()
            # All sorted requests share the common prefix of the first and the last.
            common = common_length(group[0].ids, group[-1].ids, depth)
            if common > depth:
                self._add_run(group, depth, common)
            longer = [member for member in group if len(member.ids) > common]
            parts: dict[int, list[_Member]] = {}
            for member in longer:
                parts.setdefault(member.ids[common], []).append(member)
            waiting.extend((part, common) for part in parts.values())

    def _add_run(self, group: list[_Member], begin: int, end: int) -> None:
        first, count = len(self._tokens), end - begin
        start = group[0].start + begin
        positions = np.arange(start, start + count, dtype=np.int32)
        numbers = np.array([member.number for member in group], np.int32)
        outputs = np.zeros(count, np.int8)
        for member in group:
            skipped = max(0, member.wanted - start)
            if skipped < count:
                outputs[skipped:] = 1
                self._entries[member.index].append(np.arange(first + skipped, first + count))
        self._tokens += group[0].ids[begin:end]
        self._positions.append(positions)
        self._counts.append(np.full(count, len(group), np.int32))
        self._addresses.append(np.full(count, numbers.ctypes.data, np.uintp))
        self._outputs.append(outputs)
        self._numbers.append(numbers)

    def batch(self) -> TokenBatch:
        return TokenBatch(
            tokens=np.array(self._tokens, np.int32),
            positions=np.concatenate(self._positions),
            counts=np.concatenate(self._counts),
            addresses=np.concatenate(self._addresses),
            outputs=np.concatenate(self._outputs),
            entries=[np.concatenate(parts) for parts in self._entries],
            numbers=self._numbers,
        )


def common_length(one: tuple[int, ...], other: tuple[int, ...], begin: int = 0) -> int:
    """Return the length of two sequences' common prefix, at least `begin`."""
    longest = min(len(one), len(other))
    if one[begin:longest] == other[begin:longest]:
        return longest
    return next(i for i in range(begin, longest) if one[i] != other[i])
