"""`Truncation`: top-k, top-p and min-p, and the truncation of the weights of rows by them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.validation import checked_count, checked_number
from genlm.core.rows.logits import moved
from genlm.core.rows.selection import batch_top_k, block_sums, to_float64

_CANDIDATES = (256, 8192)
"""Numbers of largest weights that are tried for top-p: the first on CPUs, both on GPUs."""


class Truncation(NamedTuple):
    """Limits of draws to the tokens with the largest weights.

    Each limit is one number for all rows, or numbers of shape `(n,)`, one for each row.

    Attributes:
        top_k: Number of tokens that remain, of equal weights those of the lowest ids; by
            default more than there are, for no limit.
        top_p: Share of the sum of their weights, in (0, 1]; the fewest of these tokens with
            this share remain. 1 for no limit.
        min_p: Share of the largest weight, in [0, 1]; tokens of smaller weight do not remain.
    """

    top_k: int | npt.NDArray[np.int64] = sys.maxsize
    top_p: float | npt.NDArray[np.float64] = 1.0
    min_p: float | npt.NDArray[np.float64] = 0.0

    @classmethod
    def checked(cls, vocab_size: int, top_k: Any, top_p: Any, min_p: Any) -> Truncation:
        """Return the limits that a method takes, where None stands for no limit.

        Raises:
            ValueError: A limit is out of range.
            TypeError: A limit is not a number.
        """
        limits = UNLIMITED
        if top_k is not None:
            limits = limits._replace(top_k=checked_count("top_k", top_k, vocab_size))
        if top_p is not None:
            share = checked_number("top_p", top_p)
            if not 0 < share <= 1:
                raise ValueError(f"top_p={share}; it must be above 0 and at most 1")
            limits = limits._replace(top_p=share)
        if min_p is not None:
            share = checked_number("min_p", min_p)
            if not 0 <= share <= 1:
                raise ValueError(f"min_p={share}; it must be from 0 to 1")
            limits = limits._replace(min_p=share)
        return limits

    @classmethod
    def of_rows(cls, rows: Sequence[Truncation]) -> Truncation:
        """Return the limits of several rows, which have one number each."""
        is_equal = rows.count(rows[0]) == len(rows)
        return rows[0] if is_equal else cls(*map(np.array, zip(*rows, strict=True)))

    @property
    def is_equal(self) -> bool:
        """Whether all rows have the same limits."""
        return np.ndarray not in map(type, self)

    def of(self, rows: Any) -> Truncation:
        """Return the limits of some rows, an index of numpy."""
        if self.is_equal:
            return self
        columns: Any = self
        return Truncation(*(limit[rows] if np.ndim(limit) else limit for limit in columns))

    def applies(self, size: int) -> Any:
        """Whether rows over `size` ids are limited: a bool, or booleans of shape `(n,)`."""
        return (self.top_k < size) | (self.top_p < 1) | (self.min_p > 0)


UNLIMITED = Truncation()


def truncate(weights: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return weights, 0 for those outside each row's limits.

    Args:
        weights: Shape `(n, vocab_size)`, float32, not negative; not changed.
        truncation: The limits of the rows.
    """
    top_k, top_p, min_p = (np.full(len(weights), limit) for limit in truncation)
    size, is_on_cpu = weights.shape[1], weights.device.type == "cpu"
    has_no_top_k = top_k >= size
    pending = np.flatnonzero(~has_no_top_k | (top_p < 1))
    truncated = weights.clone()
    candidates = _CANDIDATES[:1] if is_on_cpu else _CANDIDATES
    widths = [int(np.where(has_no_top_k, width, top_k).max()) for width in candidates]
    for width in [*(width for width in widths if width <= size // 4), size]:
        if not len(pending):
            break
        places = moved(torch.from_numpy(pending), weights.device)
        rows = weights if len(pending) == len(weights) else weights[places]
        if width == size and is_on_cpu and has_no_top_k[pending].all():
            truncated[places] = _with_share(rows, torch.from_numpy(top_p[pending]))
            break
        largest = batch_top_k(rows, width) if width < size else _sort_weights(rows)
        truncated[places], is_short = _limit_weights(
            rows, largest, top_k[pending], top_p[pending]
        )
        pending = pending[has_no_top_k[pending] & is_short.cpu().numpy()]
    if min_p.any():
        largest_weights = to_float64(weights.amax(1))
        least = moved(torch.from_numpy(min_p), largest_weights.device) * largest_weights
        truncated *= weights >= least[:, None].to(weights)
    return truncated


def _with_share(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return weights of rows, 0 for those outside top-p.

    A radix search for the smallest weight that remains reads the weights a few times, while to
    sort them takes ten times as long. The digits are 11, 10 and 10 bits of the floats.

    Args:
        weights: Shape `(n, ids)`, float32, not negative, in main memory.
        top_p: Shape `(n,)`, float64.
    """
    count, size = weights.shape
    bits = weights.view(torch.int32)  # in the order of the weights
    digits = (bits >> 20) & 2047
    sums = torch.zeros(count, 2048, dtype=torch.float64, device=weights.device)
    sums.scatter_add_(1, digits.long(), weights.double())
    shares = torch.where(top_p < 1, top_p, torch.inf)
    remaining = sums.sum(1) * shares  # the sum that is to be reached
    smallest = _last_digit(sums, remaining)  # of which the first digits are known
    places = (digits == smallest[:, None]).flatten().nonzero()[:, 0]
    rows = places // size
    candidates, values = bits.flatten()[places], weights.flatten()[places]
    for place in (10, 0):
        digits = (candidates >> place) & 1023
        sums = torch.zeros(count, 1024, dtype=torch.float64, device=weights.device)
        sums.view(-1).scatter_add_(0, torch.add(digits, rows, alpha=1024), values.double())
        digit = _last_digit(sums, remaining)
        smallest = (smallest << 10) | digit
        places = (digits == digit[rows]).nonzero()[:, 0]
        rows, candidates, values = rows[places], candidates[places], values[places]
    remains = bits >= smallest[:, None]
    # The candidates equal the smallest weight. Those with the lowest ids remain.
    limits = (remaining / smallest.view(torch.float32).double()).ceil()
    for row in (limits < rows.bincount(minlength=count)).nonzero()[:, 0].tolist():
        equal = (bits[row] == smallest[row]).nonzero()[:, 0]
        remains[row, equal[int(limits[row]) :]] = False
    return weights * remains


def _last_digit(sums: torch.Tensor, remaining: torch.Tensor) -> torch.Tensor:
    """Return the digit of each row at which the sum over this and larger digits is reached.

    Args:
        sums: Sum of the weights of each digit, shape `(n, digits)`.
        remaining: The sum that is to be reached, shape `(n,)`; that of the larger digits is
            subtracted.
    """
    larger = sums.flip(1).cumsum(1).flip(1)  # with each digit
    larger = torch.nn.functional.pad(larger[:, 1:], (0, 1))
    digit = (larger < remaining[:, None]).int().argmax(1, keepdim=True)
    remaining -= larger.gather(1, digit)[:, 0]
    return digit[:, 0].int()


def _sort_weights(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = weights.sort(dim=-1, descending=True, stable=True)
    return values, ids


def _limit_weights(
    weights: torch.Tensor,
    largest: tuple[torch.Tensor, torch.Tensor],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights limited to some of the largest, and whether all of these remain."""
    ids, values = largest[1], to_float64(largest[0])
    ks, ps = (
        moved(torch.from_numpy(limit[:, None]), values.device) for limit in (top_k, top_p)
    )
    in_top_k = torch.arange(values.shape[1], device=values.device) < ks
    values = values * in_top_k
    cumulative = values.cumsum(-1)
    sums = cumulative[:, -1:]
    if (top_k >= weights.shape[1]).any():  # their sum includes more than the candidates
        totals = block_sums(to_float64(weights)).sum(-1, keepdim=True)
        sums = torch.where(ks >= weights.shape[1], totals, sums)
    is_allowed = in_top_k & ((cumulative - values < ps * sums) | (ps >= 1))
    limited = (values * is_allowed).to(weights)
    return torch.zeros_like(weights).scatter_(1, ids, limited), is_allowed[:, -1]
