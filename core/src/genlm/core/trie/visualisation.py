"""Visualisation of a trie as Graphviz source or plain text, with large subtrees collapsed.

Both are computed without Graphviz, which is needed to render the source.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import WeightsError
from genlm.core.base.validation import checked_integer
from genlm.core.trie.navigation import Navigation
from genlm.core.trie.weights import numpy_rows, read_rows

__all__ = ["VisibleNode", "dot_source", "node_values", "visible_tree"]

MOST_CHILDREN = 16
"""Children of one node beyond this number are collapsed, those of least weight first."""


@dataclass
class VisibleNode:
    """A node that is shown.

    Attributes:
        node: The node in the trie.
        edge: The symbols on the edge from its parent; empty for a leaf.
        value: Weight of the node, or the number of tokens below it.
        leaf: Whether the node is the leaf of a token.
        children: The children that are shown.
        collapsed: Number of tokens below that are not shown.
    """

    node: int
    edge: list[Any]
    value: float
    leaf: bool = False
    children: list[VisibleNode] = field(default_factory=list)
    collapsed: int = 0


def node_values(trie: Navigation, ws: Any) -> npt.NDArray[np.float64]:
    """Values to show: the weights given for each node, or the number of tokens below it."""
    if ws is None:
        below: npt.NDArray[np.float64] = np.subtract(
            trie.layout.hi, trie.layout.lo, dtype=np.float64
        )
        return below
    try:
        given: npt.NDArray[np.float64] = numpy_rows(read_rows(ws, len(trie), (1,)))[0]
        return given.astype(np.float64)
    except WeightsError as error:
        raise WeightsError(
            f"one weight for each of the {len(trie)} nodes, as weight_sum returns them",
            error.found,
        ) from error


def visible_tree(
    trie: Navigation, values: npt.NDArray[np.float64], max_nodes: int
) -> VisibleNode:
    """Choose the nodes to show, largest values first, at most `max_nodes`."""
    room = checked_integer("max_nodes", max_nodes, 1) - 1
    top = VisibleNode(trie.root, [], float(values[trie.root]))
    order = itertools.count()
    waiting = [(-top.value, next(order), top)]
    while waiting:
        _, _, shown = heapq.heappop(waiting)
        leaves: list[tuple[int, list[Any]]] = [
            (node, []) for node in trie.tokens_at(shown.node).tolist()
        ]
        inner = zip(trie.child_symbols(shown.node), trie.child_prefixes(shown.node))
        found = [*leaves, *((node, [symbol]) for symbol, node in inner)]
        descending = sorted(found, key=lambda child: -_rank(values[child[0]]))
        kept = {node for node, _ in descending[: min(MOST_CHILDREN, room)]}
        room -= len(kept)
        for node, edge in found:
            if node not in kept:
                lo, hi = trie.interval(node)
                shown.collapsed += hi - lo
                continue
            child = VisibleNode(node, edge, float(values[node]), leaf=not edge)
            shown.children.append(child)
            if not child.leaf:
                heapq.heappush(waiting, (-_rank(child.value), next(order), child))
    return top


def dot_source(top: VisibleNode, trie: Navigation) -> str:
    """Format the visible tree in Graphviz's language; saturation shows the value."""
    lines = ["digraph trie {", "  rankdir=LR;", '  node [style="filled,rounded" shape=box];']
    largest = max(abs(top.value), max((abs(s.value) for s in _every_node(top)), default=0.0))
    for number, shown in enumerate(_every_node(top)):
        name = f"n{shown.node}"
        prefix = "root" if shown.node == trie.root else _readable(trie.prefix_of(shown.node))
        label = json.dumps(f"{prefix}\n{shown.value:.4g}", ensure_ascii=False)
        share = _rank(shown.value) / largest if largest and math.isfinite(largest) else 0.0
        colour = f"0.33 {min(max(share, 0.0), 1.0):.3f} 1.0"
        peripheries = 2 if shown.leaf else 1
        lines.append(
            f'  {name} [label={label} fillcolor="{colour}" peripheries={peripheries}];'
        )
        for child in shown.children:
            edge = json.dumps(_edge(child), ensure_ascii=False)
            lines.append(f"  {name} -> n{child.node} [label={edge}];")
        if shown.collapsed:
            lines.append(
                f'  collapsed{number} [label="{_more(shown.collapsed)}" style=dashed];'
            )
            lines.append(f"  {name} -> collapsed{number} [style=dashed];")
    return "\n".join([*lines, "}"]) + "\n"


def _every_node(top: VisibleNode) -> Iterator[VisibleNode]:
    waiting = [top]
    while waiting:
        shown = waiting.pop()
        yield shown
        waiting.extend(reversed(shown.children))


def _rank(value: float) -> float:
    return -math.inf if math.isnan(value) else float(value)


def _more(tokens: int) -> str:
    return f"… {tokens} more token{'' if tokens == 1 else 's'}"


def _edge(shown: VisibleNode) -> str:
    return f"end {shown.node}" if shown.leaf else _readable(shown.edge)


def _readable(symbols: Sequence[Any]) -> str:
    """Format symbols as text: bytes as UTF-8 or escaped, other objects as strings."""
    text = ""
    for are_bytes, run in itertools.groupby(symbols, _is_byte):
        if are_bytes:
            text += bytes(run).decode(errors="backslashreplace")
        else:
            text += "".join(map(str, run))
    return "".join(map(_visible, text))


def _is_byte(symbol: Any) -> bool:
    return isinstance(symbol, int) and 0 <= symbol < 256


def _visible(character: str) -> str:
    if character.isprintable() and character != " ":
        return character
    return f"\\x{ord(character):02x}"
