"""Drawing many different tokens from each row by the Gumbel-top-k trick.

The k largest of `log(weight) + noise`, with independent standard Gumbel noise, in descending
order, are draws without replacement in proportion to the weights (Kool, van Hoof, Welling:
"Stochastic beams and where to find them", 2019). The time does not depend on k, while
`inversion` passes over each row for every draw.
"""

from __future__ import annotations

import torch

from genlm.core.rows.logits import moved

# SplitMix64, as in `sampling`, with the constants as signed integers.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def gumbel_top_k(
    scores: torch.Tensor, numbers: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw k different ids from each row.

    Args:
        scores: Logs of weights, shape `(n, ids)`, float64; `-inf` for ids that are not drawn.
        numbers: A random number of each row in [0, 1), shape `(n,)`, float64, in main memory.
            The noise of an id depends on this number and the id, not on k.
        k: From 1 to the number of ids.

    Returns:
        Ids in the order of the draws, and the log of the share of each in the weights that
        remained, both of shape `(n, k)`; NaN or `-inf` if no weight remained.
    """
    seeds = moved((numbers * 2**53).long(), scores.device)
    ids = (scores - _log_exponentials(seeds, scores.shape[1])).topk(k).indices
    drawn = scores.gather(1, ids)
    others = scores.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    # The weight that remains at each draw: of this token, of later ones, and of the others.
    later = torch.cat([others, drawn.flip(1)], 1).logcumsumexp(1)[:, 1:].flip(1)
    return ids, drawn - later


def _log_exponentials(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """Return logs of `count` exponential variates of each seed: negative Gumbel noise."""
    positions = torch.arange(1, count + 1, device=seeds.device)
    words = seeds[:, None] + positions * _GOLDEN_GAMMA
    words = words.bitwise_xor_(_shifted(words, 30)).mul_(_FACTORS[0])
    words = words.bitwise_xor_(_shifted(words, 27)).mul_(_FACTORS[1])
    words = words.bitwise_xor_(_shifted(words, 31))
    # Above 0 and, except for one of 2**53 numbers, below 1.
    uniforms = _shifted(words, 11).double().add_(0.5).mul_(2.0**-53)
    return uniforms.log_().neg_().log_()


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shift 64-bit words to the right, with zeros from the left."""
    return (words >> count).bitwise_and_(2 ** (64 - count) - 1)
