"""The interface between a prefix tree and a model: batches, results and forward functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
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
    "ForwardFn",
    "ForwardResult",
    "TableForward",
    "TokenRun",
    "TreeBatch",
]

_Flags = NDArray[np.bool_]


class TreeBatch:
    """Sequences in the current batch of a tree.

    Args:
        tree: Tree that contains the sequences; its uncached tokens are computed.
        adapter: Adapter of the sequences.
        sequences: Sequences whose logits are requested.
        nodes: Nodes that `insert` returned for the sequences.
        first_positions: The position in each sequence from which on logits are requested; empty
            for the last positions only.

    Attributes:
        tree, adapter: As above.
        ends: The last token of each sequence.
        wanted: Slots of the tokens whose logits are requested: of the last token of each
            sequence, or, with `first_positions`, of all requested tokens without repetition.
    """

    __slots__ = ("_flags", "adapter", "ends", "tree", "wanted")

    def __init__(
        self,
        tree: PrefixTree,
        adapter: str | None,
        sequences: Sequence[Sized],
        nodes: Sequence[Node],
        first_positions: Sequence[int] = (),
    ) -> None:
        self.tree, self.adapter = tree, adapter
        lengths = map(len, sequences)
        self.ends = [
            TokenRun(node.at(length - 1), length - 1, length)
            for node, length in zip(nodes, lengths, strict=True)
        ]
        self._flags: dict[Node, _Flags] = {}
        if first_positions:
            self._request(first_positions)
            self.wanted = np.concatenate([n.slots[mask] for n, mask in self._flags.items()])
        else:
            slots = [node.slots[first - node.start] for node, first, _ in self.ends]
            self.wanted = np.array(slots, np.int64)

    def cached_runs(self) -> list[TokenRun]:
        """Return the cached tokens whose logits are requested."""
        if self._flags:
            return [
                TokenRun(node, node.start + first, node.start + end)
                for node, mask in self._flags.items()
                for first, end in _runs(mask[: node.computed])
            ]
        cached = [end for end in self.ends if end.first < end.node.start + end.node.computed]
        return list(dict.fromkeys(cached))

    def _request(self, first_positions: Sequence[int]) -> None:
        """Mark the tokens of each node whose logits are requested."""
        for last, first in zip(self.ends, first_positions, strict=True):
            node: Node | None = last.node
            end = last.end
            while node is not None and node.parent is not None and node.end > first:
                if node not in self._flags:
                    self._flags[node] = np.zeros(len(node.tokens), bool)
                self._flags[node][max(0, first - node.start) : end - node.start] = True
                end = min(end, node.start)
                node = node.parent


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
        logits: Shape `(requested, width of the model's output)`, in the model's dtype.
        tokens: Number of tokens that passed through the model, without padding.
        forwards: Number of forward passes.
    """

    logits: torch.Tensor
    tokens: int
    forwards: int


class ForwardFn(Protocol):
    """Runs a model over the uncached tokens of a tree."""

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Store keys and values of all uncached tokens; return logits after `batch.wanted`."""
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
