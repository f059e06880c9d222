"""Estimates of rejection sampling without replacement, for constraints that test single tokens.

Adaptive weighted rejection sampling (Lipkin et al., 2025, arXiv 2504.05410) draws tokens
without replacement until one is accepted, which then has the distribution of the accepted
tokens. Their mass is estimated from subsequent draws, by the ordered estimates of Des Raj
("Some estimators in sampling with varying probabilities without replacement", 1956).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genlm.constraints.protocol import Flags, Floats, Integers64
from genlm.core.base.arrays import host_array

_LOWEST_TEMPERATURE = 1e-30
"""Temperature of draws in place of 0: the most likely of the remaining tokens is drawn."""


def above_0(temperature: Any) -> Any:
    """Return temperatures of which those below 1e-30 are 1e-30, whose draws are those of 0."""
    values = host_array(temperature, "temperature")
    if values.dtype.kind not in "iuf":
        return temperature  # the draw rejects it
    is_low = (values >= 0) & (values < _LOWEST_TEMPERATURE)
    return np.where(is_low, _LOWEST_TEMPERATURE, values)


def log_mass_ratios(
    logprobs: Floats,
    draw_logprobs: Floats,
    is_accepted: Flags,
    place: Integers64,
    extra: Integers64,
) -> Floats:
    r"""Estimate the mass of the accepted tokens of N members from draws without replacement.

    Let `q` be the distribution of the draws, `A` the set of accepted tokens, and `x` the first
    of the draws `y_1, y_2, ...` in `A`, at place `n`. For each later place `i`,

        t_i = sum(q(y_j) for j < i if y_j in A) + (y_i in A) * (1 - sum(q(y_j) for j < i))

    has the expectation `q(A)` given the draws before: the accepted mass so far, plus the
    remaining mass if a draw from it is accepted. The estimate is the mean of `t_i` over a
    number of places that is fixed at place `n`. It is positive, and its expectation given `x`
    is `q(A)`, so that `x` and its weight are an importance sample of `A`.

    The remaining mass is computed as `q(y_i)` divided by the probability with which `y_i` was
    drawn from it: 1 minus a sum that rounds to 1 would be 0. All terms are relative to `q(x)`,
    which may be too small for a float.

    Args:
        logprobs: `log q` of each draw, up to an addend that is the same for all draws of a
            member, shape `(n, k)`; `-inf` after the last token.
        draw_logprobs: Log-probability of each draw among the remaining tokens, shape `(n, k)`.
        is_accepted: Whether each token is in `A`, shape `(n, k)`; arbitrary after the last
            place that the estimate uses.
        place: Place of `x` among the draws, from 0, shape `(n,)`.
        extra: Number of places after `x` that the estimate uses, shape `(n,)`. Places after
            the last draw have the mass of all accepted tokens.

    Returns:
        Log of the estimate divided by `q(x)`, shape `(n,)`.
    """
    count = logprobs.shape[1]
    relative = logprobs - logprobs[np.arange(len(place)), place][:, None]
    after = np.arange(count) - place[:, None]
    is_used = (after > 0) & (after <= extra[:, None])
    with np.errstate(over="ignore", invalid="ignore"):  # of places that are not used
        accepted = np.where(is_accepted, np.exp(relative), 0.0)
        remaining = np.where(is_used & is_accepted, np.exp(relative - draw_logprobs), 0.0)
    before = np.zeros((len(place), count + 1))
    before[:, 1:] = accepted.cumsum(1)
    total = np.where(is_used, before[:, :-1] + remaining, 0.0).sum(1)
    total += (extra - is_used.sum(1)) * before[:, -1]
    log_ratios: Floats = np.log(total / np.maximum(extra, 1))
    return log_ratios
