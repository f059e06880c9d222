"""Launching the kernels: five for a group of rows, six above 16,384 tokens.

For each group of up to 32 rows the weights are read once, and every node is written
once. In between, values go through slots (see `plan`); one group's slots are reused by
the next and, for real vocabularies, about as large as a GPU's second-level cache.
Nothing here waits for the device, and every size is known on the host, so a call can be
captured in a CUDA graph once the kernels are compiled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from genlm_trie_cuda import kernels
from genlm_trie_cuda.placed import PlacedPlan
from genlm_trie_cuda.plan import ROWS_AT_ONCE
from genlm_trie_cuda.torch_path import Operation

__all__ = ["reduce_rows"]

ROWS_OF_A_TREE = 8
"""Rows of one program that builds trees; a sector of 32 bytes holds as many float32."""

TILE = 1024
"""Values of a tile of few rows."""

NARROWEST = 64
"""Slots of a tile of many rows; a row of the result is then written 256 bytes at a time."""

_OPTIONS = {"enable_fp_fusion": True}
"""Said explicitly, because Triton is changing the default and warns of it."""

_CODES: dict[Operation, int] = {"sum": 0, "max": 1, "logsumexp": 2}


def reduce_rows(
    placed: PlacedPlan, operation: Operation, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """Reduce each row of weights over all nodes.

    Args:
        placed: Plan of the trie, on the device of the weights.
        operation: What to do with the weights below a node.
        rows: `(rows, n_tokens)`, a floating dtype that Triton knows, any strides.
        out: `(rows, n_nodes)`, float32 or float64, rows contiguous; overwritten. The
            arithmetic is done in its dtype.
    """
    with _on_device_of(out):
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            group = slice(begin, begin + ROWS_AT_ONCE)
            _reduce_group(placed, _CODES[operation], rows[group], out[group])


def _reduce_group(
    placed: PlacedPlan, operation: int, rows: torch.Tensor, out: torch.Tensor
) -> None:
    plan = placed.plan
    n_tokens, n_rows = len(plan.order), len(rows)
    group = triton.next_power_of_2(n_rows)
    slots = torch.empty(plan.n_slots * group, dtype=out.dtype, device=out.device)
    above = plan.first_interval - plan.padded if operation == _CODES["logsumexp"] else 0
    sums = torch.empty(above * group, dtype=out.dtype, device=out.device)
    constants = {"OPERATION": operation, "GROUP": group, **_OPTIONS}
    tile = max(TILE // group, NARROWEST)
    kernels.load[(triton.cdiv(n_tokens, tile),)](
        rows, slots, out, placed.place, n_tokens, n_rows,
        rows.stride(0), rows.stride(1), out.stride(0), GROUP=group, TOKENS=tile, **_OPTIONS,
    )  # fmt: skip
    for number, stage in enumerate(plan.stages):
        tree_rows = min(group, ROWS_OF_A_TREE)
        kernels.build_trees[(stage.padded // plan.block, group // tree_rows)](
            slots, sums, stage.first, stage.count, stage.padded, stage.upper, plan.padded,
            OVER_RANKS=number == 0, ROWS=tree_rows, BLOCK=plan.block,
            LEVELS=plan.block.bit_length() - 1, **constants,
        )  # fmt: skip
    if len(plan.piece_count):
        kernels.assemble[(triton.cdiv(len(plan.piece_count), tile),)](
            slots, sums, placed.piece, placed.piece_offset, placed.piece_count, plan.padded,
            plan.first_interval, len(plan.piece_count), INTERVALS=tile, **constants,
        )  # fmt: skip
    kernels.spread[(triton.cdiv(len(plan.source), tile),)](
        slots, out, placed.source, n_tokens, len(plan.source), n_rows, out.stride(0),
        GROUP=group, PREFIXES=tile, **_OPTIONS,
    )  # fmt: skip


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
