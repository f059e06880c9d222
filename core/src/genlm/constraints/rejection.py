"""Rejection sampling without replacement, for constraints that test single tokens.

Adaptive weighted rejection sampling (Lipkin et al., 2025, arXiv 2504.05410) draws tokens
without replacement until one is accepted, which then has the distribution of the accepted
tokens. Their mass is estimated from subsequent draws, by the ordered estimates of Des Raj
("Some estimators in sampling with varying probabilities without replacement", 1956).
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
    r"""The draws of one member, until a token is accepted and the mass is estimated.

    Let `q` be the distribution of the draws, `A` the set of accepted tokens, and `x` the first
    of the draws `y_1, y_2, ...` in `A`, at place `n`. For each later place `i`,

        t_i = sum(q(y_j) for j < i if y_j in A) + (y_i in A) * (1 - sum(q(y_j) for j < i))

    has the expectation `q(A)` given the draws before: the accepted mass so far, plus the
    remaining mass if a draw from it is accepted. The estimate is the mean of `t_i` over a
    number of places that is fixed at place `n`. It is positive, and its expectation given `x`
    is `q(A)`, so that `x` and its weight are an importance sample of `A`.

    Args:
        extra: Number of draws after `x` that the estimate uses, at least 1.
    """

    def __init__(self, extra: int) -> None:
        self._extra = extra
        self._left = 0.0  # log of the remaining mass of q
        self._accepted = 0.0  # q of the accepted tokens so far
        self._estimates: list[float] = []
        self.place: int | None = None
        """Place of `x` among the draws; None before `x` is drawn."""
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
        """Record the next draw.

        Args:
            draw_logprob: Log-probability of the token among the remaining tokens.
            at_hand: Number of further draws that are already available. If there are any, the
                estimate uses only these.
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
        """Record that no token remains: the accepted tokens are the whole of `A`."""
        if self.place is not None and not self.is_over:
            self._estimates += [self._accepted] * (self._extra - len(self._estimates))
        self.is_over = True
