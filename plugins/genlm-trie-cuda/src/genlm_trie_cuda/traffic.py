"""Bytes that the kernels move, counted from the plan: what a benchmark divides by time.

On 128,000 tokens with 415,907 prefixes, 32 rows of float32, in megabytes:

    floor       86   weights read once (16), every node written once (70)
    load        49   weights read, leaves written, ranks written
    build       33   ranks read, slots above them written
    assemble    23   pieces read, intervals written
    spread     106   slots read, prefixes written

which with 3 for indices makes 214 for a sum and 240 for logsumexp. The 86 must go through
memory; the rest are slots, 40 MB for 32 rows, written shortly before they are read and so,
where they fit, served by the second-level cache (50 MB on an H100). Not measured on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from genlm_trie_cuda.plan import ROWS_AT_ONCE, TreePlan

if TYPE_CHECKING:
    from genlm_trie_cuda.torch_path import Operation

__all__ = ["floor_bytes", "kernel_bytes"]

INDEX_BYTES = 4


def floor_bytes(plan: TreePlan, *, rows: int, weight_bytes: int, value_bytes: int) -> int:
    """Bytes that any method moves: weights read once, every node written once.

    Args:
        plan: Of the trie.
        rows: Of weights.
        weight_bytes: Of one weight.
        value_bytes: Of one result.
    """
    n_tokens = len(plan.order)
    n_nodes = n_tokens + len(plan.source)
    return rows * (n_tokens * weight_bytes + n_nodes * value_bytes)


def kernel_bytes(
    plan: TreePlan, operation: Operation, *, rows: int, weight_bytes: int, value_bytes: int
) -> int:
    """Bytes that the kernels ask for, caches left out of account.

    A group of rows is counted as the rows it has, though slots are laid out for the next
    power of 2.

    Args:
        plan: Of the trie.
        operation: `"logsumexp"` has two values for each slot above the ranks.
        rows: Of weights.
        weight_bytes: Of one weight.
        value_bytes: Of one result.
    """
    values = _load_values(plan) + _tree_values(plan, operation)
    values += _assemble_values(plan, operation) + 2 * len(plan.source)
    indices = len(plan.place) + len(plan.piece) + len(plan.source)
    tiles_indices = 2 * (len(plan.piece_offset) - 1) + len(plan.piece_count)
    groups = -(-rows // ROWS_AT_ONCE)
    return (
        rows * (len(plan.order) * weight_bytes + values * value_bytes)
        + groups * (indices + tiles_indices) * INDEX_BYTES
    )


def _load_values(plan: TreePlan) -> int:
    return 2 * len(plan.order)


def _tree_values(plan: TreePlan, operation: Operation) -> int:
    total = 0
    for number, stage in enumerate(plan.stages):
        above = stage.padded - stage.padded // plan.block
        total += stage.count + above
        if operation == "logsumexp":
            total += above + (stage.count if number else 0)
    return total


def _assemble_values(plan: TreePlan, operation: Operation) -> int:
    total = len(plan.piece) + len(plan.piece_count)
    if operation == "logsumexp":
        total += int((plan.piece >= plan.padded).sum())
    return total
