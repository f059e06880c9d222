"""Reductions by the Triton kernels: five launches per group of rows, six above 16,384 tokens.

Each group of up to 32 rows reads its weights once and writes every node once. Intermediate
values are stored in slots (see `plan`), about as large as a GPU's second-level cache for
128,000 tokens. The launches do not wait for the device and all sizes are known on the host,
so a call can be captured in a CUDA graph once the kernels are compiled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from genlm_trie_cuda import kernels
from genlm_trie_cuda.plan import ROWS_AT_ONCE, TreePlan
from genlm_trie_cuda.torch_path import Operation

TREE_ROWS = 16
"""Number of rows of a program of `build_trees`. On an H100, sums of 32 rows of 128,000 float32
take 112 us with 16, 120 with 8 and 147 with 4, as a CUDA graph."""

TILE = 1024
"""Number of values of a tile, unless it has many rows."""

MIN_SLOTS = 128
"""Minimum number of slots of a tile, so that rows are written 512 bytes at a time. With 64,
sums of 32 rows of 128,000 float32 take 7 % longer on an H100."""

_OPTIONS = {"enable_fp_fusion": True}
"""Explicit because Triton warns that the default will change."""

_CODES: dict[Operation, int] = {"sum": 0, "max": 1, "logsumexp": 2}


def reduce_rows(
    plan: TreePlan, operation: Operation, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """Reduce each row of weights over all nodes; see `torch_path.reduce_rows`.

    The weights are of a dtype that Triton supports; the rows of `out` are contiguous.
    """
    with _on_device_of(out):
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            group = slice(begin, begin + ROWS_AT_ONCE)
            _reduce_group(plan, _CODES[operation], rows[group], out[group])


def _reduce_group(
    plan: TreePlan, operation: int, rows: torch.Tensor, out: torch.Tensor
) -> None:
    n_tokens, n_rows = len(plan.order), len(rows)
    group = triton.next_power_of_2(n_rows)
    slots = torch.empty(plan.n_slots * group, dtype=out.dtype, device=out.device)
    above = plan.first_interval - plan.padded if operation == _CODES["logsumexp"] else 0
    sums = torch.empty(above * group, dtype=out.dtype, device=out.device)
    constants = {"OPERATION": operation, "GROUP": group, **_OPTIONS}
    tile = max(TILE // group, MIN_SLOTS)
    kernels.load_weights[(triton.cdiv(n_tokens, tile),)](
        rows, slots, out, plan.rank_of, n_tokens, n_rows,
        rows.stride(0), rows.stride(1), out.stride(0), GROUP=group, TOKENS=tile, **_OPTIONS,
    )  # fmt: skip
    for number, stage in enumerate(plan.stages):
        tree_rows = min(group, TREE_ROWS)
        kernels.build_trees[(stage.padded // plan.block, group // tree_rows)](
            slots, sums, stage.first, stage.count, stage.padded, stage.upper, plan.padded,
            OVER_RANKS=number == 0, ROWS=tree_rows, BLOCK=plan.block,
            LEVELS=plan.block.bit_length() - 1, **constants,
        )  # fmt: skip
    if len(plan.piece_count):
        kernels.combine_intervals[(triton.cdiv(len(plan.piece_count), tile),)](
            slots, sums, plan.piece, plan.piece_offset, plan.piece_count, plan.padded,
            plan.first_interval, len(plan.piece_count), INTERVALS=tile, **constants,
        )  # fmt: skip
    kernels.gather_prefixes[(triton.cdiv(len(plan.source), tile),)](
        slots, out, plan.source, n_tokens, len(plan.source), n_rows, out.stride(0),
        GROUP=group, PREFIXES=tile, **_OPTIONS,
    )  # fmt: skip


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because Triton launches kernels on that device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
