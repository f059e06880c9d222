"""Two small forward passes that show whether a model is causal and may be padded.

Configs state neither, so the model is run once when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from genlm.plugin import ModelLoadError
from genlm.prefix import Integers64

Logits = Callable[[Sequence[Sequence[int]], Integers64], torch.Tensor]
"""Function of sequences, and of sequences and positions in them, shape `(2, n)`; returns the
logits of the latter, shape `(n, width)`."""

_TEXT = "Once upon a time, the 3 quick foxes ran home."
_MAX_IDS = 9

# In total variation: far above rounding, far below the effect of one leaked token.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE_TOLERANCE = 0.1


def sample_ids(tokenizer: object, limit: int, max_ids: int | None) -> list[int]:
    """Return a few ids of ordinary text (no images' placeholders), all below `limit`."""
    encode = getattr(tokenizer, "encode")  # noqa: B009 - tokenizers share no base class
    encoded = encode(_TEXT)
    ids = [i for i in getattr(encoded, "ids", encoded) if i < limit]
    if len(set(ids)) < 4:
        ids = [i % limit for i in range(_MAX_IDS)]
    return ids[: min(_MAX_IDS, max_ids or _MAX_IDS)]


def padding_is_safe(logits: Logits, ids: Sequence[int], *, coarse: bool = False) -> bool:
    """Whether a row stays the same when its sequence is padded on the right.

    Args:
        logits: Runs the model.
        ids: A sequence of at least one token.
        coarse: Whether the model rounds more than the dtype of its logits.

    Raises:
        ModelLoadError: The row also depends on tokens that come later, so the
            model is not a causal language model (BERT without `is_decoder`, XLNet);
            or it does not run on token ids alone.
    """
    end = max(len(ids) // 2 - 1, 0)
    start = ids[: end + 1]
    try:
        unbatched = logits([start], np.array([[0], [end]]))
        padded, continued = logits([start, ids], np.array([[0, 1], [end, end]]))[:, None]
    except Exception as error:
        raise ModelLoadError(
            f"a first forward pass over {len(ids)} tokens raised {type(error).__name__}: "
            f"{error}; the model must accept token ids as its only input, and the device needs "
            f"memory for the pass"
        ) from error
    tolerance = (
        _COARSE_TOLERANCE if coarse else _TOLERANCE.get(unbatched.dtype, _COARSE_TOLERANCE)
    )
    if _total_variation(unbatched, continued) > tolerance:
        raise ModelLoadError(
            "its prediction after a token changes with the tokens that follow, so it is not "
            "a causal language model; use a decoder-only model (a BERT-like checkpoint "
            'trained as a decoder needs hf_opts={"is_decoder": True}). Layers that quantise '
            "activations with one scale for all tokens, such as those of torch's "
            "quantize_dynamic in int8, have the same effect; quantise weights only, or "
            "activations with a scale for each token"
        )
    return _total_variation(unbatched, padded) <= tolerance


def _total_variation(left: torch.Tensor, right: torch.Tensor) -> float:
    difference = left.float().softmax(-1) - right.float().softmax(-1)
    return float(difference.abs().sum()) / 2
