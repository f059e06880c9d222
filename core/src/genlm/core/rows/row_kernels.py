"""The Triton kernels of rows on a GPU, which `device_rows` launches.

`sum_blocks` reads every logit once, and stores the largest entry and the sums of each block of
adjacent ids. `draw_tokens` finds the block of a draw by these sums, reads the logits of this
block, and finds the token. Nothing of the size of the logits is stored.

A row has the weights of tokens, and the logits of its source: rows of one source can have
different masks. The score of a token is its logit plus its bias, and -inf outside the mask. A
block has up to three sums of exponentials: of its logits, of its scores, and of its scores
divided by the temperature. They are relative to its largest logit or its largest score.

Triton compiles these functions from their source and supports a subset of Python.
"""

# Compile-time constants are upper-case as in Triton's own code, and kernels take their
# arguments by position.
# ruff: noqa: N803, PLR0915, PLR0917

import triton
import triton.language as tl


@triton.jit
def finite_shift(top):
    """Return the shift before an exponential: the value, or 0 for infinities and nan."""
    return tl.where(tl.abs(top) < float("inf"), top, 0.0)


@triton.jit
def load_scores(
    logits,
    bias,
    mask,
    source,
    row,
    mask_row,
    ids,
    n_ids,
    logit_stride,
    bias_stride,
    mask_stride,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return the logits and the scores of some ids, -inf beyond the vocabulary."""
    inside = ids < n_ids
    values = tl.load(logits + source * logit_stride + ids, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    scores = values
    if BIASED:
        scores += tl.load(bias + row * bias_stride + ids, mask=inside, other=0.0)
    if MASKED:
        mask += mask_row * mask_stride
        if PACKED:
            byte = tl.load(mask + ids // 8, mask=inside, other=0)
            allowed = (byte.to(tl.int32) >> (ids % 8)) & 1
        else:
            allowed = tl.load(mask + ids, mask=inside, other=0)
        scores = tl.where(allowed != 0, scores, float("-inf"))
    return values, scores


@triton.jit
def sum_blocks(
    logits,
    bias,
    mask,
    mask_rows,
    temperatures,
    sources,
    tops,
    sums,
    n_ids,
    n_blocks,
    logit_stride,
    bias_stride,
    mask_stride,
    kind_stride,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    TEMPERED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store the largest entries and the sums of some blocks of a row.

    `tops` has the largest logits, then the largest scores, shape (2, rows, blocks). `sums` has
    the sums of the logits, the scores, and the scores at the temperature, shape
    (3, rows, blocks).
    """
    programs = tl.cdiv(n_blocks, BLOCKS)
    row = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask_row = row
    if MASKED:
        mask_row = tl.load(mask_rows + row)
    values, scores = load_scores(
        logits, bias, mask, tl.load(sources + row), row, mask_row, ids, n_ids,
        logit_stride, bias_stride, mask_stride, BIASED, MASKED, PACKED,
    )  # fmt: skip
    inside = block < n_blocks
    at = row * n_blocks + block
    top = tl.max(values, 1)
    shift = finite_shift(top)
    tl.store(tops + at, top, mask=inside)
    tl.store(sums + at, tl.sum(tl.exp(values - shift[:, None]), 1), mask=inside)
    if BIASED or MASKED:
        at += kind_stride
        top = tl.max(scores, 1)
        shift = finite_shift(top)
        tl.store(tops + at, top, mask=inside)
        tl.store(sums + at, tl.sum(tl.exp(scores - shift[:, None]), 1), mask=inside)
    if TEMPERED:
        at = 2 * kind_stride + row * n_blocks + block
        shifted = (scores - shift[:, None]) / tl.load(temperatures + row)
        tl.store(sums + at, tl.sum(tl.exp(shifted), 1), mask=inside)


@triton.jit
def relative_sums(sums, tops, largest, inside, temperature):
    """Return the sums of the blocks of a row in float64, relative to its largest entry."""
    total = tl.load(sums, mask=inside, other=0.0).to(tl.float64)
    return total * tl.exp((tops - finite_shift(largest)).to(tl.float64) / temperature)


@triton.jit
def draw_tokens(
    logits,
    bias,
    mask,
    mask_rows,
    temperatures,
    sources,
    tops,
    sums,
    n_ids,
    n_blocks,
    logit_stride,
    bias_stride,
    mask_stride,
    kind_stride,
    uniforms,
    row_of,
    token_ids,
    logprobs,
    log_mass,
    draw_logprob,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    TEMPERED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Invert the cumulative distribution of a row at a uniform number.

    A row without a possible token has token -1, draw_logprob 0, and `-inf`. One that is not a
    distribution, or has an infinite or nan sum, has token -1 and nan.
    """
    draw = tl.program_id(0)
    row = tl.load(row_of + draw)
    block = tl.arange(0, BLOCKS)
    inside = block < n_blocks
    at = row * n_blocks + block
    top = tl.load(tops + at, mask=inside, other=float("-inf"))
    largest = tl.max(top, 0)
    weights = relative_sums(sums + at, top, largest, inside, 1.0)
    log_total = largest + tl.log(tl.sum(weights, 0))
    log_allowed = log_total
    if BIASED or MASKED:
        at += kind_stride
        top = tl.load(tops + at, mask=inside, other=float("-inf"))
        largest = tl.max(top, 0)
        weights = relative_sums(sums + at, top, largest, inside, 1.0)
        log_allowed = largest + tl.log(tl.sum(weights, 0))
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
        at = 2 * kind_stride + row * n_blocks + block
        weights = relative_sums(sums + at, top, largest, inside, temperature)

    cumulative = tl.cumsum(weights, 0)
    total = tl.max(cumulative, 0)
    threshold = tl.load(uniforms + draw) * total
    drawn_block = tl.minimum(tl.sum((cumulative <= threshold).to(tl.int32), 0), n_blocks - 1)
    is_drawn = block == drawn_block
    width = tl.sum(tl.where(is_drawn, weights, 0.0), 0)
    end = tl.sum(tl.where(is_drawn, cumulative, 0.0), 0)
    share = (threshold - (end - width)) / width
    # The largest share below 1 selects the last token that has a weight.
    share = tl.minimum(tl.maximum(share, 0.0), 1.0 - 2.220446049250313e-16)
    block_top = tl.max(tl.where(is_drawn, top, float("-inf")), 0)

    place = tl.arange(0, SIZE)
    mask_row = row
    if MASKED:
        mask_row = tl.load(mask_rows + row)
    values, scores = load_scores(
        logits, bias, mask, tl.load(sources + row), row, mask_row, drawn_block * SIZE + place,
        n_ids, logit_stride, bias_stride, mask_stride, BIASED, MASKED, PACKED,
    )  # fmt: skip
    token_weights = tl.exp((scores - finite_shift(block_top)) / temperature)
    cumulative = tl.cumsum(token_weights.to(tl.float64), 0)
    threshold = share * tl.max(cumulative, 0)
    drawn = tl.minimum(tl.sum((cumulative <= threshold).to(tl.int32), 0), SIZE - 1)
    value = tl.max(tl.where(place == drawn, values, float("-inf")), 0)
    score = tl.max(tl.where(place == drawn, scores, float("-inf")), 0)

    # False also for nan, of logits or of the bias.
    is_finite = (tl.abs(log_total) < float("inf")) & (log_allowed < float("inf"))
    has_token = is_finite & (log_allowed > float("-inf"))
    absent = tl.where(is_finite, float("-inf"), float("nan"))
    logprob = (score - finite_shift(largest)).to(tl.float64) / temperature - tl.log(total)
    token_id = tl.where(has_token, drawn_block * SIZE + drawn, -1)
    tl.store(token_ids + draw, token_id.to(tl.int64))
    tl.store(logprobs + draw, tl.where(has_token, value - log_total, absent).to(tl.float32))
    mass = tl.where(has_token, log_allowed - log_total, absent)
    tl.store(log_mass + draw, mass.to(tl.float32))
    logprob = tl.where(has_token, logprob, tl.where(is_finite, 0.0, float("nan")))
    tl.store(draw_logprob + draw, logprob.to(tl.float32))
