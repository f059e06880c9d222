"""Draws from tokens that only a test knows: rejection without replacement.

Adaptive weighted rejection sampling (Lipkin et al., 2025, arXiv 2504.05410) draws tokens
without replacement until one is accepted, which then has the distribution of the accepted
ones. The mass of the accepted tokens is estimated from draws that follow, by the ordered
estimates of Des Raj ("Some estimators in sampling with varying probabilities without
replacement", 1956).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Rejection"]

Flags: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Integers64: TypeAlias = npt.NDArray[np.int64]


class Rejection:
    r"""The draws of one member, in order, until a token is accepted and its mass is estimated.

    Let `q` be the distribution that is drawn from, `A` the accepted tokens, and `x` the first
    of the draws `y_1, y_2, ...` that is in `A`, at place `n`. For each later place `i`,

        t_i = sum(q(y_j) for j < i if y_j in A) + (y_i in A) * (1 - sum(q(y_j) for j < i))

    has the expectation `q(A)` given the draws before: the mass that was found, and that of
    what is left times whether a draw from it is accepted. The estimate is the mean of `t_i`
    over a number of places that is known at place `n`. It is above 0, and its expectation is
    `q(A)` whatever `x` is, so that `x` and its weight are an importance sample of `A`.

    Args:
        extra: Number of draws after `x` that the estimate uses, at least 1.
    """

    def __init__(self, extra: int) -> None:
        self._extra = extra
        self._left = 0.0  # log of what the tokens so far leave of q
        self._accepted = 0.0  # q of the accepted tokens so far
        self._estimates: list[float] = []
        self.place: int | None = None
        """The place of `x` among the draws; None until it is found."""
        self.is_over = False
        """Whether no further draw is needed."""
        self.log_probability = 0.0
        """Log of `q(x)`."""
        self.count = 0
        """Number of draws so far."""

    @property
    def log_mass(self) -> float:
        """Log of the estimate of `q(A)`; `-inf` if no token was accepted."""
        return float(np.log(np.mean(self._estimates))) if self._estimates else -np.inf

    def add(self, draw_logprob: float, at_hand: int, *, is_accepted: bool) -> None:
        """Take the next draw into account.

        Args:
            draw_logprob: The log-probability of the token among those that were left.
            at_hand: Number of later draws that cost nothing. If there are any, the estimate
                uses no others.
            is_accepted: Whether the token is in `A`.
        """
        logprob, left = draw_logprob + self._left, float(np.exp(self._left))
        if self.place is not None:
            self._estimates.append(self._accepted + is_accepted * left)
        elif is_accepted:
            self.place, self.log_probability = self.count, logprob
            self._extra = min(self._extra, at_hand) or self._extra
        self._accepted += is_accepted * float(np.exp(logprob))
        share = min(draw_logprob, 0.0)
        self._left += float(np.log(-np.expm1(share))) if share < 0 else -np.inf
        self.count += 1
        self.is_over = len(self._estimates) >= self._extra

    def end(self) -> None:
        """Say that no token is left: what was accepted is all there is."""
        if self.place is not None and not self.is_over:
            self._estimates += [self._accepted] * (self._extra - len(self._estimates))
        self.is_over = True
