"""Weights of some nodes of a trie, on the device of the weights.

The host plans which ranks to read and how to combine them; only these weights are read,
and nothing comes back to the host. Time is O(tokens below the nodes) for each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm import TrieLayout
from genlm_trie_cuda.placed import PlacedPlan
from genlm_trie_cuda.plan import TreePlan
from genlm_trie_cuda.rows import result_dtype
from genlm_trie_cuda.torch_path import Operation, reduce_ranks

__all__ = ["reduce_nodes"]


def reduce_nodes(
    layout: TrieLayout, nodes: npt.NDArray[Any], operation: Operation, rows: torch.Tensor
) -> torch.Tensor:
    """Reduce the weights below each of some nodes.

    Args:
        layout: Of the trie.
        nodes: Valid nodes in any order, nested or repeated, `(k,)`.
        operation: What to do with the weights below a node.
        rows: `(rows, n_tokens)`, floating.

    Returns:
        `(rows, k)`, float64 for float64, else float32, on the device of the weights.
    """
    if not len(nodes):
        return rows.new_empty((len(rows), 0), dtype=result_dtype(rows))
    ranks, lo, hi = layout.ranks_below(nodes)
    tokens = torch.from_numpy(layout.order[ranks]).to(rows.device)
    source = len(ranks) + np.arange(len(nodes))
    plan = TreePlan.of(np.arange(len(ranks)), lo, hi, source)
    placed = PlacedPlan.on(plan, rows.device)
    read = rows.index_select(1, tokens)
    return reduce_ranks(placed, operation, read.to(result_dtype(rows)))
