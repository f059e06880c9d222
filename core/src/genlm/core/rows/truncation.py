"""Truncation of the weights of rows by top-k and top-p."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.rows.logits import moved
from genlm.core.rows.selection import batch_top_k, block_sums, to_float64

_CANDIDATES = (256, 8192)
"""Numbers of largest weights that are tried for top-p: the first on CPUs, both on GPUs."""


def truncate(
    weights: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Return weights, 0 for those outside each row's top-k and top-p.

    Args:
        weights: Shape `(n, vocab_size)`, float32, not negative; not changed.
        top_k: Number of largest weights that remain, of equal weights those of the lowest ids,
            shape `(n,)`; `vocab_size` for no limit.
        top_p: Share of their sum; the fewest of these weights with this share remain, shape
            `(n,)`; 1 for no limit.
    """
    size, is_on_cpu = weights.shape[1], weights.device.type == "cpu"
    has_no_top_k = top_k >= size
    truncated = torch.empty_like(weights)
    pending = np.arange(len(weights))
    candidates = _CANDIDATES[:1] if is_on_cpu else _CANDIDATES
    widths = [int(np.where(has_no_top_k, width, top_k).max()) for width in candidates]
    for width in [*(width for width in widths if width <= size // 4), size]:
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
        if not len(pending):
            break
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
    sums = torch.zeros(count, 2048, dtype=torch.float64)
    sums.scatter_add_(1, digits.long(), weights.double())
    shares = torch.where(top_p < 1, top_p, torch.inf)
    remaining = sums.sum(1) * shares  # the sum that is to be reached
    smallest = _last_digit(sums, remaining)  # of which the first digits are known
    places = (digits == smallest[:, None]).flatten().nonzero()[:, 0]
    rows = places // size
    candidates, values = bits.flatten()[places], weights.flatten()[places]
    for place in (10, 0):
        digits = (candidates >> place) & 1023
        sums = torch.zeros(count, 1024, dtype=torch.float64)
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
