"""Estimates of rejection sampling without replacement, for constraints that test single tokens.

Adaptive weighted rejection sampling (Lipkin et al., 2025, arXiv 2504.05410) draws tokens
without replacement until one is accepted, which then has the distribution of the accepted
tokens. Their mass is estimated from subsequent draws, by the ordered estimates of Des Raj
("Some estimators in sampling with varying probabilities without replacement", 1956).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from genlm.constraints.protocol import Flags, Floats, Integers64

__all__ = ["Estimates", "estimates"]


class Estimates(NamedTuple):
    """Estimates for N members.

    Attributes:
        log_probability: Log of the probability of the accepted token among all tokens.
        log_mass: Log of the estimated mass of the accepted tokens; `-inf` if no token was
            accepted.
    """

    log_probability: Floats
    log_mass: Floats


def estimates(
    draw_logprobs: Floats, is_accepted: Flags, place: Integers64, extra: Integers64
) -> Estimates:
    r"""Estimate the mass of the accepted tokens of N members from draws without replacement.

    Let `q` be the distribution of the draws, `A` the set of accepted tokens, and `x` the first
    of the draws `y_1, y_2, ...` in `A`, at place `n`. For each later place `i`,

        t_i = sum(q(y_j) for j < i if y_j in A) + (y_i in A) * (1 - sum(q(y_j) for j < i))

    has the expectation `q(A)` given the draws before: the accepted mass so far, plus the
    remaining mass if a draw from it is accepted. The estimate is the mean of `t_i` over a
    number of places that is fixed at place `n`. It is positive, and its expectation given `x`
    is `q(A)`, so that `x` and its weight are an importance sample of `A`.

    Args:
        draw_logprobs: Log-probability of each draw among the remaining tokens, shape `(n, k)`;
            `-inf` after the last token.
        is_accepted: Whether each token is in `A`, shape `(n, k)`; arbitrary after the last
            place that the estimate uses.
        place: Place of `x` among the draws, from 0, shape `(n,)`; -1 if no token is in `A`.
        extra: Number of places after `x` that the estimate uses, shape `(n,)`. Places after
            the last draw have the mass of all accepted tokens.
    """
    count = draw_logprobs.shape[1]
    with np.errstate(divide="ignore"):
        log_remaining, before = np.zeros((2, len(place), count + 1))  # before each place
        log_remaining[:, 1:] = np.log(-np.expm1(np.minimum(draw_logprobs, 0.0))).cumsum(1)
        logprobs = draw_logprobs + log_remaining[:, :-1]
        before[:, 1:] = (is_accepted * np.exp(logprobs)).cumsum(1)
        after = np.arange(count) - place[:, None]
        is_used = (after > 0) & (after <= extra[:, None])
        terms = before[:, :-1] + is_accepted * np.exp(log_remaining[:, :-1])
        total = (is_used * terms).sum(1) + (extra - is_used.sum(1)) * before[:, -1]
        log_mass = np.where(place < 0, -np.inf, np.log(total / np.maximum(extra, 1)))
    log_probability = logprobs[np.arange(len(place)), np.maximum(place, 0)]
    return Estimates(log_probability, log_mass)
