"""`SegmentForward`: runs a model in padded passes over sequences with gathered pasts."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from genlm.core.queries.generations import Integers64
from genlm.core.rows.logits import moved
from genlm.prefix.forward import ForwardResult, Segments, TokenBatch
from genlm.prefix.node import Slots
from genlm.prefix.padding import SegmentLimits, plan_segments
from genlm.prefix.pass_layout import PassLayout
from genlm.prefix.shared_pasts import groups_with_shared_pasts

# Segments of up to this many tokens are computed faster as separate tokens than in stages.
_SHORT_TOKENS = 8


class SegmentForward(abc.ABC):
    """A `ForwardFn` whose passes are `PassLayout`s, as few as padding allows.

    Args:
        limits: Limits of a pass.

    Attributes:
        shares_pasts: Whether `run_pass` reads slots that all pasts have in common once, from
            `PassLayout.shared_slots`.
    """

    shares_pasts = False

    def __init__(self, limits: SegmentLimits) -> None:
        self._limits = limits

    @abc.abstractmethod
    def run_pass(
        self, layout: PassLayout, rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run the model over sequences side by side.

        Args:
            layout: The sequences.
            rows: Sequence of each token whose logits are requested, shape `(n,)`.
            places: Index of the token among the new tokens of the sequence, shape `(n,)`.

        Returns:
            The logits, shape `(n, width of the model's output)`.
        """

    def run_segments(
        self,
        batch: TokenBatch,
        segments: Segments,
        rows: Integers64,
        places: Integers64,
        shared: int = 0,
    ) -> torch.Tensor:
        """Run one pass over segments, whose pasts are computed; see `run_pass`.

        The first `shared` slots of all pasts are the same and are read once.
        """
        layout = PassLayout(batch, segments)
        layout.share(shared)
        return self.run_pass(layout, rows, places)

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        """Compute the tokens and the requested logits.

        Later passes read the keys and values that earlier ones stored. Short segments of
        several stages are computed together, each token as a sequence with one new token.
        """
        is_requested = np.zeros(len(batch.tokens), bool)
        is_requested[batch.results] = True
        requested, forwards = PassLogits(batch.results), 0
        for segments, shared in self._passes(batch):
            counts, tokens = segments.counts, segments.tokens
            wanted = np.flatnonzero(is_requested[tokens])
            rows = np.repeat(np.arange(len(counts)), counts)[wanted]
            places = wanted - (np.cumsum(counts) - counts)[rows]
            logits = self.run_segments(batch, segments, rows, places, shared)
            requested.add(tokens[wanted], logits)
            forwards += 1
        return ForwardResult(requested.logits, len(batch.tokens), forwards)

    def _passes(self, batch: TokenBatch) -> Iterator[tuple[Segments, int]]:
        """Yield the segments of each pass, and how many first slots their pasts share."""
        longest = int(batch.segments.counts.max())
        stages = batch.stages() if longest > 1 else [batch.segments]
        if len(stages) > 1 and longest <= _SHORT_TOKENS:
            tokens = np.arange(len(batch.tokens))
            stages = [Segments(tokens, np.ones_like(tokens))]
        for stage in stages:
            for members, shared in self._groups(batch, stage):
                part = stage.of(members)
                pasts = batch.positions[part.firsts]
                for indices in plan_segments(part.counts, pasts, self._limits, shared):
                    yield part.of(indices), shared

    def _groups(self, batch: TokenBatch, stage: Segments) -> Iterable[tuple[Integers64, int]]:
        """Return the segments of each group, and how many first slots their pasts share."""
        if not self.shares_pasts:
            return [(np.arange(len(stage.firsts)), 0)]
        paths = [batch.slots[row] for row in batch.rows[stage.firsts].tolist()]
        pasts = batch.positions[stage.firsts]
        return groups_with_shared_pasts(paths, pasts, len(batch.trunk))


class PassLogits:
    """The logits of requested keys, such as slots, from one or several passes.

    The logits of a pass are copied before the next pass allocates its own.

    Args:
        keys: The requested keys, possibly repeated.
    """

    def __init__(self, keys: Slots) -> None:
        self._keys = keys
        self._logits: torch.Tensor | None = None

    def add(self, pass_keys: Slots, logits: torch.Tensor) -> None:
        """Add the logits of a pass.

        Args:
            pass_keys: The key of each row of `logits`, without repetition; keys that are not
                requested are ignored.
            logits: Shape `(len(pass_keys), width of the model's output)`.
        """
        if np.array_equal(pass_keys, self._keys):  # most often
            self._logits = logits
            return
        places = np.flatnonzero(np.isin(self._keys, pass_keys))
        order = np.argsort(pass_keys)
        rows = order[np.searchsorted(pass_keys, self._keys[places], sorter=order)]
        if len(places) == len(self._keys):
            self._logits = logits[moved(torch.from_numpy(rows), logits.device)]
            return
        by_row = np.argsort(rows, kind="stable")  # avoids a copy if all rows are requested once
        places, rows = places[by_row], rows[by_row]
        if not np.array_equal(rows, np.arange(len(logits))):
            logits = logits[moved(torch.from_numpy(rows), logits.device)]
        if self._logits is None:
            self._logits = logits.new_empty((len(self._keys), logits.shape[1]))
        self._logits[moved(torch.from_numpy(places), logits.device)] = logits

    @property
    def logits(self) -> torch.Tensor:
        """The logits, shape `(len(keys), width)`, once all passes were added.

        Those of the only pass are not copied if they have the order of the keys.
        """
        assert self._logits is not None  # noqa: S101 - there is at least one pass
        return self._logits
