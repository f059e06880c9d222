"""`DrawOracle`: which tokens a draw from a row may return, and with which probabilities.

`random_settings` chooses settings of draws from the members of a population, and
`settings_of_member` returns those of one member.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from genlm.testing.check import expect
from genlm.testing.target import TokenTuple

_LIMITS: tuple[Mapping[str, Any], ...] = ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2})
_LIMIT_NAMES = {name for limit in _LIMITS for name in limit}


@dataclass(frozen=True, eq=False)
class DrawOracle:
    """Checks draws from a row with given settings, up to rounding.

    If no log-probability is off by more than e, the cumulative distribution at temperature t is
    off by at most e / 2t: a logit moves by at most 2e / t, and the slope of the logistic
    function is at most a quarter.

    Attributes:
        row: The model's log-probabilities, float64.
        error: Maximum error of a log-probability.
        mask: The allowed tokens: ids, or a flag for each id; None for all.
        bias: Addend of the log-probabilities, an array of the same shape; None for 0.
        temperature: Temperature; at 0, only a most likely token may be drawn.
        top_k: Limit of the draw, as in `Population.draw`; also `top_p` and `min_p`.
        top_p: Limit of the draw.
        min_p: Limit of the draw.
        drawn: Tokens that were drawn before and are not replaced.
    """

    row: torch.Tensor
    error: float
    mask: Any = None
    bias: Any = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    drawn: TokenTuple = ()

    @functools.cached_property
    def _logprobs(self) -> torch.Tensor:
        """Log-probabilities, with the bias, of the tokens that may be drawn; else `-inf`."""
        logprobs = self.row
        if self.bias is not None:
            logprobs = logprobs + torch.as_tensor(self.bias).to(logprobs)
        if self.mask is not None:
            allowed = torch.full_like(logprobs, -math.inf)
            allowed_ids = torch.as_tensor(self.mask)
            allowed[allowed_ids] = logprobs[allowed_ids]
            logprobs = allowed
        return logprobs.index_fill(0, torch.tensor(self.drawn, dtype=torch.long), -math.inf)

    @property
    def log_mass(self) -> float:
        """Log-mass of the tokens that may be drawn."""
        is_row = self.mask is None and self.bias is None and not self.drawn
        return 0.0 if is_row else float(self._logprobs.logsumexp(0))

    @property
    def is_impossible(self) -> bool:
        """Whether no token may be drawn."""
        return bool(self._logprobs.max() == -math.inf)

    def without(self, token_id: int) -> DrawOracle:
        """Return the oracle of a draw from the other tokens."""
        return replace(self, drawn=(*self.drawn, token_id))

    def check(
        self,
        token_id: int,
        uniform: float | None,
        draw_logprob: float | None = None,
        /,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless a uniform number draws a token.

        Args:
            token_id: The token.
            uniform: The number that inverts the cumulative distribution; with None, any token
                may be drawn that has a probability.
            draw_logprob: Log-probability with which the token was drawn; None is not checked.
            **example: Reported with the failure.
        """
        limited, is_near = self._limited
        temperature = self.temperature
        may_be_drawn = 0 <= token_id < len(limited) and bool(limited[token_id] > -math.inf)
        expect(may_be_drawn, "a token that may be drawn", token_id, **example)
        if is_near:  # rounding decides which tokens are within the limits
            return
        if temperature == 0:
            gap = float(limited.max() - limited[token_id])
            expect(
                gap <= 2 * self.error,  # either of two tokens within the tolerance
                f"the most likely token, {int(limited.argmax())}",
                f"{token_id}, less likely by {gap:.3g} nats",
                **example,
            )
            return
        if uniform is not None:
            cumulative = (limited / temperature).softmax(-1).cumsum(-1)
            low = float(cumulative[token_id - 1]) if token_id else 0.0
            high = float(cumulative[token_id])
            expect(
                low - self._slack <= uniform <= high + self._slack,
                f"the token that {uniform:.6f} draws at temperature {temperature:g}",
                f"{token_id}, drawn by numbers from {low:.6f} to {high:.6f}",
                **example,
            )
        if draw_logprob is not None:
            self.check_logprob(token_id, draw_logprob, **example)

    def check_logprob(self, token_id: int, draw_logprob: float, /, **example: Any) -> None:
        """Raise `CheckFailure` unless a token, drawn or not, has this log-probability.

        Nothing is checked at temperature 0, or if rounding decides about the limits.
        """
        limited, is_near = self._limited
        if is_near or self.temperature == 0:
            return
        expected = float((limited / self.temperature).softmax(-1)[token_id])
        found = math.exp(draw_logprob)
        expect(
            abs(found - expected) <= self._slack,
            f"a draw with probability {expected:.6g}",
            found,
            **example,
        )

    @property
    def _slack(self) -> float:
        """Maximum error of a probability."""
        return self.error / (2 * self.temperature) + 1e-6

    @functools.cached_property
    def _limited(self) -> tuple[torch.Tensor, bool]:
        """Log-probabilities within the limits, and whether rounding may change these tokens."""
        ordered, ids = self._logprobs.sort(descending=True, stable=True)
        gap, temperature = 2 * self.error, self.temperature
        count, is_near = self.top_k or len(ids), False
        if self.top_p is not None:
            share = (ordered / temperature).softmax(-1).cumsum(-1)
            count = int((share < self.top_p).sum()) + 1
            is_near = bool(((share - self.top_p).abs() < gap / temperature).any())
        if self.min_p is not None:
            least = ordered[0] + temperature * math.log(self.min_p)
            count = int((ordered > least - gap).sum())
            is_near = bool(((ordered - least).abs() < gap).any())
        if count < len(ids):
            is_near = is_near or bool(ordered[count - 1] - ordered[count] < gap)
        top_ids = ids[: count + 1] if is_near else ids[:count]
        limited = torch.full_like(self._logprobs, -math.inf)
        limited[top_ids] = self._logprobs[top_ids]
        return limited, is_near


def random_settings(
    generator: np.random.Generator, count: int, size: int, *, has_limits: bool
) -> dict[str, Any]:
    """Choose masks, temperatures, biases and limits of draws from a population.

    Args:
        generator: Random generator.
        count: Number of members.
        size: Number of ids in the vocabulary.
        has_limits: Whether top-k, top-p and min-p are among the settings.

    Returns:
        Arguments of `Population.draw`.
    """
    settings: dict[str, Any] = {}
    if has_limits:
        settings |= _LIMITS[generator.integers(len(_LIMITS))]
    if generator.integers(2):
        masks = generator.random((3, size)) < 0.5
        masks[0] = generator.integers(2)  # all tokens, or none
        index = generator.integers(0, 3, count)
        one_each = {"masks": masks[index]}
        settings |= one_each if generator.integers(2) else {"masks": masks, "mask_index": index}
    if generator.integers(2):
        settings["temperature"] = generator.uniform(0.5, 2.0, count)
    if not generator.integers(3):
        settings["bias"] = generator.normal(size=(count, size))
        settings["bias"][:, ::5] = -np.inf
    return settings


def settings_of_member(settings: Mapping[str, Any], member: int) -> dict[str, Any]:
    """Return the settings of the `DrawOracle` of a member of a population.

    Args:
        settings: Arguments of `Population.draw`: arrays with an entry for each member, except
            for limits and for masks with a `mask_index`.
        member: The member.
    """
    of_member = {name: value for name, value in settings.items() if name in _LIMIT_NAMES}
    if "masks" in settings:
        index = settings.get("mask_index")
        of_member["mask"] = settings["masks"][member if index is None else index[member]]
    for name in ("temperature", "bias"):
        if name in settings:
            of_member[name] = settings[name][member]
    return of_member
