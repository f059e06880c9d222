"""Execution path `padded`: every context anew, in padded batches, without a cache.

It supports every decoder-only model and is the reference for faster paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from genlm.plugin import rows_from_logits
from genlm.prefix import BatchLimits, plan_batches
from genlm_hf.forward import next_logits
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
    """Rows from padded forward passes; an `ExecutionPath`.

    Raises:
        ModelLoadError: The model is not a causal language model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
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
    def pads(self) -> bool:
        """Whether sequences of different lengths may share a pass."""
        return not self._limits.equal_lengths

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:  # noqa: ARG002 - see ExecutionPath
        """Compute rows in as few passes as the limits allow, similar lengths together."""
        vocabulary = self._served.vocabulary
        rows = torch.empty((len(sequences), vocabulary.size), device=self._served.device)
        for batch in plan_batches([len(sequence) for sequence in sequences], self._limits):
            logits = self.logits([sequences[i] for i in batch])
            rows[batch] = rows_from_logits(logits, vocabulary).to(rows.device)
        return rows

    def next_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see ExecutionPath
        sequences: Sequence[tuple[int, ...]],
    ) -> Sequence[int]:
        """Choose the first and those that share its pass when all are computed."""
        batches = plan_batches([len(sequence) for sequence in sequences], self._limits)
        return next(batch for batch in batches if 0 in batch)

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
        tokens = sum(map(len, sequences))
        self._forwards += 1
        self._tokens_computed += tokens
        self._tokens_padded += len(sequences) * max(map(len, sequences)) - tokens
        return logits

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of tokens of contexts, of padding, and of passes."""
        return {
            "tokens_computed": self._tokens_computed,
            "tokens_padded": self._tokens_padded,
            "forwards": self._forwards,
        }
