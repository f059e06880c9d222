"""Drawing tokens from rows, reproducibly on every engine and under any batching.

The token at a position of a continuation depends on the row, the temperature, the seed of the
continuation and the position, and on nothing else: no generator keeps a state. Chunked
prefills, preemption and other requests change nothing, every rank of a model that is split
over several devices draws the same token, and so does every engine with equal rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from genlm.core.query import SamplingParams

__all__ = [
    "Draws",
    "draw_tokens",
    "draws",
    "sample_continuation",
    "stream_seeds",
    "stream_uniform",
]

_BLOCK = 512
"""Ids whose weights are summed together before one of them is drawn."""

_CACHED_VALUES = 2**17
"""Weights computed at a time on a CPU: 512 KiB, which stay in a cache of the core until they
are summed."""

_FAINT = 1e-20
"""A sum of weights below it has lost too much to the range of float32."""

_LEAST_TEMPERATURE = 1e-30
"""Lower temperatures are raised to it: only the most likely id keeps a weight above 0."""

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def stream_seeds(seed: int | None, count: int) -> list[int]:
    """Derive one seed per sequence, distinct and independent, from one seed.

    Args:
        seed: None takes fresh entropy from the operating system.
        count: Number of seeds; the first n are the same for every count.

    Returns:
        Integers from 0 to 2**63 - 1.
    """
    return [
        int(child.generate_state(1, np.uint64)[0]) >> 1  # engines take signed 64 bits
        for child in np.random.SeedSequence(seed).spawn(count)
    ]


def stream_uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) at a position of a seed's stream.

    SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014),
    which computes any position directly.

    Args:
        seed: An integer, taken modulo 2**64.
        position: 0 for the first token of a continuation.

    Returns:
        A multiple of 2**-53.
    """
    state = (seed + (position + 1) * _GOLDEN_GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((state ^ (state >> 31)) >> 11) / 2**53


class Draws(NamedTuple):
    """Tokens drawn from rows, on the device of the rows.

    Attributes:
        token_ids: Shape `(n,)`, int64.
        log_mass: Log of the allowed ids' share of each row's sum, shape `(n,)`, float32;
            `-inf` for a row without any, whose other values mean nothing.
        logprobs: The log-probability with which each token was drawn, shape `(n,)`, float32.
    """

    token_ids: torch.Tensor
    log_mass: torch.Tensor
    logprobs: torch.Tensor


def draw_tokens(
    logprobs: torch.Tensor,
    temperatures: Sequence[float],
    uniforms: Sequence[float],
    top_k: Sequence[int | None] | None = None,
    top_p: Sequence[float] | None = None,
) -> torch.Tensor:
    """Draw one id per row, with probability proportional to `exp(logprobs / temperature)`.

    Inverts the cumulative distribution. Each row is drawn from independently. At
    temperature 0 the result is the most likely id, the lowest of equals.

    Args:
        logprobs: Shape `(n, vocab_size)`, float32, not necessarily normalised, `-inf` for ids
            that must not be drawn; not changed.
        temperatures: One per row, finite and not negative.
        uniforms: One number in [0, 1) per row: for reproducible draws, `stream_uniform` of
            the continuation's seed and the token's position in it.
        top_k: Draw from the k most likely ids; None for all. Of equals the lowest count first.
        top_p: Draw from the fewest most likely ids that have this share of the probability at
            the temperature, in (0, 1], after top-k; 1 for all.

    Returns:
        Ids, shape `(n,)`, int64, on the device of `logprobs`.
    """
    return draws(logprobs, temperatures, uniforms, top_k, top_p).token_ids


def draws(
    logprobs: torch.Tensor,
    temperatures: Sequence[float],
    uniforms: Sequence[float],
    top_k: Sequence[int | None] | None = None,
    top_p: Sequence[float] | None = None,
    *,
    allowed: torch.Tensor | None = None,
) -> Draws:
    """Draw as `draw_tokens` and return the log-probabilities of the draws as well.

    Args:
        logprobs: As `draw_tokens`.
        temperatures: As `draw_tokens`.
        uniforms: As `draw_tokens`.
        top_k: As `draw_tokens`.
        top_p: As `draw_tokens`.
        allowed: Ids that may be drawn from each row, shape `(n, vocab_size)` or
            `(1, vocab_size)`, bool; None for all.
    """
    if allowed is None and not any(temperatures):
        certain = torch.zeros(len(logprobs), device=logprobs.device)
        return Draws(logprobs.argmax(-1), certain, certain)
    weights, sums, log_mass = _weights(logprobs, temperatures, allowed)
    limits = zip(temperatures, top_k or repeat(None), top_p or repeat(1.0), strict=False)
    for row, (temperature, k, p) in enumerate(limits):
        if temperature and ((k is not None and k < logprobs.shape[1]) or p < 1):
            weights[row] = _truncated(weights[row], k, p)
            sums[row] = _block_sums(weights[row : row + 1])[0]
    token_ids, totals = _inverted(weights, sums, uniforms)
    found = weights.gather(1, token_ids[:, None])[:, 0]
    drawn = (found / totals.to(found)).log()
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0]
    if greedy:
        rows = logprobs[greedy]
        if allowed is not None:
            rows = rows.masked_fill(~allowed.expand_as(logprobs)[greedy], float("-inf"))
        token_ids[greedy], drawn[greedy] = rows.argmax(-1), 0.0
    return Draws(token_ids, log_mass, drawn)


def _weights(
    logprobs: torch.Tensor, temperatures: Sequence[float], allowed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ids are drawn in proportion to, its `_block_sums`, and log masses.

    Weights are shares of the row's sum, because torch computes these in one operation. Where
    the allowed ids are so unlikely that little is left of them, weights are computed again,
    relative to the likeliest of these: always to do so would take the exponential of -inf for
    all others, which is slow on CPUs.
    """
    # torch multiplies floats by bytes several times as fast as by booleans.
    factors = None if allowed is None else allowed.view(torch.uint8)
    weights, sums = _shares(logprobs, factors)
    totals = sums.sum(-1)
    log_mass = totals.log().to(logprobs)
    if any(t not in (0, 1) for t in temperatures):
        weights, sums = _shares(_tempered(logprobs, temperatures), factors)
        totals = torch.minimum(totals, sums.sum(-1))
    faint = (~(totals >= _FAINT)).nonzero()[:, 0]  # NaN where no id is possible
    if len(faint):
        places = faint.to(logprobs.device)
        rows = logprobs[places]
        if allowed is not None:
            rows = rows.masked_fill(~allowed.expand_as(logprobs)[places], float("-inf"))
        chosen = [temperatures[i] for i in faint.tolist()]
        log_mass[places] = rows.logsumexp(-1)
        weights[places] = _tempered(rows, chosen).exp_()
        sums[faint] = _block_sums(weights[places])
    return weights, sums, log_mass


def _shares(
    logprobs: torch.Tensor, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax of rows, times 0 or 1, and its `_block_sums`."""
    count, size = logprobs.shape
    weights = torch.empty_like(logprobs)
    at_once = max(1, _CACHED_VALUES // size) if logprobs.device.type == "cpu" else count
    sums = []
    for begin in range(0, count, at_once):
        part = weights[begin : begin + at_once]
        torch.softmax(logprobs[begin : begin + at_once], -1, out=part)
        if factors is not None:
            part.mul_(factors[begin : begin + at_once] if len(factors) == count else factors)
        sums.append(_block_sums(part))
    return weights, torch.cat(sums)


def _tempered(logprobs: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Return log-probabilities less the largest, divided by temperatures; by 1 instead of 0."""
    largest = logprobs.amax(-1, keepdim=True)
    # Rows without a possible id would become NaN.
    shifted = logprobs - largest.masked_fill(largest.isneginf(), 0.0)
    # The largest is 0 before the division, which could make all of them -inf.
    divisors = [max(t, _LEAST_TEMPERATURE) if t else 1.0 for t in temperatures]
    by = torch.tensor(divisors, dtype=shifted.dtype, device=shifted.device)
    return shifted.div_(by[:, None])


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of blocks of ids in float64, the last block shorter or not."""
    size = weights.shape[1]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].unfold(1, _BLOCK, _BLOCK).sum(-1) if whole else weights[:, :0]
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return _wide(sums)


def _truncated(weights: torch.Tensor, k: int | None, p: float) -> torch.Tensor:
    """Return one row's weights, 0 for those outside its top-k and top-p."""
    count = weights.shape[0] if k is None else min(k, weights.shape[0])
    ordered, ids = weights.sort(descending=True, stable=True)
    ordered, ids = ordered[:count], ids[:count]
    if p < 1:
        wide = _wide(ordered)
        cumulative = wide.cumsum(-1)
        kept = max(1, int((cumulative - wide < p * cumulative[-1]).sum()))
        ids = ids[:kept]
    truncated = torch.zeros_like(weights)
    truncated[ids] = weights[ids]
    return truncated


def _inverted(
    weights: torch.Tensor, sums: torch.Tensor, uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw an id from each row in proportion to its weights; return the rows' sums too.

    Two levels: only the sums of blocks and one block of each row are in float64.
    """
    size = weights.shape[1]
    cumulative = sums.cumsum(-1)
    totals = cumulative[:, -1]
    # A multiple of 2**-53 below 1 times the total is below the total, rounded too.
    thresholds = torch.tensor(uniforms, dtype=sums.dtype, device=sums.device) * totals
    block = torch.searchsorted(cumulative, thresholds[:, None], right=True)
    block = block.clamp_(max=sums.shape[1] - 1)  # rows of zeros, whose total is not above 0
    end, width = cumulative.gather(1, block)[:, 0], sums.gather(1, block)[:, 0]
    share = ((thresholds - (end - width)) / width).clamp(0, 1)
    inside_block = torch.arange(min(_BLOCK, size), device=block.device)
    ids = (block * _BLOCK + inside_block).to(weights.device)
    inside = weights.gather(1, ids.clamp(max=size - 1)).masked_fill(ids >= size, 0.0)
    within = _wide(inside).cumsum(-1)
    place = torch.searchsorted(within, (share * within[:, -1])[:, None], right=True)[:, 0]
    # A share that was rounded to 1 stands for the last id that has a weight.
    last = torch.searchsorted(within, within[:, -1:].contiguous())[:, 0]
    token_ids = block[:, 0] * _BLOCK + torch.minimum(place, last)
    return token_ids.clamp_(max=size - 1).to(weights.device), totals


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return values in float64, on the CPU for Apple's GPUs, which lack it."""
    return (values.cpu() if values.device.type == "mps" else values).double()


async def sample_continuation(
    next_token_logprobs: Callable[[list[int]], Awaitable[torch.Tensor]],
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_context: int | None,
) -> list[int]:
    """Continue a sequence token by token from its rows.

    For programs that have rows from elsewhere; `AsyncLM` draws where the rows are. Ends before
    a stop id, after `params.max_tokens`, or when the context is full.

    Returns:
        The drawn ids without the stop id.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    sequence = list(prompt)
    for position in range(params.max_tokens):
        if max_context is not None and len(sequence) > max_context:
            break
        row = await next_token_logprobs(sequence)
        uniform = stream_uniform(seed, position)
        token_id = int(draw_tokens(row[None], [params.temperature], [uniform]))
        if token_id in params.stop_token_ids:
            break
        sequence.append(token_id)
    return sequence[len(prompt) :]
