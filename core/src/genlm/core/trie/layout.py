"""The token trie as arrays: every node is an interval of the sorted tokens.

When the tokens are sorted by their symbols, those below a node are adjacent: the node is
the interval `[lo, hi)` of their ranks. This module builds the intervals with array
operations in numpy; all tries share it.

Nodes are numbered so that every child comes before its parent:

* node `i < n_tokens` is the leaf of token `decode[i]`, an end-of-token edge below the
  node of the token's last symbol. Tokens with equal symbols have a leaf each;
* nodes from `n_tokens` on are the prefixes, longest first; prefixes of one length are
  sorted by their symbols, so the prefix children of a node are consecutive;
* the last node is the root, the empty prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import VocabularyError
from genlm.core.trie.symbols import Symbols, shared_prefixes, sorted_order

__all__ = ["TrieLayout"]

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TrieLayout:
    """The structure of a trie; arrays are read-only, and int32 unless stated otherwise.

    Attributes:
        order: Token at each rank of the sorted order, `(n_tokens,)`.
        lo: First rank below each node, `(n_nodes,)`.
        hi: One past the last rank below each node, `(n_nodes,)`.
        parent: Parent of each node, -1 for the root, `(n_nodes,)`.
        child_start: The prefix children of prefix `n_tokens + p` are the nodes
            `child_start[p]` up to `child_start[p + 1]`, `(n_prefixes + 1,)`.
        symbol: Code of the symbol on the edge to each prefix, 0 for the root; uint8, uint16
            or uint32, `(n_prefixes,)`.
        source: Index of each prefix's value, int64, `(n_prefixes,)`: a rank if one token is
            below the prefix, else `n_tokens + k` for the k-th distinct interval. Prefixes
            above the same tokens have the same source.
        distinct: A prefix of each distinct interval of two or more tokens, ascending in
            `lo`, longer intervals first.
        level: The prefixes of `d` symbols are the nodes `level[d + 1]` up to `level[d]`;
            `level[0]` is `n_nodes`, the last entry `n_tokens`.
    """

    order: Indices
    lo: Indices
    hi: Indices
    parent: Indices
    child_start: Indices
    symbol: npt.NDArray[Any]
    source: npt.NDArray[np.int64]
    distinct: Indices
    level: Indices

    def __repr__(self) -> str:
        return f"<TrieLayout: {self.n_tokens} tokens, {self.n_nodes} nodes>"

    @property
    def n_tokens(self) -> int:
        """Number of tokens, equal to the number of leaves."""
        return len(self.order)

    @property
    def n_nodes(self) -> int:
        """Number of leaves and prefixes, the root included."""
        return len(self.lo)

    @property
    def n_prefixes(self) -> int:
        """Number of prefixes, the root included."""
        return len(self.symbol)

    @property
    def root(self) -> int:
        """The node of the empty prefix, the last one."""
        return self.n_nodes - 1

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, in bytes."""
        return sum(array.nbytes for array in vars(self).values())

    def ranks_below(
        self, nodes: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Collect the distinct ranks below some nodes, ascending.

        Args:
            nodes: Valid nodes in any order, nested or repeated, `(k,)`.

        Returns:
            The ranks, and for each node the interval of its ranks among them: begin and
            end, `(k,)` each.
        """
        lo, hi = self.lo[nodes].astype(np.int64), self.hi[nodes].astype(np.int64)
        bounds = np.unique(np.concatenate([lo, hi]))
        opened = np.bincount(np.searchsorted(bounds, lo), minlength=len(bounds))
        closed = np.bincount(np.searchsorted(bounds, hi), minlength=len(bounds))
        covered = np.flatnonzero(np.cumsum(opened - closed)[:-1])
        start, sizes = bounds[covered], bounds[covered + 1] - bounds[covered]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        ranks = np.repeat(start - ends[:-1], sizes) + np.arange(ends[-1])
        return (
            ranks,
            ends[np.searchsorted(start, lo)],
            ends[np.searchsorted(start, hi)],
        )

    @classmethod
    def build(cls, symbols: Symbols) -> TrieLayout:
        """Build the trie of a vocabulary.

        Takes O(symbols) memory and O(symbols + items log items) time, in array operations.

        Raises:
            VocabularyError: The vocabulary is empty.
        """
        n = len(symbols.lengths)
        if not n:
            raise VocabularyError("a trie needs at least one token; the vocabulary is empty")
        order = sorted_order(symbols)
        shared = shared_prefixes(symbols, order)
        lengths = symbols.lengths[order]
        # Token r adds a prefix for each of its symbols beyond those shared with r - 1;
        # in this order, with the root first, the prefixes are in depth-first order.
        new = lengths - shared
        end = 1 + np.cumsum(new)  # one past the prefixes that tokens up to r add
        lo = np.concatenate([[0], np.repeat(np.arange(n), new)])
        depth = np.arange(end[-1])
        depth[1:] += np.repeat(shared + 1 - (end - new), new)
        up, stop = _parents_and_ends(depth)
        hi = np.concatenate([lo, [n]])[stop]
        symbol = np.zeros(len(lo), symbols.codes.dtype)
        symbol[1:] = symbols.codes[symbols.starts[order][lo[1:]] + depth[1:] - 1]
        source, representative = _sources(lo, hi, n)
        # The longest prefixes get the lowest numbers, so that children precede parents.
        rows = _stable_argsort(depth.max() - depth)
        node = np.empty(len(rows), dtype=np.int64)
        node[rows] = np.arange(n, n + len(rows))
        parent = np.append(node, -1)[up[rows]]
        whole = node[end - 1]  # the prefix that equals token r
        rank = np.empty(n, dtype=np.int64)
        rank[order] = np.arange(n)
        children = np.bincount(parent[:-1] - n, minlength=len(rows))
        of_length = np.bincount(depth)[::-1]
        fields: dict[str, npt.NDArray[Any]] = {
            "order": order,
            "lo": np.concatenate([rank, lo[rows]]),
            "hi": np.concatenate([rank + 1, hi[rows]]),
            "parent": np.concatenate([whole[rank], parent]),
            "child_start": n + np.concatenate([[0], np.cumsum(children)]),
            "symbol": symbol[rows],
            "source": source[rows],
            "distinct": node[representative],
            "level": n + np.concatenate([[0], np.cumsum(of_length)])[::-1],
        }
        for name, array in fields.items():
            fields[name] = array if name in {"symbol", "source"} else array.astype(np.int32)
            fields[name].flags.writeable = False
        return cls(**fields)


def _parents_and_ends(
    depth: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Parent of each prefix and the end of its subtree, both in depth-first order."""
    parent = np.full(len(depth), -1)
    stop = np.full(len(depth), len(depth))
    by_depth = _stable_argsort(depth)
    bounds = np.searchsorted(depth[by_depth], np.arange(depth.max() + 2))
    above = by_depth[:1]
    for d in range(1, len(bounds) - 1):
        level = by_depth[bounds[d] : bounds[d + 1]]
        parent[level] = above[np.searchsorted(above, level) - 1]
        following = np.append(level[1:], len(depth))
        stop[level] = np.minimum(following, stop[parent[level]])
        above = level
    return parent, stop


def _stable_argsort(depth: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # numpy sorts 16-bit integers by radix, several times faster.
    narrow = depth.astype(np.uint16) if depth.max() < 1 << 16 else depth
    return np.argsort(narrow, kind="stable")


def _sources(
    lo: npt.NDArray[np.int64], hi: npt.NDArray[np.int64], n_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Compute `source`, and the last prefix of each distinct interval of several tokens.

    In depth-first order, prefixes with equal intervals are adjacent.
    """
    is_last = np.ones(len(lo), dtype=bool)
    is_last[:-1] = (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])
    several = hi - lo > 1
    representative = np.flatnonzero(is_last & several)
    before = np.concatenate([[0], np.cumsum(is_last & several)[:-1]])
    return np.where(several, n_tokens + before, lo), representative
