"""Visualisation of a trie as Graphviz source, with large subtrees collapsed."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import WeightsError
from genlm.core.base.validation import checked_integer
from genlm.core.trie.navigation import Navigation
from genlm.core.trie.symbols import is_byte
from genlm.core.trie.weights import numpy_rows, read_rows

Values: TypeAlias = npt.NDArray[np.float64]

MAX_CHILDREN = 16
"""Maximum number of visible children of a node, those of largest weight."""


def node_values(trie: Navigation, ws: Any) -> Values:
    """Return the values to show: the weight of each node, or the number of tokens below it."""
    if ws is None:
        counts: Values = np.subtract(trie.layout.hi, trie.layout.lo, dtype=np.float64)
        return counts
    try:
        weights: Values = numpy_rows(read_rows(ws, len(trie), (1,)))[0].astype(np.float64)
        return weights
    except WeightsError as error:
        raise WeightsError(
            f"one weight for each of the {len(trie)} nodes, as weight_sum returns them",
            error.found,
        ) from error


def visible_nodes(
    trie: Navigation, values: Values, max_nodes: int
) -> dict[int, tuple[list[int], int]]:
    """Choose the nodes to show, largest values first, at most `max_nodes`.

    Returns:
        For each visible prefix, its visible children, and the number of tokens below its other
        children.
    """
    room = checked_integer("max_nodes", max_nodes, 1) - 1
    visible: dict[int, tuple[list[int], int]] = {}
    order = itertools.count()
    queue = [(0.0, next(order), trie.root)]
    while queue:
        _, _, node = heapq.heappop(queue)
        children = [*trie.tokens_at(node).tolist(), *trie.child_prefixes(node)]
        descending = sorted(children, key=lambda child: -_rank(float(values[child])))
        largest = set(descending[: min(MAX_CHILDREN, room)])
        room -= len(largest)
        collapsed = [trie.interval(child) for child in children if child not in largest]
        visible_children = [child for child in children if child in largest]
        visible[node] = visible_children, sum(hi - lo for lo, hi in collapsed)
        for child in visible_children:
            if not trie.is_leaf(child):
                heapq.heappush(queue, (-_rank(float(values[child])), next(order), child))
    return visible


def dot_source(
    trie: Navigation, values: Values, visible: Mapping[int, tuple[list[int], int]]
) -> str:
    """Format the visible nodes in Graphviz's language; saturation shows the value."""
    lines = ["digraph trie {", "  rankdir=LR;", '  node [style="filled,rounded" shape=box];']
    nodes = [trie.root, *(child for children, _ in visible.values() for child in children)]
    largest = max(abs(float(values[node])) for node in nodes)
    stack = [trie.root]
    while stack:
        node = stack.pop()
        prefix = "root" if node == trie.root else _readable(trie.prefix_of(node))
        label = json.dumps(f"{prefix}\n{values[node]:.4g}", ensure_ascii=False)
        share = (
            _rank(float(values[node])) / largest if largest and math.isfinite(largest) else 0.0
        )
        colour = f"0.33 {min(max(share, 0.0), 1.0):.3f} 1.0"
        peripheries = 2 if trie.is_leaf(node) else 1
        lines.append(
            f'  n{node} [label={label} fillcolor="{colour}" peripheries={peripheries}];'
        )
        children, collapsed = visible.get(node, ([], 0))
        for child in children:
            edge = json.dumps(edge_label(trie, child), ensure_ascii=False)
            lines.append(f"  n{node} -> n{child} [label={edge}];")
        if collapsed:
            more = f"… {collapsed} more token{'' if collapsed == 1 else 's'}"
            lines.append(f'  collapsed{node} [label="{more}" style=dashed];')
            lines.append(f"  n{node} -> collapsed{node} [style=dashed];")
        stack.extend(reversed(children))
    return "\n".join([*lines, "}"]) + "\n"


def edge_label(trie: Navigation, node: int) -> str:
    """Format the edge to a node: its symbol, or the position of the token that ends there."""
    return f"end {node}" if trie.is_leaf(node) else _readable(trie.prefix_of(node)[-1:])


def _rank(value: float) -> float:
    return -math.inf if math.isnan(value) else float(value)


def _readable(symbols: Sequence[Any]) -> str:
    """Format symbols as text: bytes as UTF-8 or escaped, other objects as strings."""
    text = ""
    for are_bytes, run in itertools.groupby(symbols, is_byte):
        if are_bytes:
            text += bytes(run).decode(errors="backslashreplace")
        else:
            text += "".join(map(str, run))
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable() and character != " ":
        return character
    return f"\\x{ord(character):02x}"
