"""`RowWorker`: what vLLM's workers can be asked for through `collective_rpc`.

vLLM mixes it into its worker class (`worker_extension_cls`), in this process or in
another; the methods' names begin with `genlm_` so that they hide none of vLLM's.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from genlm_vllm.kept_rows import KEPT, TokenIds

__all__ = ["RowWorker"]


class RowWorker:
    """Gives out the rows that `Capture` kept."""

    def genlm_begin(self, size: int, missing_ids: list[int]) -> None:
        """Say which ids rows are over, before the first request.

        Tensor-parallel ranks compute the same logits; the first of them keeps rows.
        """
        first = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank
        KEPT.begin(TokenIds(size, tuple(missing_ids)), active=first)

    def genlm_take(self, keys: list[int], oldest: int) -> dict[int, torch.Tensor]:
        """Hand over rows within this process; see `KeptRows.take`."""
        return KEPT.take(keys, oldest)

    def genlm_take_bytes(self, keys: list[int], oldest: int) -> tuple[list[int], bytes]:
        """Hand over rows to another process: their keys, and float32 one after another."""
        rows = KEPT.take(keys, oldest)
        if not rows:
            return [], b""
        return list(rows), torch.stack(list(rows.values())).cpu().numpy().tobytes()

    def genlm_end(self) -> None:
        """Forget all rows; the engine is about to close."""
        KEPT.begin(TokenIds(0), active=False)
