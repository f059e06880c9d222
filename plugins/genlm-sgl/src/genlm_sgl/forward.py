"""`SGLangForward`: forward passes of SGLang over the slots of a prefix tree or a block table.

A pass is a decode or an extend. In a *decode*, each token is a separate sequence, which reads
the slots of a row of SGLang's table up to its position; on a GPU, SGLang has graphs of decodes.
An *extend* computes the new tokens of several prompts. Segments of few tokens are decoded,
because SGLang's attention on a CPU recomputes the whole sequence in an extend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from genlm.plugin import device_index
from genlm.prefix import (
    ForwardResult,
    PassLogits,
    Segment,
    Slots,
    TableBatch,
    TreeBatch,
    padded_slots,
)
from genlm_sgl.adapters import Adapters
from genlm_sgl.served_model import ServedModel

_MAX_DECODED_TOKENS = 8
"""Maximum number of new tokens of a segment that is decoded."""

_NO_TRUNK: Slots = np.empty(0, np.int64)


class SGLangForward:
    """Computes the uncached tokens of a tree, or tokens that continue the rows of a table.

    Implements `ForwardFn` of `genlm.prefix`.

    Args:
        served: The model.
        adapters: The loaded adapters.
        reads_states: Whether an extend can compute the logits of all its tokens. Otherwise
            segments are decoded if logits of tokens before the last one are requested.
    """

    def __init__(self, served: ServedModel, adapters: Adapters, *, reads_states: bool) -> None:
        self._served, self._adapters = served, adapters
        self._reads_states = reads_states

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Run the prefill stages: decode short segments, and extend the others."""
        adapter_id = self._adapters.id_of(batch.adapter)
        requested = PassLogits(batch.wanted)
        tokens = forwards = 0
        for stage in batch.stages:
            decoded = [segment for segment in stage if self._is_decoded(segment, batch.wanted)]
            if decoded:
                slots, table = _new_slots(decoded), TableBatch.of_segments(decoded)
                forwards += self._decode(table, adapter_id, slots, requested)
                tokens += len(slots)
            extended = [
                segment for segment in stage if not self._is_decoded(segment, batch.wanted)
            ]
            for segments in self._extends(extended):
                slots = _new_slots(segments)
                places = np.flatnonzero(np.isin(slots, batch.wanted))
                requested.add(slots[places], self._extend(segments, places, adapter_id))
                tokens, forwards = tokens + len(slots), forwards + 1
        return ForwardResult(requested.logits, tokens, forwards)

    def run_table(self, batch: TableBatch, adapter: str | None) -> ForwardResult:
        """Decode tokens that continue rows of a table."""
        requested, keys = PassLogits(batch.results), np.arange(len(batch.tokens))
        passes = self._decode(batch, self._adapters.id_of(adapter), keys, requested)
        return ForwardResult(requested.logits, len(batch.tokens), passes)

    def _is_decoded(self, segment: Segment, wanted: Slots) -> bool:
        if len(segment.tokens) <= _MAX_DECODED_TOKENS:
            return True
        inner = segment.slots[segment.past : -1]
        return not self._reads_states and bool(np.isin(inner, wanted).any())

    def _extend(
        self, segments: Sequence[Segment], places: Slots, adapter_id: str | None
    ) -> torch.Tensor:
        """Run an extend and return the logits after the new tokens at `places`."""
        lasts = np.cumsum([len(segment.tokens) for segment in segments]) - 1
        if np.isin(places, lasts).all():  # SGLang computes these logits
            logits = self._served.extend(segments, adapter_id)
            return _select_rows(logits, np.searchsorted(lasts, places))
        return self._served.extend(segments, adapter_id, places)

    def _decode(
        self, batch: TableBatch, adapter_id: str | None, keys: Slots, requested: PassLogits
    ) -> int:
        """Add the logits of all tokens, each with its key; return the number of passes."""
        served, count = self._served, len(batch.tokens)
        fits = len(batch.slots) <= served.max_rows
        if fits:
            served.write_rows(batch.trunk, batch.slots)
        firsts = range(0, count, served.max_rows)
        for first in firsts:
            part = slice(first, first + served.max_rows)
            rows = batch.rows[part]
            if not fits:  # SGLang's table has fewer rows than the batch
                pass_rows, rows = np.unique(rows, return_inverse=True)
                served.write_rows(batch.trunk, batch.slots[pass_rows])
            tokens, positions = batch.tokens[part], batch.positions[part]
            requested.add(
                keys[part],
                served.decode(tokens, positions, batch.writes[part], rows, adapter_id),
            )
        return len(firsts)

    def _extends(self, segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
        """Divide segments into passes, and write the slots of a pass to the table."""
        size = self._served.max_rows
        for first in range(0, len(segments), size):
            part = segments[first : first + size]
            self._served.write_rows(_NO_TRUNK, padded_slots(part))
            yield part


def _new_slots(segments: Sequence[Segment]) -> Slots:
    """Return the slots of segments' new tokens; a cached token has its cached slot."""
    return np.concatenate([segment.slots[segment.past :] for segment in segments])


def _select_rows(logits: torch.Tensor, places: Slots) -> torch.Tensor:
    """Return the rows at `places`, as `logits` itself if they are all rows in order."""
    if np.array_equal(places, np.arange(len(logits))):
        return logits
    return logits[device_index(places.tolist(), logits.device)]
