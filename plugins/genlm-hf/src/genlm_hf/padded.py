"""Execution path `padded`: every context recomputed in padded batches, without a cache.

It supports every decoder-only model and is the reference for faster paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from genlm.plugin import ModelFacts
from genlm.prefix import BatchLimits, Integers64, UncachedPath
from genlm_hf.forward import compute_logits, padded_pass
from genlm_hf.probe import padding_is_safe, sample_ids
from genlm_hf.quantised import is_quantised
from genlm_hf.rope import reset_dynamic_rope
from genlm_hf.served_model import ServedModel

# Kinds of layers that padding on the right does not change. Layers of other kinds may select
# the tokens that they attend to by scores; padding changes the choice between equal scores.
_PADDABLE_LAYERS = {"full_attention", "sliding_attention", "attention", "sliding"}
_PADDABLE_LAYERS |= {"chunked_attention", "linear_attention", "recurrent", "mamba", "conv"}
_PADDABLE_LAYERS |= {"hybrid", "hybrid_sliding", "moe", "mlp", "dense"}


class PaddedPath(UncachedPath):
    """Rows and scores from padded forward passes.

    Attributes:
        by_longest: Whether rotary frequencies depend on the longest sequence of a pass.
        sample_ids: Ids of a short text, with which execution paths are compared.

    Raises:
        ModelLoadError: The model is not a causal language model.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served.vocabulary, BatchLimits(served.max_tokens, served.max_rows))
        self._served = served
        config = served.model.config.get_text_config()
        self.by_longest = ModelFacts.of(config).rope_by_longest
        limit = min(served.embedding_rows, served.vocabulary.size)
        self.sample_ids = sample_ids(served.vocabulary.tokenizer, limit, served.max_context)
        safe = padding_is_safe(self.logits, self.sample_ids, coarse=is_quantised(served.model))
        kinds = set(getattr(config, "layer_types", None) or ())
        if self.by_longest or not safe or not kinds <= _PADDABLE_LAYERS:
            self.limits = dataclasses.replace(self.limits, equal_lengths=True)
            self.scores_by_rows = True

    @property
    def can_mix_lengths(self) -> bool:
        """Whether sequences of different lengths may share a pass."""
        return not self.limits.equal_lengths

    def run(
        self, sequences: Sequence[Sequence[int]], firsts: Integers64
    ) -> Iterator[tuple[Integers64, torch.Tensor]]:
        """Run one pass, or several with few enough logits; see `UncachedPath`."""
        counts = np.array([len(sequence) for sequence in sequences]) - firsts
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.concatenate([np.arange(n) for n in counts]) + firsts[rows]
        requested, max_rows = np.stack([rows, positions]), self.limits.max_rows
        for begin in range(0, requested.shape[1], max_rows):
            part = requested[:, begin : begin + max_rows]
            yield part, self.logits(sequences, part).to(self._served.device)

    def logits(self, sequences: Sequence[Sequence[int]], positions: Integers64) -> torch.Tensor:
        """Run one pass.

        Args:
            sequences: The sequences.
            positions: Indices of sequences, and positions in them, shape `(2, n)`.

        Returns:
            The logits of these positions, shape `(n, width)`, on the device of the model's
            output.
        """
        if self.by_longest:
            reset_dynamic_rope(self._served.model)
        self.count(sequences)
        inputs = padded_pass(self._served, sequences)
        return compute_logits(self._served.model, inputs, *torch.from_numpy(positions))
