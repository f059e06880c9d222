"""Continuations: rows of a block table and the tokens after them, as one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from genlm.core.queries.generations import Integers64
from genlm.prefix.block_table import BlockTable
from genlm.prefix.forward import TokenBatch
from genlm.prefix.node import SCRATCH_SLOT, Slots

# Provisional numbers of new slots, before their allocation, start here.
_FIRST_NEW = 2**31


class Requested(NamedTuple):
    """Tokens of rows whose logits are requested.

    Attributes:
        rows: Index of the row among those that are continued, shape `(r,)`.
        columns: Index of the token among those that are added to the row; negative for a cached
            token, -1 for the last one, shape `(r,)`.
        token_ids: Token ids, of which those of cached tokens are used, shape `(r,)`.
    """

    rows: Integers64
    columns: Integers64
    token_ids: Integers64


class Continuation(NamedTuple):
    """A plan for the continuation of rows of a table.

    Attributes:
        batch: Tokens to compute.
        new: The allocated slots.
        parents: Parents of the allocated slots.
        lengths: Number of slots of each row after the trunk.
    """

    batch: TokenBatch
    new: Slots
    parents: Slots
    lengths: Integers64


def continuation(
    table: BlockTable,
    rows: Integers64,
    tokens: Integers64,
    requested: Requested,
    *,
    adapter: str | None,
    allocate: Callable[[int], Slots],
) -> Continuation:
    """Plan the tokens after rows of a table; equal tokens after one slot become one token.

    Args:
        table: The rows before these tokens.
        rows: Indices of rows, ascending, without repetition, shape `(d,)`.
        tokens: Added tokens of each sequence, shape `(d, k)`; `NO_TOKEN` for columns that
            add no token.
        requested: Tokens whose logits are requested, all of them after the trunk. Cached ones
            are recomputed.
        adapter: Adapter of the sequences.
        allocate: Function that returns a given number of slots; called once.
    """
    cached, last = table.lengths[rows], table.last[rows]
    lengths, numbers = cached.copy(), np.empty(tokens.shape, np.int64)
    queries, parents, columns = [], [], []
    size, count = int(tokens.max(initial=0)) + 1, 0
    for column in tokens.T:
        extended = np.flatnonzero(column >= 0)
        keys = last[extended] * size + column[extended]
        first, inverse = _unique(keys)
        leaders, added = extended[first], count + inverse
        places = lengths[extended]
        queries.append((column[leaders], leaders, lengths[leaders]))
        parents.append(last[leaders])
        columns.append((extended, places, added))
        numbers[extended, places - cached[extended]] = added
        last[extended] = _FIRST_NEW + added
        lengths[extended] += 1
        count += len(leaders)
    is_added = requested.columns >= 0
    results = np.empty(len(is_added), np.int64)
    results[is_added] = numbers[requested.rows[is_added], requested.columns[is_added]]
    repeated = np.flatnonzero(~is_added)
    results[repeated] = count + np.arange(len(repeated))
    leaders = requested.rows[repeated]
    before = cached[leaders] + requested.columns[repeated]
    queries.append((requested.token_ids[repeated], leaders, before))
    new_tokens, leaders, before = map(np.concatenate, zip(*queries, strict=True))
    new = allocate(count)
    slots = np.empty((len(rows), int(lengths.max())), np.int32)
    width = min(slots.shape[1], table.slots.shape[1])
    is_whole = len(rows) == len(table)  # in order, and not copied twice
    slots[:, :width] = (table.slots if is_whole else table.slots[rows])[:, :width]
    slots[:, width:] = SCRATCH_SLOT
    for extended, places, added in columns:
        slots[extended, places] = new[added]
    new_parents = np.concatenate([repeated[:0], *parents])
    is_new = new_parents >= _FIRST_NEW
    new_parents[is_new] = new[new_parents[is_new] - _FIRST_NEW]
    writes = np.full(len(new_tokens), SCRATCH_SLOT)
    writes[:count] = new
    positions = len(table.trunk) + before
    if len(queries) > 2 or len(repeated):  # the tokens of a row one after another
        order = np.lexsort([positions, leaders])
        results = np.argsort(order)[results]
        new_tokens, positions = new_tokens[order], positions[order]
        writes, leaders = writes[order], leaders[order]
    batch = TokenBatch(
        adapter, new_tokens, positions, writes, table.trunk, slots, leaders, results
    )
    return Continuation(batch, new, new_parents, lengths)


def _unique(keys: Integers64) -> tuple[Integers64, Integers64]:
    """Return the first index of each distinct key, and the distinct key of each entry.

    Most often all keys are distinct, which a sort of the keys alone shows.
    """
    in_order = np.sort(keys)
    if (in_order[1:] != in_order[:-1]).all():
        numbers = np.arange(len(keys))
        return numbers, numbers
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first, inverse
