"""Memory traffic of the kernels of genlm-trie-cuda, counted from the plan.

On 128,000 tokens with 415,907 prefixes, 32 rows of float32, in megabytes:

    floor               86   weights read once (16), every node written once (70)
    load_weights        49   weights read, leaves written, ranks written
    build_trees         33   ranks read, slots above them written
    combine_intervals   23   pieces read, intervals written
    gather_prefixes    106   slots read, prefixes written

With 3 for indices the total is 214 for a sum, and 240 for logsumexp. The 86 must go through
memory. The rest are slots, 40 MB for 32 rows, read shortly after they are written; they fit
into the second-level cache of an H100 (50 MB).
"""

from __future__ import annotations

from genlm_trie_cuda.plan import ROWS_AT_ONCE, TreePlan
from genlm_trie_cuda.torch_path import Operation

__all__ = ["floor_bytes", "kernel_bytes"]

INDEX_BYTES = 4


def floor_bytes(plan: TreePlan, *, rows: int, weight_bytes: int, value_bytes: int) -> int:
    """Bytes that any method reads and writes: weights once, every node once.

    Args:
        plan: Plan of the trie.
        rows: Number of rows.
        weight_bytes: Bytes of a weight.
        value_bytes: Bytes of a result.
    """
    n_tokens = len(plan.order)
    n_nodes = n_tokens + len(plan.source)
    return rows * (n_tokens * weight_bytes + n_nodes * value_bytes)


def kernel_bytes(
    plan: TreePlan, operation: Operation, *, rows: int, weight_bytes: int, value_bytes: int
) -> int:
    """Bytes that the kernels request, ignoring caches.

    A group of rows is counted as the rows it has, though slots are laid out for the next
    power of 2.

    Args:
        plan: Plan of the trie.
        operation: `"logsumexp"` has two values for each slot above the ranks.
        rows: Number of rows.
        weight_bytes: Bytes of a weight.
        value_bytes: Bytes of a result.
    """
    values = _load_values(plan) + _tree_values(plan, operation)
    values += _interval_values(plan, operation) + 2 * len(plan.source)
    indices = len(plan.rank_of) + len(plan.piece) + len(plan.source)
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


def _interval_values(plan: TreePlan, operation: Operation) -> int:
    total = len(plan.piece) + len(plan.piece_count)
    if operation == "logsumexp":
        total += int((plan.piece >= plan.padded).sum())
    return total
