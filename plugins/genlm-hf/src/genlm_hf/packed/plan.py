"""What one packed forward pass runs, in which order, and where its results are.

The pass is one sequence of tokens for the model, `[1, tokens]`: first the rows,
group by group, then the long runs. Numbers only; `packed.attention` puts them on
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm.prefix import SCRATCH_SLOT, Node, PrefixTree, Slots
from genlm_hf.packed.rows import Row, RowGroup, group_rows

__all__ = ["PackedPlan", "Run", "plan_forward"]

# Runs up to this length are cheaper as rows, which share trunks and calls.
_LONGEST_RUN_OF_ROWS = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence, computed together.

    Attributes:
        past: Number of tokens before them.
        slots: Of the past and of the run itself.
    """

    past: int
    slots: Slots

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return len(self.slots) - self.past


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One packed forward pass of `len(tokens)` tokens.

    Attributes:
        tokens: Ids, in the order of the pass.
        positions: Of each in its own sequence.
        writes: The slot that takes the keys and values of each.
        groups: The first tokens of the pass.
        runs: The tokens after those of the groups.
        results: Place in the pass of each sequence's last token.
    """

    tokens: Integers
    positions: Integers
    writes: Slots
    groups: Sequence[RowGroup]
    runs: Sequence[Run]
    results: Integers


def plan_forward(
    tree: PrefixTree,
    adapter: str | None,
    sequences: Sequence[tuple[int, ...]],
    last_slots: Sequence[int],
) -> PackedPlan:
    """Plan the pass that computes what is fresh in a tree, and all results.

    Args:
        tree: All sequences have been inserted in the current batch.
        adapter: Under which they were.
        sequences: Whose next tokens are wanted.
        last_slots: What `insert` returned for each.
    """
    rows, nodes = _rows_and_runs(tree.fresh())
    fresh = {row.write for row in rows}
    fresh.update(slot for node in nodes for slot in node.slots[node.computed :].tolist())
    again = {
        slot: Row(sequence[-1], len(sequence) - 1, SCRATCH_SLOT, tree.find(adapter, sequence))
        for sequence, slot in zip(sequences, last_slots, strict=True)
        if slot not in fresh
    }
    groups = list(group_rows([*rows, *again.values()]))
    ordered = [row for group in groups for row in group.rows]
    tokens = [row.token for row in ordered]
    positions = [row.position for row in ordered]
    writes = [row.write for row in ordered]
    for node in nodes:
        tokens.extend(node.tokens[node.computed :])
        positions.extend(range(node.start + node.computed, node.end))
        writes.extend(node.slots[node.computed :].tolist())
    places = {slot: place for place, slot in enumerate(writes)}
    if again:
        place_of_row = {row: place for place, row in enumerate(ordered)}
        places.update({slot: place_of_row[row] for slot, row in again.items()})
    return PackedPlan(
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        writes=np.array(writes, np.int64),
        groups=groups,
        runs=[Run(n.start + n.computed, n.path_slots(0, n.end)) for n in nodes],
        results=np.array([places[slot] for slot in last_slots], np.int64),
    )


def _rows_and_runs(fresh: Sequence[Node]) -> tuple[list[Row], list[Node]]:
    """Divide fresh nodes into single rows and those that are run in one piece."""
    rows: list[Row] = []
    nodes: list[Node] = []
    for node in fresh:
        length = len(node.tokens) - node.computed
        if length > _LONGEST_RUN_OF_ROWS:
            nodes.append(node)
            continue
        for offset in range(node.computed, len(node.tokens)):
            slot = int(node.slots[offset])
            rows.append(Row(node.tokens[offset], node.start + offset, slot, node))
    return rows, nodes
