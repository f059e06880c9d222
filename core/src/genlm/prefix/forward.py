"""The interface between a prefix tree and a model: batches, results and forward functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from genlm.core.base.arrays import ranges
from genlm.core.queries.generations import Integers64
from genlm.prefix.node import SCRATCH_SLOT, Node, Paths, Slots
from genlm.prefix.tree import PrefixTree

if TYPE_CHECKING:
    import torch

_Flags = NDArray[np.bool_]


class Segments(NamedTuple):
    """Segments of a `TokenBatch`: consecutive tokens of one sequence, computed together.

    Attributes:
        firsts: Index in the batch of the first token of each segment, shape `(n,)`.
        counts: Number of tokens of each segment, shape `(n,)`.
    """

    firsts: Integers64
    counts: Integers64

    @property
    def tokens(self) -> Integers64:
        """Indices in the batch of all tokens, segment by segment."""
        return ranges(self.firsts, self.counts)

    def of(self, indices: Integers64 | NDArray[np.bool_] | slice) -> Segments:
        """Return some of the segments."""
        return Segments(self.firsts[indices], self.counts[indices])


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Tokens to compute, and the slots of the sequences that they continue.

    A token attends to the trunk and to the slots of its row up to its position; the last of
    them is the slot of the token. Its earlier tokens are computed, or precede it in the batch.
    The tokens of a row are in the order of their positions, one after another.

    Attributes:
        adapter: Adapter of the sequences.
        tokens: Token ids, shape `(q,)`.
        positions: Positions of the tokens in their sequences, shape `(q,)`.
        writes: Slot to which the keys and values of each token are written: that of the token,
            or the scratch slot if the token is recomputed for its logits, shape `(q,)`.
        trunk: Common first slots of all sequences.
        slots: The slots after the trunk, shape `(d, longest)`, int32; entries after the end of
            a row are undefined.
        rows: Row of each token, shape `(q,)`.
        results: Tokens whose logits are returned, possibly repeated, shape `(r,)`.
    """

    adapter: str | None
    tokens: Integers64
    positions: Integers64
    writes: Slots
    trunk: Slots
    slots: NDArray[np.int32]
    rows: Integers64
    results: Integers64

    @classmethod
    def of_paths(
        cls,
        adapter: str | None,
        paths: Sequence[Slots],
        tokens: Sequence[Sequence[int]],
        *,
        is_cached: Sequence[bool] = (),
        wanted: Slots | Sequence[int] = (),
    ) -> Self:
        """Return the last tokens of paths; each path is a row, without a trunk.

        Args:
            adapter: Adapter of the sequences.
            paths: Slots of sequences up to their last token.
            tokens: Token ids to compute of each sequence.
            is_cached: Whether the tokens of each path are recomputed for their logits; by
                default none are.
            wanted: Slots of the tokens whose logits are returned.
        """
        counts = np.array([len(part) for part in tokens])
        lengths = np.array([len(path) for path in paths])
        slots = np.zeros((len(paths), int(lengths.max())), np.int32)
        for row, path in enumerate(paths):
            slots[row, : len(path)] = path
        rows = np.repeat(np.arange(len(paths)), counts)
        positions = ranges(lengths - counts, counts)
        own = slots[rows, positions].astype(np.int64)
        by_slot = np.argsort(own)
        return cls(
            adapter,
            tokens=np.array([token for part in tokens for token in part], np.int64),
            positions=positions,
            writes=np.where(np.array(is_cached)[rows], SCRATCH_SLOT, own) if is_cached else own,
            trunk=np.empty(0, np.int64),
            slots=slots,
            rows=rows,
            results=by_slot[np.searchsorted(own, wanted, sorter=by_slot)],
        )

    @classmethod
    def of_tree(
        cls,
        tree: PrefixTree,
        adapter: str | None,
        sequences: Sequence[Sized],
        nodes: Sequence[Node],
        first_positions: Sequence[int] = (),
    ) -> Self:
        """Return the uncached tokens of a tree, and cached ones whose logits are requested.

        Args:
            tree: Tree that contains the sequences; its uncached tokens are computed.
            adapter: Adapter of the sequences.
            sequences: Sequences whose logits are requested.
            nodes: Nodes that `insert` returned for the sequences.
            first_positions: The position in each sequence from which on logits are requested;
                empty for the last positions only.

        Returns:
            A batch whose results are the last token of each sequence, or, with
            `first_positions`, all requested tokens without repetition.
        """
        ends = [
            (node.at(len(sequence) - 1), len(sequence))
            for node, sequence in zip(nodes, sequences, strict=True)
        ]
        cached: Iterable[tuple[Node, int, int]]
        if first_positions:
            flags = _requested(ends, first_positions)
            wanted = np.concatenate([node.slots[mask] for node, mask in flags.items()])
            cached = [
                (node, node.start + first, node.start + end)
                for node, mask in flags.items()
                for first, end in _runs(mask[: node.computed])
            ]
        else:
            wanted = np.array(
                [node.slots[end - 1 - node.start] for node, end in ends], np.int64
            )
            cached = dict.fromkeys(
                (node, end - 1, end) for node, end in ends if end <= node.start + node.computed
            )
        uncached = [(n, n.start + n.computed, n.end) for n in tree.uncached()]
        parts, paths = [*uncached, *cached], Paths()
        return cls.of_paths(
            adapter,
            [paths.slots(node, end) for node, _, end in parts],
            [node.tokens[first - node.start : end - node.start] for node, first, end in parts],
            is_cached=[index >= len(uncached) for index in range(len(parts))],
            wanted=wanted,
        )

    @property
    def segments(self) -> Segments:
        """All tokens, as the longest segments."""
        follows = (np.diff(self.rows) == 0) & (np.diff(self.positions) == 1)
        firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
        return Segments(firsts, np.diff(firsts, append=len(self.tokens)))

    def stages(self) -> list[Segments]:
        """Return the segments in prefill stages, which depend on earlier stages only."""
        segments, trunk = self.segments, len(self.trunk)
        begins, rows = self.positions[segments.firsts], self.rows[segments.firsts]
        # A segment depends on the segment that writes the slot before it, if there is one.
        before = np.where(begins > trunk, self.slots[rows, begins - trunk - 1], SCRATCH_SLOT)
        by_write = np.argsort(self.writes)
        writers = by_write[
            np.searchsorted(self.writes, before, sorter=by_write) % len(by_write)
        ]
        is_written = (self.writes[writers] == before) & (before != SCRATCH_SLOT)
        parents = np.searchsorted(segments.firsts, writers, side="right") - 1
        depths, order = np.zeros_like(begins), np.argsort(begins, kind="stable")
        for index in order[is_written[order]].tolist():
            depths[index] = depths[parents[index]] + 1
        return [segments.of(depths == depth) for depth in range(int(depths.max()) + 1)]

    def slots_of(self, segments: Segments) -> NDArray[np.int32]:
        """Return the slots after the trunk of each segment, up to the longest segment's end."""
        ends = self.positions[segments.firsts] + segments.counts
        return self.slots[self.rows[segments.firsts], : int(ends.max()) - len(self.trunk)]

    def path(self, row: int, end: int) -> Slots:
        """Return the slots of the first `end` tokens of a row."""
        branch = self.slots[row, : max(0, end - len(self.trunk))]
        return np.concatenate([self.trunk[:end], branch])

    @property
    def result_slots(self) -> Slots:
        """Slots of the results, which follow the trunk."""
        rows, positions = self.rows[self.results], self.positions[self.results]
        slots: Slots = self.slots[rows, positions - len(self.trunk)].astype(np.int64)
        return slots


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits and counts of the forward passes over a batch.

    Attributes:
        logits: Shape `(requested, width of the model's output)`, in the model's dtype.
        tokens: Number of tokens that passed through the model, without padding.
        forwards: Number of forward passes.
    """

    logits: torch.Tensor
    tokens: int
    forwards: int


class ForwardFn(Protocol):
    """Runs a model over the tokens of a batch."""

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        """Store the keys and values of the tokens; return the logits of `batch.results`."""
        ...


def _requested(
    ends: Sequence[tuple[Node, int]], first_positions: Sequence[int]
) -> dict[Node, _Flags]:
    """Return which tokens of each node have requested logits.

    Args:
        ends: The node of the last token of each sequence, and the length of the sequence.
        first_positions: The position in each sequence from which on logits are requested.
    """
    flags: dict[Node, _Flags] = {}
    for (last, length), first in zip(ends, first_positions, strict=True):
        node: Node | None = last
        end = length
        while node is not None and node.end > first:  # not in the root, which is empty
            if node not in flags:
                flags[node] = np.zeros(len(node.tokens), bool)
            flags[node][max(0, first - node.start) : end - node.start] = True
            end, node = node.start, node.parent
    return flags


def _runs(flags: _Flags) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of true entries."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
