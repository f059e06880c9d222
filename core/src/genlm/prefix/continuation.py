"""Continuations: rows of a block table and the tokens that follow them, as one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genlm.core.generations import Integers64
from genlm.prefix.block_table import BlockTable
from genlm.prefix.node import SCRATCH_SLOT, Slots

__all__ = ["Continuation", "TableBatch", "continuation"]

# New slots are numbered from here until they are allocated.
_FIRST_NEW = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class TableBatch:
    """Tokens to compute that continue rows of a block table.

    A token sees the trunk and the first slots of its row, up to its own position; the last of
    them is its own slot.

    Attributes:
        tokens: Token ids, shape `(q,)`.
        positions: The position of each in its sequence, shape `(q,)`.
        writes: The slot that takes the keys and values of each: its own one, or the scratch
            slot for a token that is computed again for its logits, shape `(q,)`.
        trunk: Slots that all sequences begin with.
        slots: The slots after them, shape `(d, longest)`, int32; what follows the end of a row
            means nothing.
        rows: The row of each token, shape `(q,)`.
        results: For each row the token whose logits are wanted, shape `(d,)`.
    """

    tokens: Integers64
    positions: Integers64
    writes: Slots
    trunk: Slots
    slots: NDArray[np.int32]
    rows: Integers64
    results: Integers64


class Continuation(NamedTuple):
    """Rows of a table, continued.

    Attributes:
        batch: Computes the tokens.
        new: The slots that were allocated.
        parents: The slot before each of them.
        lengths: Slots of each row after the trunk.
    """

    batch: TableBatch
    new: Slots
    parents: Slots
    lengths: Integers64


def continuation(
    table: BlockTable,
    rows: Integers64,
    tokens: Integers64,
    repeated: Integers64,
    allocate: Callable[[int], Slots],
) -> Continuation:
    """Plan the tokens that follow rows of a table; equal ones after one slot become one.

    Args:
        table: The rows before these tokens.
        rows: Which rows, shape `(d,)`, each once.
        tokens: Added tokens of each sequence, shape `(d, k)`; `NO_TOKEN` for columns that
            add no token.
        repeated: The last token of rows that nothing follows, which is computed again, shape
            `(d,)`.
        allocate: Called once; returns as many slots as it is asked for.
    """
    lengths, last = table.lengths[rows], table.last[rows]
    results = np.full(len(rows), -1)
    queries, parents, columns = [], [], []
    size, count = int(tokens.max(initial=0)) + 1, 0
    for column in tokens.T:
        own = np.flatnonzero(column >= 0)
        keys = last[own] * size + column[own]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        leaders, numbers = own[first], count + inverse
        queries.append((column[leaders], leaders, lengths[leaders]))
        parents.append(last[leaders])
        columns.append((own, lengths[own], numbers))
        results[own], last[own] = numbers, _FIRST_NEW + numbers
        lengths[own] += 1
        count += len(leaders)
    waiting = np.flatnonzero(results < 0)
    results[waiting] = count + np.arange(len(waiting))
    queries.append((repeated[waiting], waiting, lengths[waiting] - 1))
    new_tokens, leaders, before = map(np.concatenate, zip(*queries, strict=True))
    new = allocate(count)
    slots = np.zeros((len(rows), int(lengths.max())), np.int32)
    known = min(slots.shape[1], table.slots.shape[1])
    slots[:, :known] = table.slots[rows, :known]
    for own, places, numbers in columns:
        slots[own, places] = new[numbers]
    above = np.concatenate([waiting[:0], *parents])
    is_new = above >= _FIRST_NEW
    above[is_new] = new[above[is_new] - _FIRST_NEW]
    writes = np.full(len(new_tokens), SCRATCH_SLOT)
    writes[:count] = new
    positions = len(table.trunk) + before
    batch = TableBatch(new_tokens, positions, writes, table.trunk, slots, leaders, results)
    return Continuation(batch, new, above, lengths)
