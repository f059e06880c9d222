"""From logits to rows: the one rule that every engine follows.

A row is natural-log probabilities over the vocabulary, float32, normalised.
Models often have more logits than the tokenizer has ids (embeddings padded to a
round number) and sometimes fewer (tokens added to the tokenizer only).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from genlm.core.vocab import Vocabulary

__all__ = ["rows_from_logits"]

_missing: WeakKeyDictionary[Vocabulary, dict[tuple[int, torch.device], torch.Tensor]]
_missing = WeakKeyDictionary()


def rows_from_logits(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Normalise logits over exactly the ids that the vocabulary has.

    Logits beyond the vocabulary, and those of ids that no token has, are cut
    before normalising; ids without logits get `-inf`.

    Args:
        logits: Shape `(n, width)`, any floating dtype, any device.
        vocabulary: Decides the width of the result.

    Returns:
        Natural-log probabilities, shape `(n, vocabulary.size)`, float32, on the
        device of `logits`, each row's `logsumexp` 0. Never aliases `logits`.

    Raises:
        ValueError: `logits` are not rows of numbers.
    """
    if logits.ndim != 2:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)}; expected rows of them, (n, width)"
        )
    size = vocabulary.size
    kept = logits[:, :size].float()
    if vocabulary.missing_ids:
        index = _missing_index(vocabulary, kept.shape[1], kept.device)
        kept = kept.index_fill(1, index, float("-inf"))
    rows = torch.log_softmax(kept, dim=-1)
    if rows.shape[1] == size:
        return rows
    padded = rows.new_full((rows.shape[0], size), float("-inf"))
    padded[:, : rows.shape[1]] = rows
    return padded


def _missing_index(vocabulary: Vocabulary, width: int, device: torch.device) -> torch.Tensor:
    """Return the ids below `width` that no token has, copied to each device once."""
    known = _missing.setdefault(vocabulary, {})
    if (width, device) not in known:
        missing = [token_id for token_id in vocabulary.missing_ids if token_id < width]
        with torch.inference_mode(False):  # later calls may compute gradients
            index = torch.tensor(missing, dtype=torch.long, device=device)
        known[width, device] = index
    return known[width, device]
