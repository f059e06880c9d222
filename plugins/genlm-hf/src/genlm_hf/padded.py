"""Execution path `padded`: every context recomputed in padded batches, without a cache.

It supports every decoder-only model and is the reference for faster paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from genlm.plugin import ModelFacts
from genlm.prefix import BatchLimits, PieceScores, ScoredText, UncachedPath
from genlm_hf.forward import padded_pass, taken_logits
from genlm_hf.pieces import OutputPieces
from genlm_hf.probe import padding_is_safe, sample_ids
from genlm_hf.quantised import is_quantised
from genlm_hf.rope import forget_longest
from genlm_hf.served_model import ServedModel

__all__ = ["PaddedPath"]

# Kinds of layers that padding on the right does not change. Others may choose the tokens
# that they attend to by scores, of which many are equal, and padding decides between them.
_PADDABLE_LAYERS = {"full_attention", "sliding_attention", "attention", "sliding"}
_PADDABLE_LAYERS |= {"chunked_attention", "linear_attention", "recurrent", "mamba", "conv"}
_PADDABLE_LAYERS |= {"hybrid", "hybrid_sliding", "moe", "mlp", "dense"}


class PaddedPath(UncachedPath):
    """Rows and scores from padded forward passes.

    Attributes:
        by_longest: Whether rotary frequencies depend on the longest sequence of a pass.

    Raises:
        ModelLoadError: The model is not a causal language model.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served.vocabulary, BatchLimits(served.max_tokens, served.max_rows))
        self._served, self._pieces = served, OutputPieces(served)
        config = served.model.config.get_text_config()
        self.by_longest = ModelFacts.of(config).rope_by_longest
        ids = sample_ids(
            served.vocabulary.tokenizer,
            min(served.embedding_rows, served.vocabulary.size),
            served.max_context,
        )
        safe = padding_is_safe(self.logits, ids, coarse=is_quantised(served.model))
        kinds = set(getattr(config, "layer_types", None) or ())
        if self.by_longest or not safe or not kinds <= _PADDABLE_LAYERS:
            self.limits = dataclasses.replace(self.limits, equal_lengths=True)
            self.scores_by_rows = True

    @property
    def pads(self) -> bool:
        """Whether sequences of different lengths may share a pass."""
        return not self.limits.equal_lengths

    def batch_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run one pass and return the logits after each sequence, on the model's device."""
        return self.logits(sequences).to(self._served.device)

    def logits(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run one pass; return logits at one position of each sequence, by default the last."""
        if self.by_longest:
            forget_longest(self._served.model)
        last = [len(sequence) - 1 for sequence in sequences]
        kept = torch.tensor(last if positions is None else positions)

        def take(states: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(len(kept), device=states.device)
            return states[rows, kept.to(states.device)][:, None]

        work = padded_pass(self._served, sequences)
        logits = taken_logits(self._served.model, work, take)[:, 0]
        self.count(sequences)
        return logits

    def score_limits(self) -> BatchLimits:
        """Return limits of the positions of a pass whose logits are in memory together."""
        if self._pieces.are_small:
            return self.limits
        most = min(self.limits.max_tokens, self.limits.max_rows)
        return dataclasses.replace(self.limits, max_tokens=most)

    def score_batch(self, texts: Sequence[tuple[ScoredText, int]], scores: PieceScores) -> None:
        """Run one pass over texts and score them."""
        sequences = [text.sequence.token_ids for text, _ in texts]
        work = padded_pass(self._served, sequences)
        places, keys = [], []
        for row, (text, first_key) in enumerate(texts):
            count = len(text.targets)
            places.append(row * work.shape[1] + text.first + np.arange(count))
            keys.append(first_key + np.arange(count))
        kept, known = torch.from_numpy(np.concatenate(places)), np.concatenate(keys)

        def take(states: torch.Tensor) -> torch.Tensor:
            return states.flatten(0, 1)[kept.to(states.device)][None]

        self._pieces.compute(work, take, lambda part, logits: scores.add(known[part], logits))
        self.count(sequences)
