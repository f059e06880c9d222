"""The same reductions in plain torch: without Triton, on MPS, and for a few nodes.

Follows the plan as the kernels do, one torch operation for each level and turn; whatever
has no float64 (MPS) is served, because the arithmetic is done in the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch

from genlm_trie_cuda.placed import PlacedPlan

__all__ = ["Operation", "reduce_ranks", "reduce_rows"]

Operation = Literal["sum", "max", "logsumexp"]

State: TypeAlias = tuple[torch.Tensor, ...]
"""Values of slots, `(rows, slots)`: for `logsumexp` the largest log-weight and the sum of
exponentials relative to it, for the others one tensor."""


def reduce_rows(
    placed: PlacedPlan, operation: Operation, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """Reduce each row of weights over all nodes.

    Args:
        placed: Plan of the trie, on the device of the weights.
        operation: What to do with the weights below a node.
        rows: `(rows, n_tokens)`, floating.
        out: `(rows, n_nodes)`, float32 or float64; overwritten. The arithmetic is done
            in its dtype.
    """
    n_tokens = rows.shape[1]
    leaves = out[:, :n_tokens]
    leaves.copy_(rows)
    out[:, n_tokens:] = reduce_ranks(placed, operation, leaves.index_select(1, placed.order))


def reduce_ranks(placed: PlacedPlan, operation: Operation, ranks: torch.Tensor) -> torch.Tensor:
    """Reduce weights that are sorted already.

    Args:
        placed: The plan, on the device of the weights.
        operation: What to do with them.
        ranks: The weight at each rank, `(rows, n_ranks)`, float32 or float64.

    Returns:
        The value of each entry of the plan's `source`, `(rows, n_sources)`.
    """
    slots = _tree(placed, operation, ranks)
    intervals = _assembled(placed, operation, slots)
    if operation == "logsumexp":
        intervals = (intervals[0] + intervals[1].log(),)
    return torch.cat([slots[0], intervals[0]], 1).index_select(1, placed.source)


def _tree(placed: PlacedPlan, operation: Operation, ranks: torch.Tensor) -> State:
    """Fill the levels, and put all slots below the intervals side by side."""
    combine = _COMBINE[operation]
    ranks = _padded(ranks, placed.plan.padded)
    entries: State = (ranks,)
    if operation == "logsumexp":
        entries = (ranks, torch.ones_like(ranks))
    levels = [entries]
    for stage in placed.plan.stages:
        entries = tuple(_padded(value, stage.padded) for value in entries)
        for _ in range(placed.plan.block.bit_length() - 1):
            left = tuple(value[:, ::2] for value in entries)
            right = tuple(value[:, 1::2] for value in entries)
            entries = combine(left, right)
            levels.append(entries)
    return tuple(torch.cat(list(values), 1) for values in zip(*levels, strict=True))


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]))


def _assembled(placed: PlacedPlan, operation: Operation, slots: State) -> State:
    """Put every interval together from its pieces, small ones first."""
    combine = _COMBINE[operation]
    n_intervals = len(placed.plan.piece_count)
    intervals = tuple(value.new_empty((len(value), n_intervals)) for value in slots)
    offset = 0
    for turn, count in enumerate(placed.turns):
        which = placed.piece[offset : offset + count]
        offset += count
        pieces = tuple(value.index_select(1, which) for value in slots)
        so_far = tuple(value[:, :count] for value in intervals)
        combined = combine(so_far, pieces) if turn else pieces
        for value, result in zip(so_far, combined, strict=True):
            value.copy_(result)
    return intervals


def _sums(left: State, right: State) -> State:
    return (left[0] + right[0],)


def _maxima(left: State, right: State) -> State:
    return (torch.maximum(left[0], right[0]),)


def _logsumexps(left: State, right: State) -> State:
    top = torch.maximum(left[0], right[0])
    shift = torch.where(top.isfinite(), top, torch.zeros_like(top))
    total = left[1] * (left[0] - shift).exp() + right[1] * (right[0] - shift).exp()
    return top, total


_COMBINE: Mapping[Operation, Callable[[State, State], State]] = {
    "sum": _sums,
    "max": _maxima,
    "logsumexp": _logsumexps,
}
