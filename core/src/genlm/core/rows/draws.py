"""Drawing from all rows of a batch at once, and the mass of sets of tokens.

A draw inverts the cumulative distribution of a row, in the order of the ids, at a uniform
random number (`inversion`). It depends only on its row, number and settings, not on the other
rows of the batch. Rows are computed in parts, so the additional memory is bounded for any
number of rows. On a GPU, `device_rows` computes the draws for which there are kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.rows.device_rows import draw_on_device, has_kernels
from genlm.core.rows.gumbel import gumbel_top_k
from genlm.core.rows.inversion import draw_ids, draw_with_blocks
from genlm.core.rows.logits import joined_parts, moved, scratch_memory
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowPart, RowWeights
from genlm.core.rows.selection import block_sums, to_float64
from genlm.core.rows.token_weights import (
    UNDERFLOW,
    TokenWeights,
    compute_weights,
    masked_scores,
    masked_sums,
    relative_scores,
    reweight,
)
from genlm.core.rows.truncation import truncate

_INF = float("inf")

_DRAWS_IN_TURNS = 128
"""Number of draws without replacement that are made one after the other. All further draws of
a row together take as long as about 100 of these."""


class DrawnTokens(NamedTuple):
    """A token drawn for each member of a population, or from each row.

    The tensors of a population's draws are in main memory, those of `batch_draw` on the device
    of the rows.

    Attributes:
        token_ids: Shape `(n,)`, int64; -1 where there is no token to draw.
        logprobs: The model's log-probability of each token, shape `(n,)`, float32.
        log_mass: Log of the total probability of the allowed tokens, after `bias`, shape
            `(n,)`, float32. `-inf` for a member without an allowed token, 0 for a finished
            member. It does not depend on the temperature or on limits such as `top_p`. At
            temperature 1 and without such limits, it is the increment of a particle's
            log-weight.
        draw_logprob: The log-probability with which each token was drawn, shape `(n,)`,
            float32; 0 without a token, so that `logprobs - draw_logprob`, the log-weight of a
            draw under the model, is `-inf` for a member without an allowed token and 0 for a
            finished one.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    log_mass: torch.Tensor
    draw_logprob: torch.Tensor


def batch_draw(
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    weights: RowWeights,
    *,
    row_of: torch.Tensor | None = None,
    sources: torch.Tensor | None = None,
) -> DrawnTokens:
    """Draw a token from each row, with probability proportional to its weight.

    A row without any token that may be drawn has token -1.

    Args:
        rows: Log-probabilities, shape `(m, vocab_size)`, float32, on any device; not changed.
        uniforms: Random numbers in [0, 1), one per draw, shape `(n,)` or that of `row_of`,
            float64, in main memory.
        weights: Weights of the tokens of n rows.
        row_of: The row of each draw, ascending, int64, in main memory; a row may have several
            draws or none. By default draw i is from row i.
        sources: Index in `rows` of the log-probabilities of each row, shape `(n,)`, int64, in
            main memory; by default those of row i are `rows[i]`.
    """
    if has_kernels(rows, weights):
        columns = draw_on_device(rows, uniforms, weights, row_of=row_of, sources=sources)
        drawn = DrawnTokens(*columns)
        places = torch.arange(weights.count, device="cpu") if row_of is None else row_of
        places = places if sources is None else sources[places]
        logprobs = rows[moved(places, rows.device), drawn.token_ids.clamp(min=0)]
        return drawn._replace(logprobs=logprobs.masked_fill_(drawn.token_ids < 0, -_INF))

    def draw(part: RowPart) -> DrawnTokens:
        draws, part_rows = part.places, None
        if row_of is not None:
            draws = _entries_of_part(row_of, part)
            part_rows = moved(row_of[draws] - part.places.start, rows.device)
        return _draw_part(part, uniforms[draws], part_rows)

    return _draw_parts(draw, weights.parts(rows, sources), rows, uniforms)


def draw_from_logits(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_of: torch.Tensor,
    masks: RowMasks | None = None,
) -> DrawnTokens | None:
    """Draw without other weights than masks, by one softmax.

    Args:
        logits: Shape `(n, vocab_size)`, any floating dtype; all rows are computed at once.
        uniforms: Random numbers in [0, 1), float64: one per draw for draws as by `batch_draw`,
            or shape `(n, k)` for those of `batch_draw_without_replacement`.
        row_of: The row of each draw, int64, in main memory; not used for shape `(n, k)`.
        masks: Masks of the rows; None if no row has a mask.

    Returns:
        The draws; None if a row is not a distribution, or if the probability of a mask is 0 or
        underflows in float32.
    """
    device, logits = logits.device, logits.float()
    memory = scratch_memory("weights", *logits.shape) if device.type == "cpu" else None
    weights = torch.softmax(logits, -1, out=memory)
    factors = None if masks is None else masks.factors(0, len(weights), device)
    sums = masked_sums(weights, factors)
    totals = sums.sum(-1)
    if not totals.min() >= UNDERFLOW:  # true for NaN
        return None
    if masks is None and uniforms.ndim == 1:
        token_ids, draw_logprob = draw_ids(weights, sums, uniforms, moved(row_of, device))
        log_mass = torch.zeros_like(draw_logprob)
        return DrawnTokens(token_ids, draw_logprob.clone(), log_mass, draw_logprob)
    log_totals = totals.log().to(logits)
    log_mass = torch.zeros_like(log_totals) if masks is None else log_totals
    if masks is not None and masks.unrestricted is not None:
        log_mass = log_mass.masked_fill(moved(masks.unrestricted, device), 0.0)
    if uniforms.ndim > 1:
        computed = TokenWeights(logits, weights, sums, log_mass)
        ids, draw_logprob = _draw_in_turns(computed, factors, np.ones(len(weights)), uniforms)
        several = _drawn_tokens(logits, ids, log_mass, draw_logprob)
        first = logits.gather(1, ids[:, :1])
        normalisers = first - draw_logprob[:, :1] - log_totals[:, None]
        return several._replace(logprobs=several.logprobs - normalisers)
    places = moved(row_of, device)
    token_ids, draw_logprob = draw_ids(weights, sums, uniforms, places)
    logprobs = weights[places, token_ids].log_()
    return DrawnTokens(token_ids, logprobs, log_mass[places], draw_logprob)


def batch_draw_without_replacement(
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    weights: RowWeights,
    sources: torch.Tensor | None = None,
) -> DrawnTokens:
    """Draw several different tokens from each row, in sequence.

    Each token is drawn from the remaining tokens; the first token is that of `batch_draw` for
    the same number. The first 128 tokens are drawn as by `batch_draw`, all further ones at once
    by the Gumbel-top-k trick, which has the same distribution (`gumbel`). The sum of
    `draw_logprob` is the log-probability of the sequence. Draws of fewer tokens are the first
    of those of more tokens. The arguments are those of `batch_draw`, with temperatures above 0
    and `uniforms` of shape `(n, k)`.

    Returns:
        DrawnTokens of shape `(n, k)`. If a row has fewer than k tokens, the other entries are
        -1. `log_mass` is that of all tokens.
    """

    def draw(part: RowPart) -> DrawnTokens:
        return _draw_part_without_replacement(part, uniforms[part.places])

    return _draw_parts(draw, weights.parts(rows, sources), rows, uniforms)


def batch_log_mass(
    rows: torch.Tensor, weights: RowWeights, sources: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the log of the sum of `exp(logprob + bias)` over a set of tokens, for each row.

    The result has shape `(n,)`, float32, on the device of `rows`: `-inf` for an empty set, 0
    without mask and bias. Temperatures do not matter. For the arguments see `batch_draw`.
    """
    if has_kernels(rows, weights):
        zeros = torch.zeros(weights.count, dtype=torch.float64, device="cpu")
        return draw_on_device(rows, zeros, weights, sources=sources)[2]
    if not weights.count:
        return rows.new_empty(0, dtype=torch.float32)
    parts = ((compute_weights(part).log_mass,) for part in weights.parts(rows, sources))
    return joined_parts(parts, weights.count)[0]


def batch_draw_logprobs(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    weights: RowWeights,
    *,
    row_of: torch.Tensor | None = None,
    sources: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities with which `batch_draw` draws tokens.

    Args:
        rows: As `batch_draw`.
        token_ids: Shape `(n, k)`, int64, in main memory; -1 for no token. At least one n.
        weights: As `batch_draw`.
        row_of: The row of each n, as `batch_draw`.
        sources: As `batch_draw`.

    Returns:
        The log-probabilities, shape `(n, k)`: `-inf` for tokens that are not drawn, 0 for no
        token. And the log-mass of the row of each n, shape `(n,)`. Both float32, on the device
        of `rows`.
    """
    places = torch.arange(weights.count, device="cpu") if row_of is None else row_of

    def logprobs(part: RowPart) -> tuple[torch.Tensor, torch.Tensor]:
        of_part = _entries_of_part(places, part)
        return _logprobs_of_part(part, token_ids[of_part], places[of_part] - part.places.start)

    joined = joined_parts(map(logprobs, weights.parts(rows, sources)), len(token_ids))
    return joined[0], joined[1]


def _entries_of_part(row_of: torch.Tensor, part: RowPart) -> slice:
    """Return the entries of ascending indices of rows that are rows of a part."""
    ends = torch.tensor([part.places.start, part.places.stop], device="cpu")
    return slice(*torch.searchsorted(row_of, ends).tolist())


def _draw_part(
    part: RowPart, uniforms: torch.Tensor, row_of: torch.Tensor | None
) -> DrawnTokens:
    rows = part.rows
    is_greedy = part.temperatures == 0
    if is_greedy.all() and part.factors is None and part.bias is None:
        certain = rows.new_zeros(len(rows))
        log_mass = certain if part.offset is None else certain + part.offset
        best = _drawn_tokens(rows, rows.argmax(-1), log_mass, certain)
        return best if row_of is None else DrawnTokens(*(column[row_of] for column in best))
    _, weights, sums, log_mass = _limited_weights(part)
    token_ids, logprobs = draw_ids(weights, sums, uniforms, row_of)
    return _drawn_tokens(rows, token_ids, log_mass, logprobs, row_of)


def _limited_weights(part: RowPart) -> TokenWeights:
    """Compute the weights of the tokens that may be drawn; one token at temperature 0."""
    computed = compute_weights(part)
    scores, weights, sums, _ = computed
    is_greedy = part.temperatures == 0
    limited = ~is_greedy & part.truncation.applies(weights.shape[1])
    if limited.any():
        places = moved(torch.from_numpy(np.flatnonzero(limited)), weights.device)
        limited_weights = truncate(weights[places], part.truncation.of(limited))
        weights[places] = limited_weights
        sums[places.to(sums.device)] = block_sums(limited_weights)
    if is_greedy.any():
        places = moved(torch.from_numpy(np.flatnonzero(is_greedy)), weights.device)
        best_ids = masked_scores(scores, part.factors, places).argmax(-1)
        # A draw returns the only token with a weight above 0, whatever the weight.
        weights[places] = torch.zeros_like(weights[places]).scatter_(1, best_ids[:, None], 1.0)
        sums[places.to(sums.device)] = block_sums(weights[places])
    return computed


def _logprobs_of_part(
    part: RowPart, token_ids: torch.Tensor, row_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-shares of tokens in the weights, and the log-mass of each row.

    Shares that underflow in float32 are computed from the largest one.
    """
    device = part.rows.device
    scores, weights, sums, log_mass = _limited_weights(part)
    ids, rows = moved(token_ids.clamp(min=0), device), moved(row_of, device)[:, None]
    largest, best_ids = weights.max(-1, keepdim=True)
    log_shares = largest.log() - sums.sum(-1, keepdim=True).log().to(largest)
    divisors = np.where(part.temperatures == 0, 1.0, part.temperatures)
    device_divisors = moved(torch.from_numpy(divisors).to(scores.dtype), device)[:, None]
    differences = scores[rows, ids] - scores.gather(1, best_ids)[rows[:, 0]]
    logprobs = differences / device_divisors[rows[:, 0]] + log_shares[rows[:, 0]]
    is_excluded = ~(largest > 0)[rows[:, 0]]
    if part.factors is not None:
        factor_rows = rows if len(part.factors) > 1 else torch.zeros_like(rows)
        is_excluded = is_excluded | (part.factors[factor_rows, ids] == 0)
    limited = part.truncation.applies(weights.shape[1]) | (part.temperatures == 0)
    if limited.any():
        device_limited = moved(torch.from_numpy(limited), device)
        is_excluded = is_excluded | (device_limited[rows] & (weights[rows, ids] == 0))
    logprobs.masked_fill_(is_excluded, -_INF)
    return logprobs.masked_fill_(moved(token_ids < 0, device), 0.0), log_mass[rows[:, 0]]


def _draw_part_without_replacement(part: RowPart, uniforms: torch.Tensor) -> DrawnTokens:
    computed = compute_weights(part)
    token_ids, draw_logprob = _draw_in_turns(
        computed, part.factors, part.temperatures, uniforms
    )
    return _drawn_tokens(part.rows, token_ids, computed.log_mass, draw_logprob)


def _draw_in_turns(
    computed: TokenWeights,
    factors: torch.Tensor | None,
    temperatures: npt.NDArray[np.float64],
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw several different tokens from each row; changes the weights.

    Returns:
        Ids, -1 for no token, and the log of the share of each in the remaining weights, both of
        shape `(n, k)`.
    """
    scores, weights, sums, _ = computed
    in_turns, further = uniforms[:, :_DRAWS_IN_TURNS], uniforms.shape[1] - _DRAWS_IN_TURNS
    with torch.inference_mode():  # saves a fifth of the time for few rows
        first, *others = in_turns.unbind(1)
        drawn = draw_with_blocks(weights, sums, first)
        ids, logprobs = [drawn.token_ids], [drawn.logprobs]
        for numbers in others:
            weights.scatter_(1, drawn.token_ids[:, None], 0.0)
            block_sum = drawn.block_weights.scatter_(1, drawn.place[:, None], 0.0).sum(-1)
            new_sums = to_float64(block_sum)[:, None]
            if drawn.block is None:
                sums = new_sums
            else:
                sums.scatter_(1, drawn.block.to(sums.device)[:, None], new_sums)
            underflown = (sums.sum(-1) < UNDERFLOW).nonzero()[:, 0]
            if len(underflown):
                places = underflown.to(weights.device)
                earlier = torch.stack(ids, 1)[places]
                possible = masked_scores(scores, factors, places).scatter(1, earlier, -_INF)
                reweight(weights, sums, possible, temperatures, underflown)
            drawn = draw_with_blocks(weights, sums, numbers)
            ids.append(drawn.token_ids)
            logprobs.append(drawn.logprobs)
    token_ids, draw_logprob = torch.stack(ids, 1), torch.stack(logprobs, 1)
    if further > 0:
        places = torch.arange(len(scores), device=scores.device)
        possible = masked_scores(scores, factors, places).scatter_(1, token_ids, -_INF)
        remaining = to_float64(relative_scores(possible, temperatures))
        more = gumbel_top_k(remaining, uniforms[:, _DRAWS_IN_TURNS], further)
        token_ids = torch.cat([token_ids, more[0].to(token_ids)], 1)
        draw_logprob = torch.cat([draw_logprob, more[1].to(draw_logprob)], 1)
    # NaN if no token remained.
    return token_ids.masked_fill_(~(draw_logprob > -_INF), -1), draw_logprob


def _drawn_tokens(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    log_mass: torch.Tensor,
    draw_logprob: torch.Tensor,
    row_of: torch.Tensor | None = None,
) -> DrawnTokens:
    """Return draws, with token -1 for rows without a possible token; see `DrawnTokens`."""
    if row_of is None:
        columns = token_ids.clamp(min=0) if token_ids.ndim == 2 else token_ids[:, None]
        logprobs = rows.gather(1, columns).view_as(token_ids)
    else:
        logprobs, log_mass = rows[row_of, token_ids], log_mass[row_of]
    mass = log_mass if token_ids.ndim == 1 else log_mass[:, None]
    is_dead = torch.minimum(logprobs, mass).isneginf()
    if token_ids.ndim == 2:
        is_dead |= token_ids < 0
    return DrawnTokens(
        token_ids.masked_fill(is_dead, -1),
        logprobs.masked_fill(is_dead, -_INF),
        log_mass,
        draw_logprob.masked_fill(is_dead, 0.0),
    )


def _draw_parts(
    draw: Callable[[RowPart], DrawnTokens],
    parts: Iterator[RowPart],
    rows: torch.Tensor,
    uniforms: torch.Tensor,
) -> DrawnTokens:
    """Return the draws of all parts of the rows, one for each of the random numbers."""
    if not len(uniforms):
        numbers = rows.new_empty(uniforms.shape)
        return DrawnTokens(numbers.long(), numbers, rows.new_empty(0), numbers)
    return DrawnTokens(*joined_parts(map(draw, parts), len(uniforms)))
