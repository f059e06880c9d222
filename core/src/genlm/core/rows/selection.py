"""Selection of entries of rows: the largest, and by top-k and top-p.

All rows are computed at once by array operations. Only `truncate` waits for a device, once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.rows.logits import moved, row_parts

__all__ = [
    "SUM_BLOCK",
    "batch_top_k",
    "block_sums",
    "to_float64",
    "truncate",
]

_BLOCKS = (64, 16)
"""Sizes of blocks of adjacent ids; at first, only the largest entry of each block is compared.
The smaller size is for large k."""

SUM_BLOCK = 512
"""Number of adjacent ids whose weights are summed together."""

_CANDIDATES = (256, 8192)
"""Numbers of largest weights that are tried for top-p, before all weights are sorted."""

_LARGEST_ID = 2**31 - 1


def batch_top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` most likely tokens of each row; ties in ascending order of ids.

    Args:
        rows: Log-probabilities, shape `(n, vocab_size)`, float32, without NaN; on any device.
        k: From 1 to `vocab_size`.

    Returns:
        Log-probabilities, the largest first, and their ids, both of shape `(n, k)`.
    """
    bounds = row_parts(len(rows), rows.shape[1], rows.device)
    parts = [_top_k(rows[begin:end], k) for begin, end in bounds]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return rows[:, :k], torch.empty(0, k, dtype=torch.long, device=rows.device)
    values, ids = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(ids)


def _top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest entries of each row in descending order, and their ids.

    The k largest are in the k blocks with the largest maxima: each of these has an entry that
    precedes all entries of any other block.
    """
    size = rows.shape[1]
    block = next((block for block in _BLOCKS if 2 * k * block <= size), None)
    if block is None:
        ids = _first_ids(rows, torch.arange(size, device=rows.device), k)
        return rows.gather(1, ids), ids
    whole = size // block * block
    maxima = rows[:, :whole].unfold(1, block, block).amax(-1)
    if whole < size:
        maxima = torch.cat([maxima, rows[:, whole:].amax(-1, keepdim=True)], 1)
    blocks = _first_ids(maxima, torch.arange(maxima.shape[1], device=rows.device), k)
    offsets = torch.arange(block, device=rows.device)
    ids = (blocks[:, :, None] * block + offsets).flatten(1)
    values = rows.gather(1, ids.clamp(max=size - 1))
    # Ids beyond the row have the lowest value and follow all valid ids of this value.
    values = values.masked_fill_(ids >= size, float("-inf"))
    ids = _first_ids(values, ids, k)
    return rows.gather(1, ids), ids


def _first_ids(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the `k` largest values of each row; ties in ascending order of ids."""
    device = values.device
    if device.type == "mps":  # top-k of Apple's GPUs takes neither 64 bits nor many values
        values, ids = values.cpu(), ids.cpu()
    bits = (values + 0.0).view(torch.int32)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & _LARGEST_ID)  # as integers in the order of the floats
    # One integer for a value and its id, so no two are equal.
    keys = (ordered.long() << 32) | (_LARGEST_ID - ids)
    return (_LARGEST_ID - (keys.topk(k).values & 0xFFFFFFFF)).to(device)


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
    size = weights.shape[1]
    has_no_top_k = top_k >= size
    truncated = torch.empty_like(weights)
    pending = np.arange(len(weights))
    widths = [int(np.where(has_no_top_k, width, top_k).max()) for width in _CANDIDATES]
    for width in [*(width for width in widths if width <= size // 4), size]:
        places = moved(torch.from_numpy(pending), weights.device)
        rows = weights if len(pending) == len(weights) else weights[places]
        largest = batch_top_k(rows, width) if width < size else _sort_weights(rows)
        truncated[places], is_short = _limit_weights(
            rows, largest, top_k[pending], top_p[pending]
        )
        if width == size or not has_no_top_k[pending].any():
            break
        pending = pending[has_no_top_k[pending] & is_short.cpu().numpy()]
        if not len(pending):
            break
    return truncated


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


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of blocks of ids in float64; the last block may be shorter."""
    size = weights.shape[1]
    whole = size // SUM_BLOCK * SUM_BLOCK
    if not whole:
        return to_float64(weights.sum(-1, keepdim=True))
    sums = weights[:, :whole].unfold(1, SUM_BLOCK, SUM_BLOCK).sum(-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return to_float64(sums)


def to_float64(values: torch.Tensor) -> torch.Tensor:
    """Return values in float64, on the CPU for Apple's GPUs, which lack it."""
    return (values.cpu() if values.device.type == "mps" else values).double()
