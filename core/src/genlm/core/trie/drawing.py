"""Pictures of a trie: Graphviz source and plain text, large subtrees folded.

Neither needs Graphviz; only turning the source into an image does.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.errors import WeightsError
from genlm.core.trie.navigation import Navigation
from genlm.core.trie.weights import Weights

__all__ = ["Sketch", "dot_source", "node_values", "sketch", "text_lines"]

MOST_CHILDREN = 16
"""Children of one node beyond these are folded, the lightest first."""


@dataclass
class Sketch:
    """A node that is drawn.

    Attributes:
        node: Which.
        edge: What leads to it, as a label.
        value: Its weight, or the number of tokens below.
        leaf: Whether it is a whole token.
        children: What is drawn below it.
        folded: Tokens below that are not drawn.
    """

    node: int
    edge: str
    value: float
    leaf: bool = False
    children: list[Sketch] = field(default_factory=list)
    folded: int = 0


def node_values(trie: Navigation, ws: Any) -> npt.NDArray[np.float64]:
    """Weights for drawing: those given for each node, or the number of tokens below.

    Raises:
        WeightsError: There is not one weight for each node.
    """
    if ws is None:
        below: npt.NDArray[np.float64] = np.subtract(
            trie.layout.hi, trie.layout.lo, dtype=np.float64
        )
        return below
    try:
        given: npt.NDArray[np.float64] = Weights.of(ws, len(trie)).rows[0].astype(np.float64)
        return given
    except WeightsError as error:
        raise WeightsError(
            f"one weight for each of the {len(trie)} nodes, as weight_sum returns them",
            error.found,
        ) from error


def sketch(trie: Navigation, values: npt.NDArray[np.float64], max_nodes: int) -> Sketch:
    """Choose what to draw: the heaviest nodes first, at most about `max_nodes`."""
    top = Sketch(trie.root, "", float(values[trie.root]))
    order = itertools.count()
    waiting = [(-top.value, next(order), top)]
    room = max_nodes - 1
    while waiting:
        _, _, drawn = heapq.heappop(waiting)
        leaves = [(node, f"end {node}", True) for node in trie.tokens_at(drawn.node).tolist()]
        inner = zip(trie.child_letters(drawn.node), trie.child_prefixes(drawn.node))
        found = [*leaves, *((node, _label(letter), False) for letter, node in inner)]
        lightest_last = sorted(found, key=lambda child: -_rank(values[child[0]]))
        kept = {node for node, _, _ in lightest_last[: min(MOST_CHILDREN, room)]}
        room -= len(kept)
        for node, edge, leaf in found:
            if node not in kept:
                lo, hi = trie.interval(node)
                drawn.folded += hi - lo
                continue
            child = Sketch(node, edge, float(values[node]), leaf)
            drawn.children.append(child)
            if not leaf:
                heapq.heappush(waiting, (-_rank(child.value), next(order), child))
    return top


def dot_source(top: Sketch, trie: Navigation) -> str:
    """Write a sketch in Graphviz's language; a fuller colour is a larger weight."""
    lines = ["digraph trie {", "  rankdir=LR;", '  node [style="filled,rounded" shape=box];']
    heaviest = max(abs(top.value), max((abs(s.value) for s in _all(top)), default=0.0))
    for number, drawn in enumerate(_all(top)):
        drawn_as = f"n{drawn.node}"
        prefix = _readable(trie.prefix_of(drawn.node))
        label = json.dumps(f"{prefix}\n{drawn.value:.4g}", ensure_ascii=False)
        share = _rank(drawn.value) / heaviest if heaviest and math.isfinite(heaviest) else 0.0
        colour = f"0.33 {min(max(share, 0.0), 1.0):.3f} 1.0"
        peripheries = 2 if drawn.leaf else 1
        lines.append(
            f'  {drawn_as} [label={label} fillcolor="{colour}" peripheries={peripheries}];'
        )
        for child in drawn.children:
            edge = json.dumps(child.edge, ensure_ascii=False)
            lines.append(f"  {drawn_as} -> n{child.node} [label={edge}];")
        if drawn.folded:
            lines.append(f'  fold{number} [label="{_more(drawn.folded)}" style=dashed];')
            lines.append(f"  {drawn_as} -> fold{number} [style=dashed];")
    return "\n".join([*lines, "}"]) + "\n"


def text_lines(top: Sketch) -> Iterator[str]:
    """Write a sketch as an indented tree."""
    yield f"root  {top.value:.4g}"
    yield from _indented(top, "")


def _indented(drawn: Sketch, indent: str) -> Iterator[str]:
    rows: list[Sketch | None] = [*drawn.children, *([None] if drawn.folded else [])]
    for row in rows:
        last = row is rows[-1]
        branch = "└─ " if last else "├─ "
        if row is None:
            yield f"{indent}{branch}{_more(drawn.folded)}"
        else:
            yield f"{indent}{branch}{row.edge}  {row.value:.4g}"
            yield from _indented(row, indent + ("   " if last else "│  "))


def _all(top: Sketch) -> Iterator[Sketch]:
    waiting = [top]
    while waiting:
        drawn = waiting.pop()
        yield drawn
        waiting.extend(reversed(drawn.children))


def _rank(value: float) -> float:
    return -math.inf if math.isnan(value) else float(value)


def _more(tokens: int) -> str:
    return f"… {tokens} more token{'' if tokens == 1 else 's'}"


def _label(letter: Any) -> str:
    """A letter as text: printable ASCII as it is, other bytes in hexadecimal."""
    if isinstance(letter, int):
        return chr(letter) if 32 < letter < 127 else f"\\x{letter:02x}"
    return str(letter)


def _readable(letters: list[Any]) -> str:
    return "".join(map(_label, letters)) or "root"
