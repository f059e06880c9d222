"""Triton kernels of attention over shared prefixes, for passes of single query tokens.

The work is divided by `packed.work_items`: `attend` computes a softmax over the keys of each
work item, `combine` joins the results for each query token. Keys and values are read
where they are stored, by slot, so nothing is gathered; numbers of keys are read from device
memory, so a launch can be replayed from a CUDA graph for other sequences.

The method is that of FlashAttention (Dao et al., 2022) with keys divided among programs
(Flash-Decoding, Dao et al., 2023) and prefixes read once for all of their sequences
(Hydragen, Juravsky et al., 2024).

Triton compiles these functions from their source and supports a subset of Python.
"""

# Compile-time constants are upper-case as in Triton's own code, and kernels take their
# arguments by position.
# ruff: noqa: N803, PLR0915, PLR0917

import triton
import triton.language as tl

FIELDS = tl.constexpr(5)


@triton.jit
def attend(
    query,
    keys,
    values,
    slots,
    positions,
    items,
    outputs,
    logsums,
    query_head_stride,
    query_token_stride,
    key_head_stride,
    value_head_stride,
    n_heads,
    first_row,
    scale,
    softcap,
    window,
    PER_HEAD: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend from the query tokens of one work item and one head of keys.

    A row of the tile is one head of one query token. The kernel stores the softmax's output
    and the logarithm of its sum, -inf where every key is hidden.
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    first_query = tl.load(items + item * FIELDS)
    count = tl.load(items + item * FIELDS + 1)
    first_slot = tl.load(items + item * FIELDS + 2)
    n_keys = tl.load(items + item * FIELDS + 3).to(tl.int32)
    first_position = tl.load(items + item * FIELDS + 4)

    row = tl.arange(0, ROWS)
    token = row // HEADS
    inside = (token < count) & (row % HEADS < PER_HEAD)
    query_head = head * PER_HEAD + row % HEADS
    key_column = tl.arange(0, KEY_COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    at = (
        query_head.to(tl.int64) * query_head_stride + (first_query + token) * query_token_stride
    )
    query_mask = inside[:, None] & (key_column < KEY_WIDTH)[None, :]
    query_tile = tl.load(query + at[:, None] + key_column[None, :], mask=query_mask, other=0.0)
    if WINDOW:
        last_hidden = tl.load(positions + first_query + token, mask=inside, other=0) - window

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    output = tl.full((ROWS, VALUE_COLUMNS), 0.0, tl.float32)
    for start in range(0, n_keys, KEYS):
        number = start + tl.arange(0, KEYS)
        is_key = number < n_keys
        slot = tl.load(slots + first_slot + number, mask=is_key, other=0)
        key_at = keys + head.to(tl.int64) * key_head_stride + slot[:, None] * KEY_WIDTH
        key_mask = is_key[:, None] & (key_column < KEY_WIDTH)[None, :]
        key = tl.load(key_at + key_column[None, :], mask=key_mask, other=0.0)
        scores = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            # The hyperbolic tangent, which Triton's language lacks.
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if WINDOW:
            visible = (first_position + number)[None, :] > last_hidden[:, None]
            scores = tl.where(is_key[None, :] & visible, scores, float("-inf"))
        else:
            scores = tl.where(is_key[None, :], scores, float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        value_at = values + head.to(tl.int64) * value_head_stride + slot[:, None] * VALUE_WIDTH
        value_mask = is_key[:, None] & (value_column < VALUE_WIDTH)[None, :]
        value = tl.load(value_at + value_column[None, :], mask=value_mask, other=0.0)
        added = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        output = output * decay[:, None] + added
        total = total * decay + tl.sum(weights, 1)
        top = larger

    result = (first_row + item * QUERIES + token).to(tl.int64) * n_heads + query_head
    has_keys = total > 0.0
    logsum = tl.where(has_keys, top + tl.log(tl.where(has_keys, total, 1.0)), float("-inf"))
    tl.store(logsums + result, logsum, mask=inside)
    output = output / tl.where(has_keys, total, 1.0)[:, None]
    output_mask = inside[:, None] & (value_column < VALUE_WIDTH)[None, :]
    out_at = result[:, None] * VALUE_WIDTH + value_column[None, :]
    tl.store(outputs + out_at, output, mask=output_mask)


@triton.jit
def combine(
    outputs,
    logsums,
    offsets,
    rows,
    sinks,
    out,
    n_heads,
    VALUE_WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the results of the work items of one query token, for one head.

    A query token without work items, which only pads the pass, gets 0.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(offsets + token).to(tl.int32)
    end = tl.load(offsets + token + 1).to(tl.int32)
    column = tl.arange(0, VALUE_COLUMNS)
    if SINKS:
        top = tl.zeros((1,), tl.float32) + tl.load(sinks + head).to(tl.float32)
        total = tl.full((1,), 1.0, tl.float32)
    else:
        top = tl.full((1,), float("-inf"), tl.float32)
        total = tl.full((1,), 0.0, tl.float32)
    output = tl.full((VALUE_COLUMNS,), 0.0, tl.float32)
    for number in range(begin, end):
        row = tl.load(rows + number) * n_heads + head
        logsum = tl.load(logsums + row)
        larger = tl.maximum(top, logsum)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        decay = tl.exp(top - shift)
        weight = tl.exp(logsum - shift)
        part = tl.load(
            outputs + row * VALUE_WIDTH + column, mask=column < VALUE_WIDTH, other=0.0
        )
        output = output * decay + weight * part
        total = total * decay + weight
        top = larger
    output = output / tl.where(total > 0.0, total, 1.0)
    at = (token.to(tl.int64) * n_heads + head) * VALUE_WIDTH + column
    tl.store(out + at, output.to(out.dtype.element_ty), mask=column < VALUE_WIDTH)
