"""`DeviceTrie`: the core's token trie, with reductions where the weights are."""

from __future__ import annotations

import importlib.util
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from genlm import TokenCharacterTrie
from genlm_trie_cuda.plan import TreePlan
from genlm_trie_cuda.rows import as_rows, as_tensor, result_dtype, stacked

if TYPE_CHECKING:
    import torch

    from genlm_trie_cuda.placed import PlacedPlan
    from genlm_trie_cuda.torch_path import Operation

__all__ = ["DeviceTrie", "Kernels", "Returns"]

Returns: TypeAlias = Literal["numpy", "torch"]
Kernels: TypeAlias = Literal["triton", "torch"]


class DeviceTrie(TokenCharacterTrie):
    """A `TokenCharacterTrie` that reduces weights on the device they are on.

    Nodes, views and every method are those of the core's trie. Weights on a CUDA device
    (NVIDIA's or AMD's) go through Triton kernels, those on other devices through torch,
    and those on the CPU, numpy's among them, through the core's own reductions: so on a
    machine without a GPU this trie is the core's.

    On a device sums are added in float32 (float64 weights in float64) over a balanced
    tree and without subtraction: with `m` tokens below a node the error is at most
    `3 log2(m) + 2` roundings of the sum of absolute values. Log-weights are shifted by
    the largest below each node. bfloat16 and float16 are widened when they are read.
    Integers are float64, on MPS float32. A row's values don't depend on the others.

    With `returns="torch"` the result stays on the device. Reductions of all nodes then do
    not wait for the device and can be captured in a CUDA graph; the first one there, or of
    another operation, dtype or number of rows, copies index arrays and compiles: do it
    once before capturing. Those of some nodes copy indices each time, and wait for that.

    Args:
        decode: As for `TokenCharacterTrie`.
        device: Where to reduce weights that are on the CPU, `"cuda"` for example; their
            results of `returns="torch"` stay there. None leaves them on the CPU.
        kernels: `"triton"` or `"torch"` for these and no others, on the CPU as well
            (Triton's only in its interpreter).
        compiled: As for `TokenCharacterTrie`; for weights that are left to it.

    Attributes:
        kernels: As given.

    Raises:
        VocabularyError: As for `TokenCharacterTrie`.
        ValueError: There are no such kernels.
        RuntimeError: torch knows no such device.
    """

    def __init__(
        self,
        decode: Any,
        *,
        device: str | torch.device | None = None,
        kernels: Kernels | None = None,
        compiled: bool | None = None,
    ) -> None:
        if kernels is not None and kernels not in get_args(Kernels):
            raise ValueError(
                f"kernels={kernels!r}: expected one of {get_args(Kernels)} or None"
            )
        super().__init__(decode, compiled=compiled)
        self._device = _torch_device(device)
        self.kernels = kernels
        self._placed: dict[torch.device, PlacedPlan] = {}
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device | None:
        """Where weights on the CPU are reduced; None: on the CPU."""
        return self._device

    def reduce(self, ws: Any, operation: Operation, *, batch: bool, returns: Returns) -> Any:
        """Do what the `weight_` methods do, for all nodes."""
        ws = stacked(ws, self.layout.n_tokens) if batch else ws
        tensor = self._elsewhere(ws)
        if tensor is None:
            return super().reduce(ws, operation, batch=batch, returns=returns)
        import torch

        rows = as_rows(tensor, self.layout.n_tokens, (2,) if batch else (1,))
        _check(returns)
        shape = (len(rows), self.layout.n_nodes)
        out = torch.empty(shape, dtype=result_dtype(rows), device=rows.device)
        placed = self._on(rows.device)
        if self._kernels_on(rows.device) == "triton":
            from genlm_trie_cuda.launches import reduce_rows
        else:
            from genlm_trie_cuda.torch_path import reduce_rows
        with torch.no_grad():
            reduce_rows(placed, operation, rows, out)
        return _delivered(out if batch else out[0], returns)

    def reduce_some(
        self, ws: Any, nodes: npt.NDArray[np.int64], operation: Operation, *, returns: Returns
    ) -> Any:
        """Do what the `partial_` methods do, for some nodes; not for CUDA graphs."""
        tensor = self._elsewhere(ws)
        if tensor is None:
            return super().reduce_some(ws, nodes, operation, returns=returns)
        import torch

        from genlm_trie_cuda.some_nodes import reduce_nodes

        rows = as_rows(tensor, self.layout.n_tokens, (1, 2))
        _check(returns)
        with torch.no_grad():
            result = reduce_nodes(self.layout, nodes, operation, rows)
        return _delivered(result if tensor.ndim == 2 else result[0], returns)

    def _elsewhere(self, ws: Any) -> torch.Tensor | None:
        """The weights as a tensor on the device to reduce on; None for the core's numpy."""
        device = self._device
        if device is None and self.kernels is not None:
            device = _torch_device("cpu")
        tensor = as_tensor(ws, device)
        if tensor is None or (tensor.device.type == "cpu" and self.kernels is None):
            return None
        return tensor

    def _kernels_on(self, device: torch.device) -> Kernels:
        if self.kernels is not None:
            return self.kernels
        has_triton = importlib.util.find_spec("triton") is not None
        return "triton" if device.type == "cuda" and has_triton else "torch"

    def _on(self, device: torch.device) -> PlacedPlan:
        """The plan on a device, copied there once."""
        from genlm_trie_cuda.placed import PlacedPlan

        with self._lock:
            if device not in self._placed:
                self._placed[device] = PlacedPlan.on(self._tree, device)
            return self._placed[device]

    @cached_property
    def _tree(self) -> TreePlan:
        return TreePlan.of_layout(self.layout)


def _torch_device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    import torch

    return torch.device(device)


def _check(returns: Returns) -> None:
    if returns not in get_args(Returns):
        raise ValueError(f"returns={returns!r}: expected one of {get_args(Returns)}")


def _delivered(result: torch.Tensor, returns: Returns) -> Any:
    return result if returns == "torch" else result.cpu().numpy()
