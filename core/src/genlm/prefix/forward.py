"""The interface between a prefix tree and a model: batches, results and forward functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from genlm.core.base.arrays import ranges
from genlm.core.queries.generations import Integers64
from genlm.prefix.node import SCRATCH_SLOT, Node, Paths, Slots
from genlm.prefix.tree import PrefixTree

if TYPE_CHECKING:
    import torch

_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one sequence, computed together.

    Attributes:
        tokens: At least one token id.
        slots: Slots of the past and of these tokens.
        writes: Slots to which the keys and values of these tokens are written: their own slots,
            or the scratch slot if the tokens are cached.
    """

    tokens: Sequence[int]
    slots: Slots
    writes: Slots

    @property
    def past(self) -> int:
        """Number of tokens before these."""
        return len(self.slots) - len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """Tokens of a tree to compute: the uncached ones, and cached ones for their logits.

    Attributes:
        adapter: Adapter of the sequences.
        stages: Prefill stages; the segments of a stage depend on those of earlier stages only.
            The first stage includes the cached tokens whose logits are requested.
        wanted: Slots of the tokens whose logits are requested.
    """

    adapter: str | None
    stages: Sequence[Sequence[Segment]]
    wanted: Slots

    @classmethod
    def of(
        cls,
        tree: PrefixTree,
        adapter: str | None,
        sequences: Sequence[Sized],
        nodes: Sequence[Node],
        first_positions: Sequence[int] = (),
    ) -> Self:
        """Return the current batch of a tree.

        Args:
            tree: Tree that contains the sequences; its uncached tokens are computed.
            adapter: Adapter of the sequences.
            sequences: Sequences whose logits are requested.
            nodes: Nodes that `insert` returned for the sequences.
            first_positions: The position in each sequence from which on logits are requested;
                empty for the last positions only.

        Returns:
            A batch whose `wanted` has the last token of each sequence, or, with
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
        paths = Paths()
        stages = _uncached_stages(tree, paths)
        for node, first, end in cached:
            tokens = node.tokens[first - node.start : end - node.start]
            scratch = np.full(end - first, SCRATCH_SLOT, np.int64)
            stages[0].append(Segment(tokens, paths.slots(node, end), scratch))
        return cls(adapter, stages, wanted)


@dataclass(frozen=True, slots=True, eq=False)
class TableBatch:
    """Tokens to compute that continue rows of a block table.

    A token attends to the trunk and to the slots of its row up to its position; the last of
    them is the slot of the token.

    Attributes:
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

    tokens: Integers64
    positions: Integers64
    writes: Slots
    trunk: Slots
    slots: NDArray[np.int32]
    rows: Integers64
    results: Integers64

    @classmethod
    def of_segments(cls, segments: Sequence[Segment]) -> Self:
        """Return the tokens of segments, without a trunk; the last ones are the results."""
        counts = np.array([len(segment.tokens) for segment in segments])
        rows = np.repeat(np.arange(len(segments)), counts)
        pasts = np.array([segment.past for segment in segments])
        return cls(
            tokens=np.array([token for s in segments for token in s.tokens], np.int64),
            positions=ranges(pasts, counts),
            writes=np.concatenate([segment.writes for segment in segments]),
            trunk=np.empty(0, np.int64),
            slots=padded_slots(segments),
            rows=rows,
            results=np.cumsum(counts) - 1,
        )

    @property
    def longest_run(self) -> int:
        """Largest number of tokens of a row."""
        several = len(self.tokens) > len(self.slots)
        return int(np.bincount(self.rows).max()) if several else 1

    def as_tree(self, adapter: str | None) -> TreeBatch:
        """Return the tokens as segments of consecutive tokens of a row.

        The trunk contains none of the tokens.
        """
        trunk, positions, rows = len(self.trunk), self.positions, self.rows
        order = np.lexsort([positions, rows])
        is_next = (np.diff(rows[order]) == 0) & (np.diff(positions[order]) == 1)
        runs = np.split(order, np.flatnonzero(~is_next) + 1)
        runs.sort(key=lambda tokens: int(positions[tokens[0]]))
        depths: dict[int, int] = {}  # of the segments, by the slots that they write
        stages: list[list[Segment]] = [[]]
        for tokens in runs:
            begin, branch = int(positions[tokens[0]]), self.slots[rows[tokens[0]]]
            slots = np.concatenate([self.trunk, branch[: begin + len(tokens) - trunk]])
            depth = depths.get(int(slots[begin - 1]), -1) + 1 if begin else 0
            if depth == len(stages):
                stages.append([])
            writes = self.writes[tokens]
            stages[depth].append(Segment(self.tokens[tokens].tolist(), slots, writes))
            depths.update(dict.fromkeys(writes.tolist(), depth))
        wanted = self.slots[rows[self.results], positions[self.results] - trunk]
        return TreeBatch(adapter, stages, wanted.astype(np.int64))


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
    """Runs a model over tokens of a tree, or over tokens that continue rows of a table."""

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Store keys and values of all uncached tokens; return logits after `batch.wanted`."""
        ...

    def run_table(self, batch: TableBatch, adapter: str | None) -> ForwardResult:
        """Store keys and values of the tokens; return the logits of `batch.results`."""
        ...


def padded_slots(segments: Sequence[Segment]) -> NDArray[np.int32]:
    """Return the slots of segments, shape `(segments, longest)`, padded with zeros."""
    longest = max(len(segment.slots) for segment in segments)
    slots = np.zeros((len(segments), longest), np.int32)
    for row, segment in enumerate(segments):
        slots[row, : len(segment.slots)] = segment.slots
    return slots


def _uncached_stages(tree: PrefixTree, paths: Paths) -> list[list[Segment]]:
    """Return the uncached tokens of a tree in prefill stages, at least one."""
    depths: dict[Node, int] = {}
    stages: list[list[Segment]] = [[]]
    for node in tree.uncached():  # ancestors before descendants
        parent_depth = depths.get(node.parent) if node.parent is not None else None
        depth = depths[node] = 0 if parent_depth is None else parent_depth + 1
        if depth == len(stages):
            stages.append([])
        slots, writes = paths.slots(node, node.end), node.slots[node.computed :]
        stages[depth].append(Segment(node.tokens[node.computed :], slots, writes))
    return stages


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
        while node is not None and node.parent is not None and node.end > first:
            if node not in flags:
                flags[node] = np.zeros(len(node.tokens), bool)
            flags[node][max(0, first - node.start) : end - node.start] = True
            node, end = node.parent, min(end, node.start)
    return flags


def _runs(flags: _Flags) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of true entries."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
