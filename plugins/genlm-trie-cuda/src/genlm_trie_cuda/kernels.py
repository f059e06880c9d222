"""The Triton kernels, which `triton_path` launches; `plan` documents the slots.

A tile is `(rows, slots)`. Slots are stored with the rows of weights innermost, at
`slot * GROUP + row`, so that a tree or a gather reads whole memory sectors. Weights and
results are stored row by row; Triton transposes the tile between load and store.

Rows are independent of each other. `logsumexp` stores two numbers for every slot above the
ranks: the exact largest log-weight, and the sum of exponentials relative to it.

Triton compiles these functions from their source and supports a subset of Python.
"""

# Compile-time constants are upper-case as in Triton's own code, and kernels take their
# arguments by position.
# ruff: noqa: N803, PLR0917

import triton
import triton.language as tl

SUM = tl.constexpr(0)
MAX = tl.constexpr(1)
LOGSUMEXP = tl.constexpr(2)


@triton.jit
def maximum(a, b):
    """Return the maximum of two values; nan if either is nan."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite_shift(top):
    """Return the shift before an exponential: the value, or 0 for infinities and nan."""
    return tl.where(tl.abs(top) < float("inf"), top, 0.0)


@triton.jit
def load_weights(
    weights,
    slots,
    out,
    ranks,
    n_tokens,
    n_rows,
    row_stride,
    token_stride,
    out_stride,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy the weights to the leaves of the result and, in sorted order, to the ranks."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, GROUP)
    is_weight = (token < n_tokens)[None, :] & (row < n_rows)[:, None]
    at = row[:, None].to(tl.int64) * row_stride + token[None, :].to(tl.int64) * token_stride
    values = tl.load(weights + at, mask=is_weight, other=0.0).to(slots.dtype.element_ty)
    leaves = row[:, None].to(tl.int64) * out_stride + token[None, :]
    tl.store(out + leaves, values, mask=is_weight)
    slot = tl.load(ranks + token, mask=token < n_tokens, other=0)
    inside = (token < n_tokens)[None, :] & (row < GROUP)[:, None]
    tl.store(slots + slot[None, :] * GROUP + row[:, None], values, mask=inside)


@triton.jit
def build_trees(
    slots,
    sums,
    first,
    count,
    padded,
    upper,
    n_ranks,
    OPERATION: tl.constexpr,
    OVER_RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Build a complete binary tree over each block of a stage."""
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    inside = (entry < count)[None, :] & (row < GROUP)[:, None]
    at = (first + entry)[None, :] * GROUP + row[:, None]
    top = tl.load(slots + at, mask=inside, other=0.0)
    total = top
    if OPERATION == LOGSUMEXP:
        if OVER_RANKS:
            total = tl.full((ROWS, BLOCK), 1.0, top.dtype)
        else:
            total = tl.load(sums + at - n_ranks * GROUP, mask=inside, other=0.0)
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(top, (ROWS, BLOCK >> (level + 1), 2)))
        top = left + right if OPERATION == SUM else maximum(left, right)
        entry = block * (BLOCK >> (level + 1)) + tl.arange(0, BLOCK >> (level + 1))
        at = (upper + padded - (padded >> level) + entry)[None, :] * GROUP + row[:, None]
        tl.store(slots + at, top)
        if OPERATION == LOGSUMEXP:
            shift = finite_shift(top)
            pairs = tl.reshape(total, (ROWS, BLOCK >> (level + 1), 2))
            sum_left, sum_right = tl.split(pairs)
            total = sum_left * tl.exp(left - shift) + sum_right * tl.exp(right - shift)
            tl.store(sums + at - n_ranks * GROUP, total)


@triton.jit
def combine_intervals(
    slots,
    sums,
    piece,
    piece_offset,
    piece_count,
    n_ranks,
    first_interval,
    n_intervals,
    OPERATION: tl.constexpr,
    GROUP: tl.constexpr,
    INTERVALS: tl.constexpr,
):
    """Combine the pieces of every interval, smallest first."""
    begin = tl.program_id(0) * INTERVALS
    interval = begin + tl.arange(0, INTERVALS)
    row = tl.arange(0, GROUP)
    neutral = 0.0 if OPERATION == SUM else float("-inf")
    top = tl.full((GROUP, INTERVALS), neutral, slots.dtype.element_ty)
    total = tl.full((GROUP, INTERVALS), 0.0, slots.dtype.element_ty)
    # Intervals are sorted by their number of pieces: the first has the most.
    for index in range(tl.load(piece_count + begin)):
        offset = tl.load(piece_offset + index)
        has_piece = interval < tl.load(piece_offset + index + 1) - offset
        slot = tl.load(piece + offset + interval, mask=has_piece, other=0)
        at = slot[None, :] * GROUP + row[:, None]
        inside = has_piece[None, :] & (row < GROUP)[:, None]
        value = tl.load(slots + at, mask=inside, other=neutral)
        if OPERATION == SUM:
            top += value
        else:
            before = top
            top = maximum(top, value)
        if OPERATION == LOGSUMEXP:
            above = inside & (slot >= n_ranks)[None, :]
            part = tl.load(sums + at - n_ranks * GROUP, mask=above, other=1.0)
            shift = finite_shift(top)
            total = total * tl.exp(before - shift) + part * tl.exp(value - shift)
    if OPERATION == LOGSUMEXP:
        top += tl.log(total)
    at = (first_interval + interval)[None, :] * GROUP + row[:, None]
    tl.store(slots + at, top, mask=(interval < n_intervals)[None, :] & (row < GROUP)[:, None])


@triton.jit
def gather_prefixes(
    slots,
    out,
    source,
    n_tokens,
    n_prefixes,
    n_rows,
    out_stride,
    GROUP: tl.constexpr,
    PREFIXES: tl.constexpr,
):
    """Copy the value of a rank or an interval to every prefix."""
    prefix = tl.program_id(0) * PREFIXES + tl.arange(0, PREFIXES)
    row = tl.arange(0, GROUP)
    is_prefix = (prefix < n_prefixes)[None, :] & (row < n_rows)[:, None]
    slot = tl.load(source + prefix, mask=prefix < n_prefixes, other=0)
    values = tl.load(slots + slot[None, :] * GROUP + row[:, None], mask=is_prefix, other=0.0)
    at = row[:, None].to(tl.int64) * out_stride + n_tokens + prefix[None, :]
    tl.store(out + at, values, mask=is_prefix)
