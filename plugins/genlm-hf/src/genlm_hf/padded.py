"""Execution path `padded`: every context recomputed in padded batches, without a cache.

It supports every decoder-only model and is the reference for faster paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from genlm.plugin import rows_from_logits
from genlm.prefix import BatchLimits, PieceScores, ScoredText, TextResult, plan_batches
from genlm_hf.forward import next_logits, padded_inputs
from genlm_hf.pieces import OutputPieces
from genlm_hf.probe import padding_is_safe, sample_ids
from genlm_hf.quantised import is_quantised
from genlm_hf.rope import depends_on_longest, forget_longest
from genlm_hf.served_model import ServedModel

__all__ = ["PaddedPath"]

# Kinds of layers that padding on the right does not change. Others may choose the tokens
# that they attend to by scores, of which many are equal, and padding decides between them.
_PADDABLE_LAYERS = {"full_attention", "sliding_attention", "attention", "sliding"}
_PADDABLE_LAYERS |= {"chunked_attention", "linear_attention", "recurrent", "mamba", "conv"}
_PADDABLE_LAYERS |= {"hybrid", "hybrid_sliding", "moe", "mlp", "dense"}


class PaddedPath:
    """Rows and scores from padded forward passes; a `ScoringPath`.

    Raises:
        ModelLoadError: The model is not a causal language model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served, self._pieces = served, OutputPieces(served)
        config = served.model.config.get_text_config()
        self._by_longest = depends_on_longest(config)
        kinds = set(getattr(config, "layer_types", None) or ())
        self._forwards = self._tokens_computed = self._tokens_padded = 0
        ids = sample_ids(
            served.vocabulary.tokenizer,
            min(served.embedding_rows, served.vocabulary.size),
            served.max_context,
        )
        safe = padding_is_safe(self.logits, ids, coarse=is_quantised(served.model))
        self._limits = BatchLimits(
            max_tokens=served.max_tokens,
            max_rows=served.max_rows,
            equal_lengths=self._by_longest or not safe or not kinds <= _PADDABLE_LAYERS,
        )

    @property
    def can_score(self) -> bool:
        """Whether it scores texts."""
        return True

    @property
    def pads(self) -> bool:
        """Whether sequences of different lengths may share a pass."""
        return not self._limits.equal_lengths

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:  # noqa: ARG002 - see ExecutionPath
        """Compute rows in as few passes as the limits allow, similar lengths together."""
        vocabulary = self._served.vocabulary
        batches = list(plan_batches([len(sequence) for sequence in sequences], self._limits))
        if len(batches) == 1:
            rows = rows_from_logits(self.logits(sequences), vocabulary)
            return rows.to(self._served.device)
        rows = torch.empty((len(sequences), vocabulary.size), device=self._served.device)
        for batch in batches:
            logits = self.logits([sequences[i] for i in batch])
            rows[batch] = rows_from_logits(logits, vocabulary).to(rows.device)
        return rows

    def next_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see ExecutionPath
        sequences: Sequence[tuple[int, ...]],
    ) -> Sequence[int]:
        """Choose the first context and those that share its pass."""
        batches = plan_batches([len(sequence) for sequence in sequences], self._limits)
        return next(batch for batch in batches if 0 in batch)

    def scores(
        self,
        adapter: str | None,
        texts: Sequence[ScoredText],
    ) -> list[TextResult]:
        """Score texts in few passes; where a row depends on the length, by rows."""
        scores = PieceScores(texts, self._served.vocabulary)
        if self.pads:
            lengths = [len(text.sequence) for text in texts]
            for batch in plan_batches(lengths, self._score_limits()):
                chosen = [(texts[i], int(scores.ends[i])) for i in batch]
                self._score_pass(chosen, scores)
        else:
            for text, first in zip(texts, scores.ends, strict=False):
                self._score_by_rows(adapter, text, int(first), scores)
        return scores.results()

    def next_score_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see ScoringPath
        texts: Sequence[ScoredText],
    ) -> Sequence[int]:
        """Choose the first text and those that share its pass; only it if rows score it."""
        if not self.pads:
            return [0]
        lengths = [len(text.sequence) for text in texts]
        return next(batch for batch in plan_batches(lengths, self._limits) if 0 in batch)

    def _score_limits(self) -> BatchLimits:
        if self._pieces.are_small:
            return self._limits
        most = min(self._served.max_tokens, self._served.max_rows)
        return dataclasses.replace(self._limits, max_tokens=most)

    def _score_pass(self, texts: Sequence[tuple[ScoredText, int]], scores: PieceScores) -> None:
        """Run one pass over texts and score them.

        Args:
            texts: Texts, and the key of the first target of each.
            scores: Receives the logits; their keys continue the first key of each text.
        """
        sequences = [text.sequence.token_ids for text, _ in texts]
        inputs, shape = padded_inputs(
            self._served.model,
            sequences,
            pad_id=self._served.pad_id,
            device=self._served.device,
        )
        places, keys = [], []
        for row, (text, first_key) in enumerate(texts):
            count = len(text.targets)
            places.append(row * shape[1] + text.first + np.arange(count))
            keys.append(first_key + np.arange(count))
        kept = torch.from_numpy(np.concatenate(places)).to(self._served.device)
        known = np.concatenate(keys)

        def take(states: torch.Tensor) -> torch.Tensor:
            return states.flatten(0, 1)[kept.to(states.device)][None]

        self._pieces.compute(
            inputs, shape, take, lambda part, logits: scores.add(known[part], logits)
        )
        self._count(sequences)

    def _score_by_rows(
        self, adapter: str | None, text: ScoredText, first_key: int, scores: PieceScores
    ) -> None:
        """Score one text by the rows of its prefixes."""
        ids = text.sequence.token_ids
        for begin in range(0, len(text.targets), self._served.max_rows):
            end = min(begin + self._served.max_rows, len(text.targets))
            lengths = range(text.first + 1 + begin, text.first + 1 + end)
            rows = self.rows(adapter, [ids[:length] for length in lengths])
            scores.add(first_key + np.arange(begin, end), rows)

    def logits(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run one pass; return logits at one position of each sequence, by default the last."""
        if self._by_longest:
            forget_longest(self._served.model)
        logits = next_logits(
            self._served.model,
            sequences,
            pad_id=self._served.pad_id,
            device=self._served.device,
            positions=positions,
        )
        self._count(sequences)
        return logits

    def _count(self, sequences: Sequence[Sequence[int]]) -> None:
        tokens = sum(map(len, sequences))
        self._forwards += 1
        self._tokens_computed += tokens
        self._tokens_padded += len(sequences) * max(map(len, sequences)) - tokens

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of tokens of contexts, of padding, and of passes."""
        return {
            "tokens_computed": self._tokens_computed,
            "tokens_padded": self._tokens_padded,
            "forwards": self._forwards,
        }
