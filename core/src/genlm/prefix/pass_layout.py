"""`PassLayout`: the new tokens of a forward pass side by side, and the slots that they read."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from genlm.core.queries.generations import Integers64
from genlm.prefix.forward import Segments, TokenBatch
from genlm.prefix.node import SCRATCH_SLOT, Slots


class PassLayout:
    """New tokens of sequences, padded on the right, after pasts that are padded on the left.

    A token may follow another of its pass: keys and values are stored before they are read.

    Args:
        batch: Tokens to compute.
        segments: Segments of the batch, one of each sequence, at least one.

    Attributes:
        tokens: Token ids, shape `(n, new)`; token 0 for padding.
        writes: Slot for the keys and values of each token; the scratch slot for padding.
        pasts: Number of tokens before those of each sequence, shape `(n,)`.
        positions: Position of each token in its sequence; padding continues the count.
        shared: Number of first slots that all pasts have in common and that `reads` omits; 0
            until `share` is called.
        past: Number of columns of the pasts after the shared slots; may be increased before
            `reads` is used.
        is_even: Whether all sequences have the same number of new tokens.
        past_ends: The last slot of each past, the scratch slot for an empty past.
        ends: The last slot of each sequence.
    """

    def __init__(self, batch: TokenBatch, segments: Segments) -> None:
        firsts, counts = segments
        new = np.arange(counts.max())
        is_new, indices = new < counts[:, None], np.minimum(new, counts[:, None] - 1)
        indices += firsts[:, None]
        self.tokens = np.where(is_new, batch.tokens[indices], 0)
        self.writes = np.where(is_new, batch.writes[indices], SCRATCH_SLOT)
        self.pasts = pasts = batch.positions[firsts]
        self.positions = pasts[:, None] + new
        self._trunk, self._slots = batch.trunk, batch.slots_of(segments)
        self._lasts = pasts + counts - 1
        self.share(0)
        self.is_even = bool((counts == counts[0]).all())
        lasts = self._slots_at(np.stack([pasts - 1, self._lasts], axis=1))
        self.past_ends, self.ends = np.where(pasts, lasts[:, 0], SCRATCH_SLOT), lasts[:, 1]

    def share(self, count: int) -> None:
        """Omit the first `count` slots, which all pasts have in common, from `reads`."""
        self.shared, self.past = count, int(self.pasts.max()) - count

    @property
    def padding(self) -> Integers64:
        """Number of columns of padding before each past, shape `(n,)`."""
        return self.past + self.shared - self.pasts

    @property
    def places(self) -> Integers64:
        """Position of each column of `reads`, shape `(n, past + new)`; less in padding."""
        width = self.past + self.tokens.shape[1]
        return np.arange(self.shared, self.shared + width) - self.padding[:, None]

    @property
    def is_token(self) -> NDArray[np.bool_]:
        """Whether each entry of `reads` is not padding."""
        return (self.places >= self.shared) & (self.places <= self._lasts[:, None])

    @functools.cached_property
    def shared_slots(self) -> Slots:
        """The shared slots, shape `(1, shared)`."""
        branch = self._slots[0, : max(0, self.shared - len(self._trunk))]
        return np.concatenate([self._trunk[: self.shared], branch])[None]

    @functools.cached_property
    def reads(self) -> Slots:
        """Slots of pasts and new tokens, shape `(n, past + new)`; padding reads the last."""
        return self._slots_at(np.where(self.is_token, self.places, self._lasts[:, None]))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    def _slots_at(self, places: Integers64) -> Slots:
        """Return the slots of positions of each sequence, shape `(n, any)`."""
        trunk = len(self._trunk)
        branch = np.take_along_axis(self._slots, np.maximum(places - trunk, 0), axis=1)
        if not trunk:
            return branch.astype(np.int64)
        shared = self._trunk[np.minimum(places, trunk - 1)]
        return np.where(places < trunk, shared, branch).astype(np.int64)
