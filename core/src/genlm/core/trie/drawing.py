"""Pictures of a trie: Graphviz source and plain text, large subtrees folded.

Neither needs Graphviz; only turning the source into an image does.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.errors import WeightsError
from genlm.core.trie.navigation import Navigation
from genlm.core.trie.weights import Weights
from genlm.core.validation import checked_integer

__all__ = ["Sketch", "dot_source", "node_values", "sketch", "text_lines"]

MOST_CHILDREN = 16
"""Children of one node beyond these are folded, the lightest first."""


@dataclass
class Sketch:
    """A node that is drawn.

    Attributes:
        node: Which.
        edge: The letters that lead to it from its parent; none to a leaf.
        value: Its weight, or the number of tokens below.
        leaf: Whether it is a whole token.
        children: What is drawn below it.
        folded: Tokens below that are not drawn.
    """

    node: int
    edge: list[Any]
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
    """Choose what to draw: the heaviest nodes first, at most about `max_nodes`.

    Raises:
        TypeError: `max_nodes` is no integer.
        ValueError: It is less than 1.
    """
    room = checked_integer("max_nodes", max_nodes, 1) - 1
    top = Sketch(trie.root, [], float(values[trie.root]))
    order = itertools.count()
    waiting = [(-top.value, next(order), top)]
    while waiting:
        _, _, drawn = heapq.heappop(waiting)
        leaves: list[tuple[int, list[Any]]] = [
            (node, []) for node in trie.tokens_at(drawn.node).tolist()
        ]
        inner = zip(trie.child_letters(drawn.node), trie.child_prefixes(drawn.node))
        found = [*leaves, *((node, [letter]) for letter, node in inner)]
        lightest_last = sorted(found, key=lambda child: -_rank(values[child[0]]))
        kept = {node for node, _ in lightest_last[: min(MOST_CHILDREN, room)]}
        room -= len(kept)
        for node, edge in found:
            if node not in kept:
                lo, hi = trie.interval(node)
                drawn.folded += hi - lo
                continue
            child = Sketch(node, edge, float(values[node]), leaf=not edge)
            drawn.children.append(child)
            if not child.leaf:
                heapq.heappush(waiting, (-_rank(child.value), next(order), child))
    return top


def dot_source(top: Sketch, trie: Navigation) -> str:
    """Write a sketch in Graphviz's language; a fuller colour is a larger weight."""
    lines = ["digraph trie {", "  rankdir=LR;", '  node [style="filled,rounded" shape=box];']
    heaviest = max(abs(top.value), max((abs(s.value) for s in _all(top)), default=0.0))
    for number, drawn in enumerate(_all(top)):
        drawn_as = f"n{drawn.node}"
        prefix = "root" if drawn.node == trie.root else _readable(trie.prefix_of(drawn.node))
        label = json.dumps(f"{prefix}\n{drawn.value:.4g}", ensure_ascii=False)
        share = _rank(drawn.value) / heaviest if heaviest and math.isfinite(heaviest) else 0.0
        colour = f"0.33 {min(max(share, 0.0), 1.0):.3f} 1.0"
        peripheries = 2 if drawn.leaf else 1
        lines.append(
            f'  {drawn_as} [label={label} fillcolor="{colour}" peripheries={peripheries}];'
        )
        for child in drawn.children:
            edge = json.dumps(_edge(child), ensure_ascii=False)
            lines.append(f"  {drawn_as} -> n{child.node} [label={edge}];")
        if drawn.folded:
            lines.append(f'  fold{number} [label="{_more(drawn.folded)}" style=dashed];')
            lines.append(f"  {drawn_as} -> fold{number} [style=dashed];")
    return "\n".join([*lines, "}"]) + "\n"


def text_lines(top: Sketch) -> Iterator[str]:
    """Write a sketch as an indented tree; letters without a branch share a line."""
    yield f"root  {top.value:.4g}"
    yield from _indented(top, "")


def _indented(drawn: Sketch, indent: str) -> Iterator[str]:
    rows: list[Sketch | None] = [*drawn.children, *([None] if drawn.folded else [])]
    for row in rows:
        last = row is rows[-1]
        branch = "└─ " if last else "├─ "
        if row is None:
            yield f"{indent}{branch}{_more(drawn.folded)}"
            continue
        end = _unbranched(row)
        yield f"{indent}{branch}{_edge(end)}  {end.value:.4g}"
        yield from _indented(end, indent + ("   " if last else "│  "))


def _unbranched(drawn: Sketch) -> Sketch:
    """What comes of a node when all letters up to the next branch or end are one edge."""
    edge = drawn.edge
    while len(drawn.children) == 1 and not drawn.folded:
        (child,) = drawn.children
        if child.leaf or child.value != drawn.value:
            break
        edge, drawn = [*edge, *child.edge], child
    return dataclasses.replace(drawn, edge=edge)


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


def _edge(drawn: Sketch) -> str:
    return f"end {drawn.node}" if drawn.leaf else _readable(drawn.edge)


def _readable(letters: Sequence[Any]) -> str:
    """Letters as text: bytes as UTF-8 where they are, others escaped, objects by name."""
    text = ""
    for are_bytes, run in itertools.groupby(letters, lambda letter: isinstance(letter, int)):
        if are_bytes:
            text += bytes(run).decode(errors="backslashreplace")
        else:
            text += "".join(map(str, run))
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable() and character != " ":
        return character
    return f"\\x{ord(character):02x}"
