"""`OutputCache` as published, on the core's."""

from __future__ import annotations

from collections.abc import Hashable

import torch

import genlm

__all__ = ["OutputCache"]


class OutputCache(genlm.OutputCache):
    """Maps to `genlm.OutputCache`, with the published spelling and `cache[key]`.

    Rows go in and come out as copies; overwriting evicts no other row.

    Args:
        maxsize: Maximum number of rows; 0 disables the cache.
        move_to_cpu: Store rows in main memory; `get` returns them on their original device.
        max_bytes: Maximum size in bytes; None for no limit.
    """

    def __init__(
        self, maxsize: int, move_to_cpu: bool = False, *, max_bytes: int | None = None
    ) -> None:
        super().__init__(maxsize, max_bytes=max_bytes, move_to_cpu=move_to_cpu)

    @property
    def maxsize(self) -> int:
        """Maximum number of rows."""
        return self.max_entries

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        row: torch.Tensor | None = self.get(key)
        if row is None:
            raise KeyError(key)
        return row

    def __setitem__(self, key: Hashable, value: torch.Tensor) -> None:
        self.put(key, value)
