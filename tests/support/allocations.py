"""Tensors that a computation creates: the largest one, and how many are in memory together."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocations"]


class Allocations(TorchDispatchMode):
    """Records the tensors with new memory that this thread creates while it is entered.

    Attributes:
        largest: Number of bytes of the largest tensor.
        most: Maximum number of these tensors that existed at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = 0
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None):
        result = operation(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in known:
                self.largest = max(self.largest, storage.nbytes())
                self._tensors.append(weakref.ref(leaf))
        self._tensors = [tensor for tensor in self._tensors if tensor() is not None]
        self.most = max(self.most, len(self._tensors))
        return result
