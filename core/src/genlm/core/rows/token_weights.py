"""Weights of the tokens of rows: unnormalised probabilities under a mask, bias and temperature.

Weights are computed in the dtype of the rows. Where they underflow, they are computed again
relative to the most likely token that remains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.rows.logits import moved
from genlm.core.rows.row_weights import RowPart
from genlm.core.rows.selection import block_sums

UNDERFLOW = 1e-20
"""A sum of weights below this bound has underflowed in float32."""

_INF = float("inf")


class TokenWeights(NamedTuple):
    """Unnormalised probabilities of tokens."""

    scores: torch.Tensor
    """Log-probabilities plus bias."""
    weights: torch.Tensor
    sums: torch.Tensor
    """`block_sums` of the weights."""
    log_mass: torch.Tensor


def compute_weights(part: RowPart) -> TokenWeights:
    """Compute the weights of the tokens of some rows.

    They are computed with torch's softmax, which is fast for any values; on CPUs the
    exponential of -inf is slow. If the tokens of a mask are so unlikely that their weights
    underflow, the weights are computed again relative to the most likely of these tokens.
    """
    rows = part.rows
    scores = rows if part.bias is None else rows + part.bias
    log_mass = rows.new_zeros(len(rows))
    is_tempered = bool(((part.temperatures != 0) & (part.temperatures != 1)).any())
    has_mass = part.factors is not None or part.bias is not None
    totals = None
    if has_mass or not is_tempered:
        weights = torch.softmax(scores, -1, out=part.memory)
        if part.bias is not None:
            log_mass += scores.amax(-1) - weights.amax(-1).log()  # of the sum of all tokens
        sums = masked_sums(weights, part.factors)
        totals = sums.sum(-1)
        if part.factors is not None:
            shares = totals.log().to(log_mass)
            if part.unrestricted is not None:
                shares.masked_fill_(part.unrestricted, 0.0)
            log_mass += shares
    if is_tempered:
        tempered_scores = relative_scores(scores, part.temperatures)
        weights = torch.softmax(tempered_scores, -1, out=part.memory)
        sums = masked_sums(weights, part.factors)
        tempered_totals = sums.sum(-1)
        totals = tempered_totals if totals is None else torch.minimum(totals, tempered_totals)
    assert totals is not None  # noqa: S101 - one of the two was computed
    has_underflow = ~(totals >= UNDERFLOW)  # NaN if no token is possible
    if has_underflow.any():
        underflown = has_underflow.nonzero()[:, 0]
        places = underflown.to(rows.device)
        possible = masked_scores(scores, part.factors, places)
        log_mass[places] = possible.logsumexp(-1)
        reweight(weights, sums, possible, part.temperatures, underflown)
    if part.offset is not None:
        log_mass += part.offset
    return TokenWeights(scores, weights, sums, log_mass)


def reweight(
    weights: torch.Tensor,
    sums: torch.Tensor,
    scores: torch.Tensor,
    temperatures: npt.NDArray[np.float64],
    rows: torch.Tensor,
) -> None:
    """Compute the weights of some rows in place, relative to the largest of their scores."""
    shifted = relative_scores(scores, temperatures[rows.cpu().numpy()])
    row_weights = shifted.exp_()
    weights[rows.to(weights.device)] = row_weights
    sums[rows] = block_sums(row_weights)


def masked_sums(weights: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Multiply weights by 0 or 1 in place, and return their `block_sums`."""
    if factors is not None:
        weights.mul_(factors)
    return block_sums(weights)


def masked_scores(
    scores: torch.Tensor, factors: torch.Tensor | None, places: torch.Tensor
) -> torch.Tensor:
    """Return scores of some rows, `-inf` outside their masks."""
    if factors is None:
        return scores[places]
    row_factors = factors if len(factors) == 1 else factors[places]
    return scores[places].masked_fill_(row_factors == 0, -_INF)


def relative_scores(
    scores: torch.Tensor, temperatures: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Return scores minus the largest, divided by temperatures; 0 counts as 1."""
    # The bound is for rows without a possible token, which would become NaN.
    largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    shifted = scores - largest
    # Before the division the largest is 0; otherwise all scores could become -inf.
    divisors = np.where(temperatures == 0, 1.0, temperatures)
    device_divisors = moved(torch.from_numpy(divisors).to(shifted.dtype), shifted.device)
    return shifted.div_(device_divisors[:, None])
