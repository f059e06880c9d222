"""`RowsOnCpu`: the engine of genlm-hf with rows where published ones are.

Apart from `hf`, because it imports transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import genlm
from genlm_hf.engine import HFEngine

__all__ = ["RowsOnCpu"]


class RowsOnCpu(HFEngine):
    """Maps to `HFEngine`; its rows are on the CPU, wherever the model is."""

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        """Compute the row of each query."""
        return super().evaluate(queries).cpu()
