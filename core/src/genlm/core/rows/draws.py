"""Drawing from all rows of a batch at once, and the mass of sets of tokens.

A draw inverts the cumulative distribution at a uniform number, in the order of the ids. It
depends on its row, its number and its settings alone, not on the other rows of the batch.
Rows are computed a part at a time: the memory that is needed beside them is bounded, whatever
their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.rows.logits import moved, scratch_memory
from genlm.core.rows.row_weights import RowPart, RowWeights
from genlm.core.rows.selection import (
    SUM_BLOCK,
    block_sums,
    truncated,
    wide,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    Numbers: TypeAlias = Sequence[Any] | npt.NDArray[Any] | torch.Tensor

__all__ = [
    "DrawnTokens",
    "batch_draw",
    "batch_draw_without_replacement",
    "batch_log_mass",
    "draw_from_logits",
]

_FAINT = 1e-20
"""A sum of weights below it has underflowed in float32."""

_LEAST_TEMPERATURE = 1e-30
"""Lower temperatures are raised to it: only the most likely id keeps a weight above 0."""

_LARGEST_SHARE = 1 - 2.0**-52
"""A sum times it is below the sum, rounded too."""

_INF = float("inf")


class DrawnTokens(NamedTuple):
    """A token drawn for each member of a population, or from each row.

    The tensors of a population's draws are in main memory, those of `batch_draw` on the device
    of the rows.

    Attributes:
        token_ids: Shape `(n,)`, int64; -1 where there is no token to draw.
        logprobs: The model's log-probability of each token, shape `(n,)`, float32.
        log_mass: Log of the total probability of the allowed tokens, after `bias`, shape
            `(n,)`, float32: the increment of a particle's log-weight. `-inf` for a member
            without an allowed token, 0 for a finished member.
        draw_logprob: The log-probability with which each token was drawn, shape `(n,)`,
            float32.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    log_mass: torch.Tensor
    draw_logprob: torch.Tensor


def batch_draw(
    rows: torch.Tensor,
    uniforms: Numbers,
    weights: RowWeights | None = None,
    *,
    row_of: torch.Tensor | None = None,
) -> DrawnTokens:
    """Draw a token from each row, with probability proportional to its weight.

    A row without any token that may be drawn has token -1, and `-inf` for the other entries.

    Args:
        rows: Log-probabilities, shape `(n, vocab_size)`, float32, on any device; not changed.
        uniforms: Random numbers in [0, 1), one per draw, shape `(n,)` or that of `row_of`,
            float64.
        weights: Weights of the tokens; None for the unchanged probabilities.
        row_of: The row of each draw, ascending, int64, in main memory, where rows are drawn
            from several times or not at all; by default draw i is from row i.
    """
    weights = weights or RowWeights(rows.shape)
    numbers = _numbers(uniforms, len(rows) if row_of is None else len(row_of), 1)
    parts = []
    for part in weights.parts(rows):
        own, here = part.places, None
        if row_of is not None:
            ends = torch.tensor([own.start, own.stop])
            own = slice(*torch.searchsorted(row_of, ends).tolist())
            here = moved(row_of[own] - part.places.start, rows.device)
        parts.append(_drawn(part, numbers[own], here))
    return _joined(parts, rows, ())


def draw_from_logits(
    logits: torch.Tensor, uniforms: torch.Tensor, row_of: torch.Tensor
) -> DrawnTokens:
    """Draw as `batch_draw` does without weights; NaN for a row that is not a distribution.

    Args:
        logits: Shape `(n, vocab_size)`, float32, of which one part is computed at once.
        uniforms: Random numbers in [0, 1), float64, one per draw.
        row_of: The row of each draw, int64, in main memory.
    """
    memory = None
    if logits.device.type == "cpu":
        memory = scratch_memory("weights", *logits.shape)
    weights = torch.softmax(logits, -1, out=memory)
    drawn = _inverted(weights, block_sums(weights), uniforms, moved(row_of, logits.device))
    logprobs = drawn.logprobs
    return DrawnTokens(drawn.token_ids, logprobs, torch.zeros_like(logprobs), logprobs.clone())


def batch_draw_without_replacement(
    rows: torch.Tensor,
    uniforms: Numbers,
    weights: RowWeights | None = None,
) -> DrawnTokens:
    """Draw several different tokens from each row, one after the other.

    Each token is drawn as by `batch_draw` from those that are left, the first with the same
    number the same. Ordered sequences of tokens then have the distribution of the Gumbel-top-k
    trick (Kool, van Hoof, Welling: "Stochastic beams and where to find them", 2019), and the
    sum of `draw_logprob` is the log-probability of the sequence.

    Args:
        rows: As `batch_draw`.
        uniforms: Numbers in [0, 1), shape `(n, k)`, float64: one for each draw.
        weights: As `batch_draw`, of temperatures above 0.

    Returns:
        DrawnTokens of shape `(n, k)`. Where a row has fewer tokens than k, -1 follows them.
        `log_mass` is that of all tokens.
    """
    weights = weights or RowWeights(rows.shape)
    if weights.is_greedy:
        raise ValueError("draws without replacement at temperature 0 are those of batch_top_k")
    numbers = _numbers(uniforms, len(rows), 2)
    parts = [_drawn_in_turn(part, numbers[part.places]) for part in weights.parts(rows)]
    return _joined(parts, rows, (numbers.shape[1],))


def batch_log_mass(rows: torch.Tensor, weights: RowWeights | None = None) -> torch.Tensor:
    """Return the log of the sum of `exp(logprob + bias)` over a set of tokens, for each row.

    The result has shape `(n,)`, float32, on the device of `rows`: `-inf` for an empty set, 0
    without mask and bias. Temperatures do not matter.
    """
    weights = weights or RowWeights(rows.shape)
    parts = [_weighted(part).log_mass for part in weights.parts(rows)]
    return torch.cat(parts) if parts else rows.new_empty(0, dtype=torch.float32)


def _numbers(values: Numbers, count: int, ndim: int) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        numbers = values.double()
    else:
        numbers = torch.tensor(values, dtype=torch.float64)
    if numbers.ndim != ndim or len(numbers) != count:
        expected = "(n,)" if ndim == 1 else "(n, k)"
        raise ValueError(
            f"uniform numbers of shape {tuple(numbers.shape)} for {count} rows; expected "
            f"shape {expected}"
        )
    return numbers


class _Weighted(NamedTuple):
    """Unnormalised probabilities of tokens."""

    scores: torch.Tensor
    """Log-probabilities plus bias."""
    weights: torch.Tensor
    sums: torch.Tensor
    """`block_sums` of the weights."""
    log_mass: torch.Tensor


def _weighted(part: RowPart) -> _Weighted:
    """Return weights of rows.

    Weights are shares of the row's sum, which torch computes in one operation that is fast
    for any values; on CPUs the exponential of -inf is slow. Where the tokens of the mask are so
    unlikely that their shares underflow, weights are computed again, relative to the likeliest
    of these.
    """
    rows = part.rows
    scores = rows if part.bias is None else rows + part.bias
    log_mass = rows.new_zeros(len(rows))
    is_tempered = bool(np.any((part.temperatures != 0) & (part.temperatures != 1)))
    has_mass = part.factors is not None or part.bias is not None
    totals = None
    if has_mass or not is_tempered:
        weights = torch.softmax(scores, -1, out=part.memory)
        if part.bias is not None:
            log_mass += scores.amax(-1) - weights.amax(-1).log()  # of the sum of all tokens
        sums = _masked_sums(weights, part.factors)
        totals = sums.sum(-1)
        if part.factors is not None:
            shares = totals.log().to(log_mass)
            if part.unrestricted is not None:
                shares.masked_fill_(part.unrestricted, 0.0)
            log_mass += shares
    if is_tempered:
        tempered_scores = _tempered(scores, part.temperatures)
        weights = torch.softmax(tempered_scores, -1, out=part.memory)
        sums = _masked_sums(weights, part.factors)
        tempered = sums.sum(-1)
        totals = tempered if totals is None else torch.minimum(totals, tempered)
    assert totals is not None  # noqa: S101 - one of the two was computed
    is_faint = ~(totals >= _FAINT)  # NaN where no token is possible
    if is_faint.any():
        faint = is_faint.nonzero()[:, 0]
        places = faint.to(rows.device)
        possible = _masked_scores(scores, part.factors, places)
        log_mass[places] = possible.logsumexp(-1)
        _reweight(weights, sums, possible, part.temperatures, faint)
    if part.offset is not None:
        log_mass += part.offset
    return _Weighted(scores, weights, sums, log_mass)


def _reweight(
    weights: torch.Tensor,
    sums: torch.Tensor,
    scores: torch.Tensor,
    temperatures: npt.NDArray[np.float64],
    rows: torch.Tensor,
) -> None:
    """Compute the weights of some rows in place, relative to the largest of their scores."""
    chosen = temperatures[rows.cpu().numpy()]
    made = _tempered(scores, chosen).exp_()
    weights[rows.to(weights.device)] = made
    sums[rows] = block_sums(made)


def _masked_sums(weights: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Multiply weights by 0 or 1 in place, and return their `block_sums`."""
    if factors is not None:
        weights.mul_(factors)
    return block_sums(weights)


def _masked_scores(
    scores: torch.Tensor, factors: torch.Tensor | None, places: torch.Tensor
) -> torch.Tensor:
    """Return scores of some rows, `-inf` outside their masks."""
    if factors is None:
        return scores[places]
    of_rows = factors if len(factors) == 1 else factors[places]
    return scores[places].masked_fill_(of_rows == 0, -_INF)


def _tempered(scores: torch.Tensor, temperatures: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return scores less the largest, divided by temperatures; by 1 instead of 0."""
    largest = scores.amax(-1, keepdim=True)
    # Rows without a possible token would become NaN.
    shifted = scores - largest.masked_fill(largest.isneginf(), 0.0)
    # The largest is 0 before the division, which could make all of them -inf.
    divisors = np.where(temperatures == 0, 1.0, np.maximum(temperatures, _LEAST_TEMPERATURE))
    by = moved(torch.from_numpy(divisors).to(shifted.dtype), shifted.device)
    return shifted.div_(by[:, None])


def _drawn(part: RowPart, uniforms: torch.Tensor, row_of: torch.Tensor | None) -> DrawnTokens:
    rows = part.rows
    is_greedy = part.temperatures == 0
    if is_greedy.all() and part.factors is None and part.bias is None:
        certain = rows.new_zeros(len(rows))
        log_mass = certain if part.offset is None else certain + part.offset
        best = _found(rows, rows.argmax(-1), log_mass, certain)
        return best if row_of is None else DrawnTokens(*(column[row_of] for column in best))
    scores, weights, sums, log_mass = _weighted(part)
    limited = ~is_greedy & ((part.top_k < rows.shape[1]) | (part.top_p < 1))
    if limited.any():
        places = moved(torch.from_numpy(np.flatnonzero(limited)), rows.device)
        kept = truncated(weights[places], part.top_k[limited], part.top_p[limited])
        weights[places] = kept
        sums[places.to(sums.device)] = block_sums(kept)
    if is_greedy.any():
        places = moved(torch.from_numpy(np.flatnonzero(is_greedy)), rows.device)
        best_ids = _masked_scores(scores, part.factors, places).argmax(-1)
        # The only token that is left, of any weight: a draw takes it.
        weights[places] = torch.zeros_like(weights[places]).scatter_(1, best_ids[:, None], 1.0)
        sums[places.to(sums.device)] = block_sums(weights[places])
    drawn = _inverted(weights, sums, uniforms, row_of)
    return _found(rows, drawn.token_ids, log_mass, drawn.logprobs, row_of)


def _drawn_in_turn(part: RowPart, uniforms: torch.Tensor) -> DrawnTokens:
    rows = part.rows
    scores, weights, sums, log_mass = _weighted(part)
    count = uniforms.shape[1]
    token_ids = torch.empty(len(rows), count, dtype=torch.long, device=rows.device)
    draw_logprob = torch.empty(len(rows), count, dtype=rows.dtype, device=rows.device)
    for turn in range(count):
        drawn = _inverted(weights, sums, uniforms[:, turn], None)
        draw_logprob[:, turn] = drawn.logprobs
        token_ids[:, turn] = torch.where(drawn.logprobs > -_INF, drawn.token_ids, -1)
        if turn == count - 1:
            break
        weights.scatter_(1, drawn.token_ids[:, None], 0.0)
        rest = drawn.inside.scatter_(1, drawn.place[:, None], 0.0).sum(-1)
        sums.scatter_(1, drawn.block.to(sums.device)[:, None], wide(rest)[:, None])
        faint = (sums.sum(-1) < _FAINT).nonzero()[:, 0]
        if len(faint):
            places = faint.to(rows.device)
            possible = _masked_scores(scores, part.factors, places)
            earlier = token_ids[places, : turn + 1]
            is_drawn = torch.zeros_like(possible, dtype=torch.bool)
            is_drawn.scatter_(1, earlier.clamp(min=0), earlier >= 0)
            possible = possible.masked_fill(is_drawn, -_INF)
            _reweight(weights, sums, possible, part.temperatures, faint)
    return _found(rows, token_ids, log_mass, draw_logprob)


def _found(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    log_mass: torch.Tensor,
    draw_logprob: torch.Tensor,
    row_of: torch.Tensor | None = None,
) -> DrawnTokens:
    """Return draws, those of rows without a possible token marked."""
    if row_of is None:
        columns = token_ids if token_ids.ndim == 2 else token_ids[:, None]
        logprobs = rows.gather(1, columns.clamp(min=0)).view_as(token_ids)
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
        draw_logprob.masked_fill(is_dead, -_INF),
    )


def _joined(
    parts: list[DrawnTokens], rows: torch.Tensor, shape: tuple[int, ...]
) -> DrawnTokens:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        ids = torch.empty(0, *shape, dtype=torch.long, device=rows.device)
        numbers = rows.new_empty(0, *shape)
        return DrawnTokens(ids, numbers, rows.new_empty(0), numbers.clone())
    return DrawnTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class _Inverted(NamedTuple):
    """Ids drawn from rows, in the blocks that have them."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    """Log of each id's share of the sum of its row."""
    block: torch.Tensor
    """Block of each id."""
    inside: torch.Tensor
    """Copy of the weights of these blocks, shape `(n, ids)`."""
    place: torch.Tensor
    """Place of each id in `inside`."""


def _inverted(
    weights: torch.Tensor,
    sums: torch.Tensor,
    uniforms: torch.Tensor,
    row_of: torch.Tensor | None,
) -> _Inverted:
    """Draw an id from rows in proportion to their weights.

    Two levels: only the sums of blocks and one block of each row are in float64.
    """
    share = moved(uniforms, sums.device)[:, None]
    own = sums if row_of is None else sums.index_select(0, row_of.to(sums.device))
    if own.shape[1] == 1:
        blocks = torch.zeros_like(own, dtype=torch.long)
        totals = own
    else:
        cumulative = own.cumsum(-1)
        totals = cumulative[:, -1:]
        # A multiple of 2**-53 below 1 times the total is below the total, rounded too.
        thresholds = share * totals
        blocks = torch.searchsorted(cumulative, thresholds, right=True)
        blocks = blocks.clamp_(max=sums.shape[1] - 1)  # rows of zeros
        end, width = cumulative.gather(1, blocks), own.gather(1, blocks)
        share = (thresholds - (end - width)).div_(width)
    block = blocks.to(weights.device)[:, 0]
    inside, first = _inside(weights, block, row_of)
    within = wide(inside).cumsum(-1)
    # The largest share stands for the last id that has a weight.
    thresholds = share.clamp(0, _LARGEST_SHARE).mul_(within[:, -1:])
    places = torch.searchsorted(within, thresholds, right=True)
    places = places.clamp_(max=within.shape[1] - 1).to(weights.device)  # rows of zeros
    logprobs = (inside.gather(1, places) / totals.to(inside)).log_()[:, 0]
    place = places[:, 0]
    return _Inverted(first + place, logprobs, block, inside, place)


def _inside(
    weights: torch.Tensor, block: torch.Tensor, row_of: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return as many weights of some rows as a block has, and the id of the first of them.

    They end with the row if the block is its last one; weights before the block are then 0.
    """
    size = weights.shape[1]
    if row_of is None:
        row_of = torch.arange(len(weights), device=weights.device)
    if size <= SUM_BLOCK:
        return weights[row_of], torch.zeros_like(row_of)
    first = (block * SUM_BLOCK).clamp_(max=size - SUM_BLOCK)
    # Faster than indexing by rows and places.
    blocks = weights.view(-1).unfold(0, SUM_BLOCK, 1)
    found = blocks.index_select(0, torch.add(first, row_of, alpha=size))
    if size % SUM_BLOCK:
        before = SUM_BLOCK - size % SUM_BLOCK
        found[:, :before].mul_((block < size // SUM_BLOCK)[:, None])
    return found, first
