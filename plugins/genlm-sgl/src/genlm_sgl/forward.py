"""`SGLangForward`: forward passes of SGLang over the slots of a prefix tree or a block table.

A pass is a decode or an extend. In a *decode*, each token is a separate sequence, which reads
the slots of a row of SGLang's table up to its position; on a GPU, SGLang has graphs of decodes.
An *extend* computes the new tokens of several prompts. Segments of few tokens are decoded,
because SGLang's attention on a CPU recomputes the whole sequence in an extend.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.plugin import device_index
from genlm.prefix import ForwardResult, Integers64, PassLogits, Segments, TokenBatch
from genlm_sgl.adapters import Adapters
from genlm_sgl.served_model import ServedModel

_MAX_DECODED_TOKENS = 8
"""Maximum number of new tokens of a segment that is decoded."""


class SGLangForward:
    """Computes the tokens of a batch. Implements `ForwardFn` of `genlm.prefix`.

    Args:
        served: The model.
        adapters: The loaded adapters.
        reads_states: Whether an extend can compute the logits of all its tokens. Otherwise
            segments are decoded if logits of tokens before the last one are requested.
    """

    def __init__(self, served: ServedModel, adapters: Adapters, *, reads_states: bool) -> None:
        self._served, self._adapters = served, adapters
        self._reads_states = reads_states

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        """Run the prefill stages: decode short segments, and extend the others."""
        requested, forwards, size = PassLogits(batch.results), 0, self._served.max_rows
        if self._are_decoded(batch, batch.segments).all():
            stages = [batch.segments]  # a token may follow another one of its decode
        else:
            stages = batch.stages()
        for stage in stages:
            are_decoded = self._are_decoded(batch, stage)
            forwards += self._decode(batch, stage.of(are_decoded).tokens, requested)
            extended = stage.of(~are_decoded)
            for first in range(0, len(extended.firsts), size):
                self._extend(batch, extended.of(slice(first, first + size)), requested)
                forwards += 1
        return ForwardResult(requested.logits, len(batch.tokens), forwards)

    def _are_decoded(self, batch: TokenBatch, segments: Segments) -> NDArray[np.bool_]:
        """Return which segments are decoded."""
        are_decoded: NDArray[np.bool_] = segments.counts <= _MAX_DECODED_TOKENS
        if not self._reads_states:
            results = np.unique(batch.results)
            ends = segments.firsts, segments.firsts + segments.counts - 1
            first, last = (np.searchsorted(results, end) for end in ends)
            are_decoded = are_decoded | (first < last)
        return are_decoded

    def _extend(self, batch: TokenBatch, segments: Segments, requested: PassLogits) -> None:
        """Run an extend and add the logits of its results."""
        self._served.write_rows(batch.trunk, batch.slots_of(segments))
        adapter_id, tokens = self._adapters.id_of(batch.adapter), segments.tokens
        places = np.flatnonzero(np.isin(tokens, batch.results))
        lasts = np.cumsum(segments.counts) - 1
        if np.isin(places, lasts).all():  # SGLang computes these logits
            logits = self._served.extend(batch, segments, adapter_id)
            logits = _select_rows(logits, np.searchsorted(lasts, places))
        else:
            logits = self._served.extend(batch, segments, adapter_id, places)
        requested.add(tokens[places], logits)

    def _decode(self, batch: TokenBatch, tokens: Integers64, requested: PassLogits) -> int:
        """Decode some tokens and add their logits; return the number of passes."""
        served, adapter_id = self._served, self._adapters.id_of(batch.adapter)
        fits = len(batch.slots) <= served.max_rows
        if fits and len(tokens):
            served.write_rows(batch.trunk, batch.slots)
        firsts = range(0, len(tokens), served.max_rows)
        for first in firsts:
            part = tokens[first : first + served.max_rows]
            rows = batch.rows[part]
            if not fits:  # SGLang's table has fewer rows than the batch
                pass_rows, rows = np.unique(rows, return_inverse=True)
                served.write_rows(batch.trunk, batch.slots[pass_rows])
            writes, positions = batch.writes[part], batch.positions[part]
            logits = served.decode(batch.tokens[part], positions, writes, rows, adapter_id)
            requested.add(part, logits)
        return len(firsts)


def _select_rows(logits: torch.Tensor, places: Integers64) -> torch.Tensor:
    """Return the rows at `places`, as `logits` itself if they are all rows in order."""
    if np.array_equal(places, np.arange(len(logits))):
        return logits
    return logits[device_index(places.tolist(), logits.device)]
