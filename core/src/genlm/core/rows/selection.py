"""The largest entries of rows, and sums of blocks of entries."""

from __future__ import annotations

import torch

from genlm.core.rows.logits import joined_parts, row_parts

_BLOCKS = (64, 16)
"""Sizes of blocks of adjacent ids; at first, only the largest entry of each block is compared.
The smaller size is for large k."""

SUM_BLOCK = 256
"""Number of adjacent ids whose weights are summed together."""

_LARGEST_ID = 2**31 - 1


def batch_top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` most likely tokens of each row; ties in ascending order of ids.

    Args:
        rows: Log-probabilities, shape `(n, vocab_size)`, float32, without NaN; on any device.
        k: From 1 to `vocab_size`.

    Returns:
        Log-probabilities, the largest first, and their ids, both of shape `(n, k)`.
    """
    if not len(rows):
        return rows[:, :k], torch.empty(0, k, dtype=torch.long, device=rows.device)
    bounds = row_parts(len(rows), rows.shape[1], rows.device)
    values, ids = joined_parts((_top_k(rows[begin:end], k) for begin, end in bounds), len(rows))
    return values, ids


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
