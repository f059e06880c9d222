"""Rejection sampling without replacement, for constraints that test single tokens.

Adaptive weighted rejection sampling (Lipkin et al., 2025, arXiv 2504.05410) draws tokens
without replacement until one is accepted, which then has the distribution of the accepted
tokens. Their mass is estimated from subsequent draws, by the ordered estimates of Des Raj
("Some estimators in sampling with varying probabilities without replacement", 1956).
"""

from __future__ import annotations

import numpy as np

from genlm.constraints.protocol import Flags, Floats, Integers64

__all__ = ["Rejection"]


class Rejection:
    r"""The draws of N members, each until a token is accepted and the mass is estimated.

    Let `q` be the distribution of the draws, `A` the set of accepted tokens, and `x` the first
    of the draws `y_1, y_2, ...` in `A`, at place `n`. For each later place `i`,

        t_i = sum(q(y_j) for j < i if y_j in A) + (y_i in A) * (1 - sum(q(y_j) for j < i))

    has the expectation `q(A)` given the draws before: the accepted mass so far, plus the
    remaining mass if a draw from it is accepted. The estimate is the mean of `t_i` over a
    number of places that is fixed at place `n`. It is positive, and its expectation given `x`
    is `q(A)`, so that `x` and its weight are an importance sample of `A`.

    Args:
        size: Number of members.
        extra: Number of draws after `x` that the estimate uses, at least 1.

    Attributes:
        is_over: Whether a member needs no further draw.
        count: Number of draws of each member so far.
        place: Place of `x` among the draws; -1 before `x` is drawn.
        log_probability: Log of `q(x)`.
    """

    def __init__(self, size: int, extra: int) -> None:
        self.is_over = np.zeros(size, np.bool_)
        self.count = np.zeros(size, np.int64)
        self.place = np.full(size, -1)
        self.log_probability = np.zeros(size)
        self._extra = np.full(size, extra)
        self._left = np.zeros(size)  # log of the remaining mass of q
        self._accepted = np.zeros(size)  # q of the accepted tokens so far
        self._sum = np.zeros(size)  # of the estimates
        self._places = np.zeros(size, np.int64)  # number of the estimates

    @property
    def log_mass(self) -> Floats:
        """Log of the estimate of `q(A)`; `-inf` if no token was accepted."""
        with np.errstate(divide="ignore"):
            found: Floats = np.log(self._sum / np.maximum(self._places, 1))
        return found

    def add(
        self, members: Integers64, draw_logprobs: Floats, is_accepted: Flags, at_hand: int
    ) -> None:
        """Record the next draw of members that are not over.

        Args:
            members: The members.
            draw_logprobs: Log-probability of each token among the remaining tokens.
            is_accepted: Whether each token is in `A`.
            at_hand: Number of further draws that are already available. If there are any, the
                estimate uses only these.
        """
        left, has_x = self._left[members], self.place[members] >= 0
        logprobs = draw_logprobs + left
        estimates = self._accepted[members] + is_accepted * np.exp(left)
        self._sum[members] += has_x * estimates
        self._places[members] += has_x
        first = members[is_accepted & ~has_x]
        self.place[first] = self.count[first]
        self.log_probability[first] = logprobs[is_accepted & ~has_x]
        if at_hand:
            self._extra[first] = np.minimum(self._extra[first], at_hand)
        self._accepted[members] += is_accepted * np.exp(logprobs)
        with np.errstate(divide="ignore"):
            self._left[members] += np.log(-np.expm1(np.minimum(draw_logprobs, 0.0)))
        self.count[members] += 1
        self.is_over[members] = self._places[members] >= self._extra[members]

    def end(self, members: Integers64) -> None:
        """Record that no token of members remains: the accepted tokens are the whole of `A`."""
        rest = np.where(self.place[members] >= 0, self._extra[members], 0)
        self._sum[members] += (rest - self._places[members]) * self._accepted[members]
        self._places[members] = rest
        self.is_over[members] = True
