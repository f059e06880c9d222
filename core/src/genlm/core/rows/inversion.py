"""Inverse-transform sampling: token ids at given shares of the cumulative weights of rows.

The search has two levels: only the sums of blocks of weights and one block of each row are
accumulated in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from genlm.core.rows.logits import moved, row_parts
from genlm.core.rows.selection import SUM_BLOCK, to_float64

_LARGEST_SHARE = 1 - 2.0**-52
"""A sum times this share is below the sum, also after rounding."""


class DrawnIds(NamedTuple):
    """Ids drawn from rows, and the blocks of weights that contain them."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    """Log of each id's share of the sum of its row."""
    block: torch.Tensor | None
    """Block of each id; None if each row is one block."""
    block_weights: torch.Tensor
    """The weights of these blocks, shape `(n, ids)`."""
    place: torch.Tensor
    """Place of each id in `block_weights`."""


def draw_ids(
    weights: torch.Tensor,
    sums: torch.Tensor,
    uniforms: torch.Tensor,
    row_of: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids from rows in proportion to their weights, some draws at a time.

    Args:
        weights: Shape `(rows, ids)`, not negative.
        sums: The `block_sums` of the weights.
        uniforms: Random numbers in [0, 1), one for each draw, float64.
        row_of: Row of each draw, int64, on the device of the weights; by default draw i is from
            row i.

    Returns:
        Ids, and the log of each id's share of the sum of its row.
    """
    parts = row_parts(len(uniforms), SUM_BLOCK, weights.device)
    if len(parts) == 1:
        return draw_with_blocks(weights, sums, uniforms, row_of)[:2]
    ids, logprobs = [weights.new_empty(0, dtype=torch.long)], [weights.new_empty(0)]
    for begin, end in parts:
        part = slice(begin, end)
        rows = part if row_of is None else slice(None)
        part_rows = None if row_of is None else row_of[part]
        drawn = draw_with_blocks(weights[rows], sums[rows], uniforms[part], part_rows)
        ids.append(drawn.token_ids)
        logprobs.append(drawn.logprobs)
    return torch.cat(ids), torch.cat(logprobs)


def draw_with_blocks(
    weights: torch.Tensor,
    sums: torch.Tensor,
    uniforms: torch.Tensor,
    row_of: torch.Tensor | None = None,
) -> DrawnIds:
    """Draw ids as `draw_ids`, all at once, and return the blocks that contain them."""
    first = block = None
    if weights.shape[1] <= SUM_BLOCK:
        block_weights = weights if row_of is None else weights.index_select(0, row_of)
        within = to_float64(block_weights).cumsum(-1)
        ends = totals = within[:, -1:]
        share = moved(uniforms, within.device)[:, None]
    else:
        share = moved(uniforms, sums.device)[:, None]
        row_sums = sums if row_of is None else sums.index_select(0, row_of.to(sums.device))
        cumulative = row_sums.cumsum(-1)
        totals = cumulative[:, -1:]
        # A multiple of 2**-53 below 1, times the total, is below the total, even when rounded.
        thresholds = share * totals
        blocks = torch.searchsorted(cumulative, thresholds, right=True)
        blocks = blocks.clamp_(max=sums.shape[1] - 1)  # rows of zeros
        end, width = cumulative.gather(1, blocks), row_sums.gather(1, blocks)
        share = (thresholds - (end - width)).div_(width)
        block = blocks.to(weights.device)[:, 0]
        block_weights, first = _block_weights(weights, block, row_of)
        within = to_float64(block_weights).cumsum(-1)
        ends = within[:, -1:]
    # The largest share selects the last id that has a weight.
    thresholds = share.clamp(0, _LARGEST_SHARE).mul_(ends)
    places = torch.searchsorted(within, thresholds, right=True)
    places = places.clamp_(max=within.shape[1] - 1).to(weights.device)  # rows of zeros
    logprobs = (block_weights.gather(1, places) / totals.to(block_weights)).log_()[:, 0]
    place = places[:, 0]
    token_ids = place if first is None else first + place
    return DrawnIds(token_ids, logprobs, block, block_weights, place)


def _block_weights(
    weights: torch.Tensor, block: torch.Tensor, row_of: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the weights of a block of each of some rows; also return the id of the first weight.

    The last block of a row may be shorter. The weights before it are then returned as 0, so
    that all blocks have the same size.
    """
    size = weights.shape[1]
    if row_of is None:
        row_of = torch.arange(len(weights), device=weights.device)
    first = (block * SUM_BLOCK).clamp_(max=size - SUM_BLOCK)
    # Faster than indexing by rows and places.
    blocks = weights.view(-1).unfold(0, SUM_BLOCK, 1)
    block_weights = blocks.index_select(0, torch.add(first, row_of, alpha=size))
    if size % SUM_BLOCK:
        before = SUM_BLOCK - size % SUM_BLOCK
        block_weights[:, :before].mul_((block < size // SUM_BLOCK)[:, None])
    return block_weights, first
