"""Rejection sampling without replacement, for constraints that test single tokens.

Adaptive weighted rejection sampling (Lipkin et al., 2025, arXiv 2504.05410) draws tokens
without replacement until one is accepted, which then has the distribution of the accepted
tokens. Their mass is estimated from subsequent draws, by the ordered estimates of Des Raj
("Some estimators in sampling with varying probabilities without replacement", 1956).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from genlm.constraints.protocol import Flags, Floats, Integers64
from genlm.core.base.arrays import host_array
from genlm.core.rows.draws import DrawnTokens

if TYPE_CHECKING:
    from genlm.constraints.predicate import PythonConstraint
    from genlm.core.model.draw_settings import DrawSettings

_LOWEST_TEMPERATURE = 1e-30
"""Temperature of draws in place of 0: the most likely of the remaining tokens is drawn."""

_MAX_FIRST_DRAWS = 32
"""Maximum number of tokens drawn in the first round of a step."""


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
    extra: int,
) -> Floats:
    r"""Estimate the mass of the accepted tokens of N members from draws without replacement.

    Let `q` be the distribution of the draws, `A` the set of accepted tokens, and `x` the first
    of the draws `y_1, y_2, ...` in `A`, at place `n`. For each later place `i`,

        t_i = sum(q(y_j) for j < i if y_j in A) + (y_i in A) * (1 - sum(q(y_j) for j < i))

    has the expectation `q(A)` given the draws before: the accepted mass so far, plus the
    remaining mass if a draw from it is accepted. The estimate is the mean of `t_i` over the
    next `extra` places. It is positive, and its expectation given `x`
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
        extra: Number of places after `x` that the estimate uses. Places after the last draw
            have the mass of all accepted tokens.

    Returns:
        Log of the estimate divided by `q(x)`, shape `(n,)`.
    """
    count = logprobs.shape[1]
    relative = logprobs - logprobs[np.arange(len(place)), place][:, None]
    after = np.arange(count) - place[:, None]
    is_used = (after > 0) & (after <= extra)
    with np.errstate(over="ignore", invalid="ignore"):  # of places that are not used
        accepted = np.where(is_accepted, np.exp(relative), 0.0)
        remaining = np.where(is_used & is_accepted, np.exp(relative - draw_logprobs), 0.0)
    before = np.zeros((len(place), count + 1))
    before[:, 1:] = accepted.cumsum(1)
    total = np.where(is_used, before[:, :-1] + remaining, 0.0).sum(1)
    total += (extra - is_used.sum(1)) * before[:, -1]
    log_ratios: Floats = np.log(total / extra)
    return log_ratios


class _Tests(NamedTuple):
    """Test results of the draws of M members.

    Attributes:
        is_accepted: Whether each draw is accepted, shape `(m, k)`; False if it is not tested.
        place: Place of the first accepted draw, shape `(m,)`; -1 if no draw is accepted.
        unfinished: Places, among the M members, of those that need more draws.
    """

    is_accepted: Flags
    place: Integers64
    unfinished: Integers64


class Search:
    """The draws of one step for all members, until each has an accepted token.

    Args:
        constraint: Tests tokens.
        settings: Settings of the first round.

    Attributes:
        settings: Settings of the next round: the active members are those that need draws.
        is_cancelled: Whether the draw was cancelled.
    """

    def __init__(self, constraint: PythonConstraint, settings: DrawSettings) -> None:
        self.settings = settings
        self.is_cancelled = False
        self._constraint = constraint
        self._extra = constraint.language.extra_draws
        self._tested = 0  # draws of each active member
        self._needed = 0  # draws of the member that needed most of them
        # The columns of the result; a member without a token keeps these values.
        size = len(settings.log_mass)
        self._token_ids = np.full(size, -1)
        self._logprobs = settings.log_mass.astype(np.float64)
        self._logprobs[settings.active] = -np.inf
        self._log_mass, self._draw_logprobs = self._logprobs.copy(), np.zeros(size)

    def take(self, drawn: DrawnTokens) -> DrawnTokens | None:
        """Test the draws of active members, in order.

        Args:
            drawn: Draws without replacement, which begin with those passed before.

        Returns:
            The accepted tokens with their weights, for which `advance` is prepared; None if a
            member needs more draws.
        """
        constraint, minimum = self._constraint, 1 + self._extra
        members = self.settings.active
        tests = self._tests(members, drawn.token_ids.numpy()[members])
        self._tested = drawn.token_ids.shape[1]
        self._needed = max(self._needed, int(tests.place.max(initial=-1)) + minimum)
        self.settings = self.settings._replace(active=members[tests.unfinished])
        self._store(members, drawn, tests)
        if tests.unfinished.size:
            return None
        # A few more cost less than another round.
        first_draws = min(self._needed + self._extra, _MAX_FIRST_DRAWS)
        columns = self._logprobs, self._log_mass, self._draw_logprobs
        accepted = DrawnTokens(
            torch.from_numpy(self._token_ids),
            *(torch.from_numpy(column).float() for column in columns),
        )
        ids = self._token_ids.copy()
        after = constraint.with_tokens(ids, first_draws, are_drawn=True)
        constraint.next_constraint = ids.tobytes(), after
        return accepted

    def _tests(self, members: Integers64, token_ids: Integers64) -> _Tests:
        """Test draws of members in order, until each has an accepted draw and an estimate."""
        count, constraint = token_ids.shape[1], self._constraint
        is_accepted = np.zeros(token_ids.shape, np.bool_)
        place = np.full(len(members), -1)
        unfinished, done = np.arange(len(members)), 0
        while done < count and unfinished.size and not self.is_cancelled:
            # An estimate uses at least the first draws.
            minimum = min(1 + self._extra, count)
            end = max(minimum, self._tested, done + 1)
            is_accepted[unfinished, done:end] = constraint.test_tokens(
                members[unfinished], token_ids[unfinished, done:end], lambda: self.is_cancelled
            )
            done = end
            new = unfinished[(place[unfinished] < 0) & is_accepted[unfinished].any(1)]
            place[new] = is_accepted[new].argmax(1)
            is_complete = (place[unfinished] >= 0) & (place[unfinished] + self._extra < done)
            is_last = token_ids[unfinished, done - 1] < 0
            unfinished = unfinished[~(is_complete | is_last)]
        return _Tests(is_accepted, place, unfinished)

    def _store(self, members: Integers64, drawn: DrawnTokens, tests: _Tests) -> None:
        """Set the columns of members that have an accepted token and need no further draw."""
        is_drawn = tests.place >= 0
        is_drawn[tests.unfinished] = False
        members, place = members[is_drawn], tests.place[is_drawn]
        token_ids = drawn.token_ids.numpy()[members]
        draw_logprobs = drawn.draw_logprob.numpy()[members].astype(np.float64)
        logprobs = drawn.logprobs.numpy()[members].astype(np.float64)
        # No token, -1, has the log-probability -inf, whatever the bias of token 0.
        weights = self.settings.weights
        biased = logprobs
        if weights.biases is not None:
            biased = logprobs + weights.biases.of_ids(members, np.maximum(token_ids, 0))
        ratios = log_mass_ratios(
            biased / weights.temperatures[members, None],
            draw_logprobs,
            tests.is_accepted[is_drawn],
            place,
            self._extra,
        )
        accepted = np.arange(len(members)), place
        self._token_ids[members] = token_ids[accepted]
        self._logprobs[members] = logprobs[accepted]
        self._log_mass[members] = biased[accepted] + ratios
        self._draw_logprobs[members] = -ratios
