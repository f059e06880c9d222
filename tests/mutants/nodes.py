"""Faults of token tries when only some nodes are requested."""

from __future__ import annotations

import numpy as np

from genlm import TokenCharacterTrie

from .mutant import trie_mutant


@trie_mutant(killed_by="some-nodes-are-exact")
class NestedNodesLost(TokenCharacterTrie):
    """Counts a token once, for the innermost of the nodes above it."""

    def reduce_some(self, ws, nodes, operation, *, returns):
        values = super().reduce_some(ws, nodes, operation, returns=returns)
        if operation == "sum":
            for outer, node in enumerate(nodes):
                inside = [i for i, n in enumerate(nodes) if self.parent(n) == node]
                values[..., outer] -= values[..., inside].sum(-1)
        return values


@trie_mutant(killed_by="some-nodes-are-exact")
class NodesInTheirOrder(TokenCharacterTrie):
    """Answers in the order of the nodes, not in that of the question."""

    def reduce_some(self, ws, nodes, operation, *, returns):
        return super().reduce_some(ws, np.sort(nodes), operation, returns=returns)


@trie_mutant(killed_by="some-nodes-are-exact")
class EachNodeOnce(TokenCharacterTrie):
    """Answers a question that names a node twice as if it did so once."""

    def reduce_some(self, ws, nodes, operation, *, returns):
        once = list(dict.fromkeys(np.asarray(nodes).tolist()))
        return super().reduce_some(ws, once, operation, returns=returns)


@trie_mutant(killed_by="some-nodes-are-exact")
class FirstRowForAll(TokenCharacterTrie):
    """Gives every row the values of the first."""

    def reduce_some(self, ws, nodes, operation, *, returns):
        values = super().reduce_some(ws, nodes, operation, returns=returns)
        if values.ndim == 2:
            values[:] = values[:1].copy()
        return values


@trie_mutant(killed_by="weights-elsewhere-change-nothing")
class MaskedByZero(TokenCharacterTrie):
    """Multiplies the weights of tokens elsewhere by 0, which leaves nan what it is."""

    def reduce_some(self, ws, nodes, operation, *, returns):
        rows = np.atleast_2d(np.asarray(ws, dtype=np.float32))
        values = np.empty((len(rows), len(nodes)), dtype=np.float32)
        for column, node in enumerate(nodes):
            mask = np.zeros(len(self.decode), dtype=np.float32)
            mask[self.tokens_below(node)] = 1
            if operation != "sum":
                values[:, column] = super().reduce_some(ws, [node], operation, returns="numpy")
                continue
            with np.errstate(invalid="ignore"):
                values[:, column] = (rows * mask).sum(-1)
        return values[0] if np.ndim(ws) == 1 else values


@trie_mutant(killed_by="wrong-nodes-are-refused")
class CountedFromTheEnd(TokenCharacterTrie):
    """Takes -1 for the last node, as Python's lists do."""

    def partial_sum(self, ws, nodes, **options):
        return super().partial_sum(ws, np.where(np.array(nodes) == -1, self.root, nodes))


@trie_mutant(killed_by="wrong-nodes-are-refused")
class BeyondTheEnd(TokenCharacterTrie):
    """Leaves nodes out that the trie does not have."""

    def partial_max(self, ws, nodes, **options):
        return super().partial_max(ws, [node for node in nodes if node < len(self)])
