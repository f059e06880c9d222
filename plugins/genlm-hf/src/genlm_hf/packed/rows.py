"""Which rows of attention share a trunk.

A row is one token that attends to its whole past. Rows whose paths through the
tree share a trunk read it once, as one matrix; what follows the trunk, their
tails, is gathered for each row. Here: how to divide rows into such groups. Knows
the tree, nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from genlm.prefix import BatchLimits, Node, Slots, plan_batches

__all__ = ["Row", "RowGroup", "group_rows"]

# In slots read, measured on two CPU cores: a group costs as much as reading 2,000
# slots, and gathering a slot as much as reading three.
_GROUP_COST = 2000
_GATHER_COST = 3

# Most slots gathered at once: 128 MiB a layer at 2 KiB a slot.
_GATHERED_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One token to run.

    Attributes:
        token: Its id.
        position: In its sequence, from 0.
        write: The slot for its keys and values; the scratch slot if they are known.
        node: The node of the tree that holds it.
    """

    token: int
    position: int
    write: int
    node: Node


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with a common trunk.

    Attributes:
        rows: At least one.
        trunk: Slots of the first tokens of every row; none of them is a row's own.
        tails: The slots after the trunk up to the row's own, shape (rows, longest
            tail); shorter tails are filled up with the row's own slot.
    """

    rows: Sequence[Row]
    trunk: Slots
    tails: Slots


def group_rows(rows: Sequence[Row]) -> Iterator[RowGroup]:
    """Divide rows into groups, each row into exactly one.

    From the leaves upwards, rows are handed to the parent node until a group of
    their own, with a longer trunk, saves more gathering than it costs.
    """
    waiting: dict[Node, list[Row]] = {}
    shortest: dict[Node, int] = {}
    for row in rows:
        waiting.setdefault(row.node, []).append(row)
        known = shortest.get(row.node, row.position)
        shortest[row.node] = min(known, row.position)
    # Descendants end after their ancestors; only a root has no token of its own.
    for node in sorted(_nodes_above(waiting), key=lambda node: node.end, reverse=True):
        members = waiting.pop(node, [])
        trunk = shortest.get(node, node.end)
        if node.parent is None or _is_worth_a_group(node, len(members), trunk):
            yield from _cut_to_size(members, trunk)
        else:
            waiting.setdefault(node.parent, []).extend(members)


def _nodes_above(nodes: dict[Node, list[Row]]) -> set[Node]:
    found: set[Node] = set()
    for start in nodes:
        node: Node | None = start
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def _is_worth_a_group(node: Node, members: int, trunk: int) -> bool:
    """Whether members save by a trunk of that length over the parent's."""
    saved = _GATHER_COST * members * (trunk - node.start)
    if saved <= _GROUP_COST + trunk:
        return False
    return saved > _GROUP_COST + (1 if _is_one_piece(node) else _GATHER_COST) * trunk


def _is_one_piece(node: Node) -> bool:
    return bool((np.diff(node.slots) == 1).all())


def _cut_to_size(members: Sequence[Row], trunk: int) -> Iterator[RowGroup]:
    """Put similar lengths together and bound what is gathered at once."""
    limits = BatchLimits(max_tokens=_GATHERED_AT_ONCE, max_rows=len(members) or 1)
    for chosen in plan_batches([row.position + 1 - trunk for row in members], limits):
        yield _group([members[i] for i in chosen], trunk)


def _group(rows: Sequence[Row], trunk: int) -> RowGroup:
    longest = max(row.position for row in rows) + 1 - trunk
    tails = np.empty((len(rows), longest), np.int64)
    for tail, row in zip(tails, rows, strict=True):
        end = row.position + 1
        row.node.write_path_slots(tail, trunk, end)
        if end - trunk < longest:
            tail[end - trunk :] = tail[end - trunk - 1]
    return RowGroup(rows, rows[0].node.path_slots(0, trunk), tails)
