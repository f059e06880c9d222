"""Reductions in torch operations: of all nodes without Triton, and of some nodes.

They follow the same plan as the kernels, with one torch operation per level and per k-th piece
for `ROWS_AT_ONCE` rows. They compute in the dtype of the result, so devices without float64
(MPS) are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.plugin import TrieLayout
from genlm_trie_cuda.plan import ROWS_AT_ONCE, TreePlan

Operation = Literal["sum", "max", "logsumexp"]

State: TypeAlias = tuple[torch.Tensor, ...]
"""Values of slots, `(rows, slots)`: one tensor, or for `logsumexp` two: the largest log-weight
and the sum of exponentials relative to it."""


def result_dtype(rows: torch.Tensor) -> torch.dtype:
    """Return the dtype of results: float64 for float64, else float32."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def reduce_rows(
    plan: TreePlan, operation: Operation, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """Reduce each row of weights over all nodes.

    Args:
        plan: Plan of the trie, on the device of the weights.
        operation: Reduction of the weights below a node.
        rows: `(rows, n_tokens)`, floating.
        out: `(rows, n_nodes)`, float32 or float64; overwritten. Its dtype is that of the
            computation.
    """
    n_tokens = rows.shape[1]
    parts = torch.split(rows, ROWS_AT_ONCE), torch.split(out, ROWS_AT_ONCE)
    for weights, nodes in zip(*parts, strict=True):
        leaves = nodes[:, :n_tokens]
        leaves.copy_(weights)
        ranks = leaves.index_select(1, plan.order)
        nodes[:, n_tokens:] = _reduce_ranks(plan, operation, ranks)


def reduce_nodes(
    layout: TrieLayout, nodes: npt.NDArray[Any], operation: Operation, rows: torch.Tensor
) -> torch.Tensor:
    """Reduce the weights below some nodes, in time O(number of tokens below them) per row.

    The host computes a plan for the nodes and copies it to the device.

    Args:
        layout: Layout of the trie.
        nodes: Valid nodes in any order, nested or repeated, `(k,)`.
        operation: Reduction of the weights below a node.
        rows: `(rows, n_tokens)`, floating.

    Returns:
        `(rows, k)`, float64 for float64, else float32, on the device of the weights.
    """
    if not len(nodes):
        return rows.new_empty((len(rows), 0), dtype=result_dtype(rows))
    ranks, lo, hi = layout.ranks_below(nodes)
    tokens = torch.from_numpy(layout.order[ranks]).to(rows.device)
    source = len(ranks) + np.arange(len(nodes))
    plan = TreePlan.of(np.arange(len(ranks)), lo, hi, source).to(rows.device)
    parts = [
        _reduce_ranks(plan, operation, part.index_select(1, tokens).to(result_dtype(rows)))
        for part in torch.split(rows, ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def _reduce_ranks(plan: TreePlan, operation: Operation, ranks: torch.Tensor) -> torch.Tensor:
    """Reduce sorted weights, `(rows, n_ranks)`, to the entries of the plan's `source`."""
    slots = _compute_levels(plan, operation, ranks)
    intervals = _combine_pieces(plan, operation, slots)
    if operation == "logsumexp":
        intervals = (intervals[0] + intervals[1].log(),)
    return torch.cat([slots[0], intervals[0]], 1).index_select(1, plan.source)


def _compute_levels(plan: TreePlan, operation: Operation, ranks: torch.Tensor) -> State:
    """Compute all levels of the tree, concatenated: the slots before the intervals."""
    combine = _COMBINE[operation]
    ranks = _pad(ranks, plan.padded)
    entries: State = (ranks,)
    if operation == "logsumexp":
        entries = (ranks, torch.ones_like(ranks))
    levels = [entries]
    for stage in plan.stages:
        entries = tuple(_pad(value, stage.padded) for value in entries)
        for _ in range(plan.block.bit_length() - 1):
            left = tuple(value[:, ::2] for value in entries)
            right = tuple(value[:, 1::2] for value in entries)
            entries = combine(left, right)
            levels.append(entries)
    return tuple(torch.cat(list(values), 1) for values in zip(*levels, strict=True))


def _pad(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]))


def _combine_pieces(plan: TreePlan, operation: Operation, slots: State) -> State:
    """Combine the pieces of every interval, smallest first."""
    combine = _COMBINE[operation]
    n_intervals = len(plan.piece_count)
    intervals = tuple(value.new_empty((len(value), n_intervals)) for value in slots)
    offset = 0
    for k, count in enumerate(plan.piece_sizes):
        slot_indices = plan.piece[offset : offset + count]
        offset += count
        pieces = tuple(value.index_select(1, slot_indices) for value in slots)
        partial = tuple(value[:, :count] for value in intervals)
        combined = combine(partial, pieces) if k else pieces
        for value, result in zip(partial, combined, strict=True):
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
