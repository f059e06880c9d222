"""The token trie as arrays: every node is an interval of the sorted tokens.

When the tokens are sorted by their symbols, those below a node are adjacent: the node is
the interval `[lo, hi)` of their ranks. This module builds the intervals with array
operations in numpy; all tries share it.

Nodes are numbered so that every child comes before its parent:

* node `i < n_tokens` is the leaf of token `decode[i]`, an end-of-token edge below the
  node of the token's last symbol. Tokens with equal symbols have a leaf each;
* nodes from `n_tokens` on are the prefixes, the longest first; prefixes of one length are
  sorted by their symbols, so the prefix children of a node are consecutive;
* the last node is the root, the empty prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.base.arrays import ranges
from genlm.core.base.errors import VocabularyError
from genlm.core.trie.symbols import Symbols, sorted_order

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
        source: Index of each prefix's value, int64, `(n_prefixes,)`: a rank if only one token
            is below the prefix, else `n_tokens + k` for the k-th distinct interval. Prefixes
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
        if len(lo) and (lo[1:] == hi[:-1]).all():  # adjacent, such as the children of a node
            return np.arange(lo[0], hi[-1]), lo - lo[0], hi - lo[0]
        bounds = np.unique(np.concatenate([lo, hi]))
        opened = np.bincount(np.searchsorted(bounds, lo), minlength=len(bounds))
        closed = np.bincount(np.searchsorted(bounds, hi), minlength=len(bounds))
        covered = np.flatnonzero(np.cumsum(opened - closed)[:-1])
        start, sizes = bounds[covered], bounds[covered + 1] - bounds[covered]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return (
            ranges(start, sizes),
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
        lengths = symbols.lengths[order]
        levels, ends = _levels(symbols.codes, symbols.starts[order], lengths)
        sizes = [len(prefixes) for prefixes in levels["lo"]]
        # The longest prefixes get the lowest numbers, so that children precede parents.
        level = n + np.cumsum([0, *sizes[::-1]])[::-1]
        levels["parent"] = [
            place + base for place, base in zip(levels["parent"], [0, *level[1:-1]])
        ]
        lo, hi, parent, symbol = (np.concatenate(arrays[::-1]) for arrays in levels.values())
        rank = np.empty(n, dtype=np.int64)
        rank[order] = np.arange(n)
        whole = level[lengths + 1] + ends  # the prefix that equals the token of each rank
        children = np.bincount(parent[:-1] - n, minlength=len(parent))
        # Prefixes above the same tokens share a value; the longest prefix represents them.
        intervals = np.flatnonzero(hi - lo > 1)
        keys = lo[intervals] * (n + 1) + (n - hi[intervals])
        _, longest, interval = np.unique(keys, return_index=True, return_inverse=True)
        source = lo.copy()
        source[intervals] = n + interval
        fields: dict[str, npt.NDArray[Any]] = {
            "order": order,
            "lo": np.concatenate([rank, lo]),
            "hi": np.concatenate([rank + 1, hi]),
            "parent": np.concatenate([whole[rank], parent]),
            "child_start": n + np.concatenate([[0], np.cumsum(children)]),
            "symbol": symbol,
            "source": source,
            "distinct": n + intervals[longest],
            "level": level,
        }
        for name, array in fields.items():
            fields[name] = array if name in {"symbol", "source"} else array.astype(np.int32)
            fields[name].flags.writeable = False
        return cls(**fields)


def _levels(
    codes: npt.NDArray[Any], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[dict[str, list[npt.NDArray[Any]]], npt.NDArray[np.int64]]:
    """Group sorted tokens by their prefixes of each length, the empty prefix first.

    Args:
        codes: Codes of all symbols.
        starts: Index of the first symbol of the token of each rank.
        lengths: Number of symbols of the token of each rank.

    Returns:
        `lo`, `hi`, `parent` (its place among the prefixes that are one symbol shorter) and
        `symbol` of the prefixes of each length, in sorted order; and the place of each token
        among the prefixes of its length.
    """
    ranks, place = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    ends, root = place.copy(), place[:1]
    levels = {
        "lo": [root],
        "hi": [root + len(lengths)],
        "parent": [root - 1],
        "symbol": [np.zeros(1, codes.dtype)],
    }
    while True:
        depth = len(levels["lo"])
        longer = lengths[ranks] >= depth
        ranks, place = ranks[longer], place[longer]
        if not len(ranks):
            return levels, ends
        symbol = codes[starts[ranks] + depth - 1]
        begins = np.ones(len(ranks), dtype=bool)
        begins[1:] = (place[1:] != place[:-1]) | (symbol[1:] != symbol[:-1])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(ranks)) - 1
        levels["lo"].append(ranks[first])
        levels["hi"].append(ranks[last] + 1)
        levels["parent"].append(place[first])
        levels["symbol"].append(symbol[first])
        place = np.cumsum(begins) - 1
        ends[ranks] = place  # replaced by the places of longer prefixes
