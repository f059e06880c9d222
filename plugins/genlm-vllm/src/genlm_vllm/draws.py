"""Drawing tokens from rows, reproducibly under any batching.

The k-th token of a continuation is decided by its seed, k and its row alone, never by a
generator's state: prompts in chunks, pre-emption and other requests change nothing, and
all ranks of a model that is split over several devices draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["drawn_tokens", "uniform"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, place: int) -> float:
    """Return the number at a place of a seed's stream, uniform in [0, 1).

    SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
    2014), which can be entered at any place.
    """
    state = (seed + (place + 1) * _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((state ^ (state >> 31)) >> 11) / 2**53


def drawn_tokens(
    rows: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> torch.Tensor:
    """Draw one token from each row by inverting its distribution function.

    Args:
        rows: Natural-log probabilities, shape `(n, vocab_size)`.
        temperatures: Divide the log-probabilities; 0 takes the most likely token.
        uniforms: Numbers in [0, 1), one for each row.

    Returns:
        Token ids, shape `(n,)`, int64, on the device of `rows`.
    """
    greedy = rows.argmax(dim=-1)
    if not any(temperatures):
        return greedy
    divisor = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)
    # The largest becomes 0 before the division, which could take all of them to -inf.
    shifted = rows.double() - rows.max(dim=-1, keepdim=True).values.double()
    scaled = shifted / divisor.to(rows.device)[:, None]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # A multiple of 2**-53 below 1 times the total is below the total, rounded too.
    place = torch.tensor(uniforms, dtype=torch.float64, device=rows.device)[:, None] * total
    drawn = torch.searchsorted(cumulative, place, right=True)[:, 0]
    is_greedy = torch.tensor([t == 0 for t in temperatures], device=rows.device)
    return torch.where(is_greedy, greedy, drawn)
