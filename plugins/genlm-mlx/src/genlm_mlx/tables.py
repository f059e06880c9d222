"""Forward passes over tokens that continue rows of a block table, one new token a sequence."""

from __future__ import annotations

import functools

import numpy as np

from genlm.prefix import SCRATCH_SLOT, Slots, TableBatch
from genlm_mlx.resident import Extent

__all__ = ["TablePass", "extent_of"]


class TablePass:
    """Tokens of a `TableBatch` side by side, each after a past that is padded on the left.

    It has the attributes of a `SegmentBatch` that `slot_caches` reads. A token may follow one
    of the same pass: keys and values are stored before they are read.

    Args:
        batch: The tokens, and the slots of their rows.
        part: Indices of the tokens.
        past: Number of columns of the pasts, if more than the longest past has tokens.

    Attributes:
        tokens: Token ids, shape `(n, 1)`.
        positions: The position of each, shape `(n, 1)`.
        writes: The slot that takes its keys and values, shape `(n, 1)`.
        past: Number of columns of the pasts.
    """

    def __init__(self, batch: TableBatch, part: slice, *, past: int = 0) -> None:
        self.tokens = batch.tokens[part, None]
        self.positions = batch.positions[part, None]
        self.writes = batch.writes[part, None]
        self.past = max(past, int(self.positions.max()))
        self._trunk, self._slots = batch.trunk, batch.slots[batch.rows[part]]

    @functools.cached_property
    def reads(self) -> Slots:
        """The slots of pasts and new tokens, shape `(n, past + 1)`; padding reads the last."""
        trunk, width = len(self._trunk), self.past + 1
        before = self.past - self.positions
        if not before.any():
            reads = np.empty((len(self.tokens), width), np.int64)
            reads[:, :trunk], reads[:, trunk:] = self._trunk, self._slots[:, : width - trunk]
            return reads
        places = np.arange(width) - before
        places = np.where(places < 0, self.positions, places)
        own = np.take_along_axis(self._slots, np.maximum(places - trunk, 0), axis=1)
        shared = self._trunk[np.minimum(places, trunk - 1)] if trunk else own
        return np.where(places < trunk, shared, own).astype(np.int64)


def extent_of(batch: TableBatch, part: slice) -> Extent:
    """Return the ends of a pass's sequences before and after it."""
    positions, rows = batch.positions[part], batch.rows[part]
    own = positions - len(batch.trunk)
    pasts = batch.slots[rows, np.maximum(own - 1, 0)].astype(np.int64)
    at_trunk = own == 0
    pasts[at_trunk] = batch.trunk[-1] if len(batch.trunk) else SCRATCH_SLOT
    ends = batch.slots[rows, own].astype(np.int64)
    return Extent(pasts, ends, longest_past=int(positions.max()), new=1, is_even=True)
