"""The interface between a prefix tree and a model: batches, results and forward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from genlm.prefix.continuation import TableBatch
from genlm.prefix.node import Node, Slots
from genlm.prefix.tree import PrefixTree

if TYPE_CHECKING:
    import torch

__all__ = [
    "ForwardCounts",
    "ForwardFn",
    "ForwardResult",
    "Receive",
    "ScoringForward",
    "TableForward",
    "TokenRun",
    "TreeBatch",
]

_Flags = NDArray[np.bool_]

Receive = Callable[[Slots, "torch.Tensor"], None]
"""Function of slots and of the logits after their tokens, shape `(slots, width)`."""


class TreeBatch:
    """Sequences in the current batch of a tree.

    Args:
        tree: Tree that contains the sequences; its uncached tokens are computed.
        adapter: Adapter of the sequences.
        sequences: Sequences whose logits are requested.
        nodes: Nodes that `insert` returned for the sequences.
        first_positions: First position of each sequence whose logits are requested; those of
            all later positions are requested, too. Empty for the last positions only.

    Attributes:
        tree, adapter, first_positions: As above.
        ends: The last token of each sequence.
    """

    __slots__ = ("adapter", "ends", "first_positions", "tree")

    def __init__(
        self,
        tree: PrefixTree,
        adapter: str | None,
        sequences: Sequence[Sized],
        nodes: Sequence[Node],
        first_positions: Sequence[int] = (),
    ) -> None:
        self.tree, self.adapter = tree, adapter
        self.first_positions = first_positions
        lengths = map(len, sequences)
        self.ends = [
            TokenRun(node.at(length - 1), length - 1, length)
            for node, length in zip(nodes, lengths, strict=True)
        ]

    @property
    def last_slots(self) -> list[int]:
        """The slot of the last token of each sequence."""
        return [int(node.slots[first - node.start]) for node, first, _ in self.ends]

    def wanted_slots(self) -> Sequence[int]:
        """Return the slots of the tokens whose logits are requested, without repetition."""
        if not self.first_positions:
            return self.last_slots
        parts = [node.slots[mask] for node, mask in self._wanted().items()]
        wanted: list[int] = np.concatenate(parts).tolist()
        return wanted

    def cached_runs(self) -> list[TokenRun]:
        """Return the cached tokens whose logits are requested."""
        if self.first_positions:
            return [
                TokenRun(node, node.start + first, node.start + end)
                for node, mask in self._wanted().items()
                for first, end in _runs(mask[: node.computed])
            ]
        cached = [end for end in self.ends if end.first < end.node.start + end.node.computed]
        return list(dict.fromkeys(cached))

    def _wanted(self) -> dict[Node, _Flags]:
        """Return the tokens of each node whose logits are requested."""
        found: dict[Node, _Flags] = {}
        for last, first in zip(self.ends, self.first_positions, strict=True):
            node: Node | None = last.node
            end = last.end
            while node is not None and node.parent is not None and node.end > first:
                if node not in found:
                    found[node] = np.zeros(len(node.tokens), bool)
                found[node][max(0, first - node.start) : end - node.start] = True
                end = min(end, node.start)
                node = node.parent
        return found


class TokenRun(NamedTuple):
    """Consecutive tokens of a node.

    Attributes:
        node: The node that contains the tokens.
        first: Position of the first token in its sequences.
        end: Position after the last token.
    """

    node: Node
    first: int
    end: int

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids."""
        start = self.node.start
        return self.node.tokens[self.first - start : self.end - start]

    @property
    def own_slots(self) -> Slots:
        """Slots of the tokens."""
        start = self.node.start
        return self.node.slots[self.first - start : self.end - start]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits and counts of the forward passes over a batch.

    Attributes:
        logits: Shape `(sequences, width of the model's output)`, in the model's dtype.
        tokens: Number of tokens that passed through the model, without padding.
        forwards: Number of forward passes.
    """

    logits: torch.Tensor
    tokens: int
    forwards: int


class ForwardFn(Protocol):
    """Runs a model over the uncached tokens of a tree."""

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Store keys and values of all uncached tokens; return the logits of the sequences."""
        ...


class ForwardCounts(NamedTuple):
    """Counts of the forward passes over a batch.

    Attributes:
        tokens: Number of tokens that passed through the model, without padding.
        forwards: Number of forward passes.
    """

    tokens: int
    forwards: int


@runtime_checkable
class ScoringForward(ForwardFn, Protocol):
    """A `ForwardFn` that also computes the logits of many positions, in pieces."""

    def scores_in_pieces(self) -> bool:
        """Whether `score` never holds the logits of a whole pass in memory."""
        ...

    def score(self, batch: TreeBatch, receive: Receive) -> ForwardCounts:
        """Store keys and values of all uncached tokens; pass on the requested logits.

        Args:
            batch: Batch whose `wanted_slots` are the slots of the requested logits.
            receive: Function that is called with parts of these slots and their logits, once
                per slot. It reads the logits before it returns.
        """
        ...


@runtime_checkable
class TableForward(ForwardFn, Protocol):
    """A `ForwardFn` that also runs a model over tokens that continue rows of a block table."""

    def run_table(self, batch: TableBatch, adapter: str | None) -> ForwardResult:
        """Store keys and values of the tokens; return the logits of `batch.results`."""
        ...


def _runs(flags: _Flags) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of true entries."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
