"""`DeviceTrie`: a token trie that reduces weights on their device."""

from __future__ import annotations

import importlib.util
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from genlm.plugin import TokenCharacterTrie
from genlm_trie_cuda.plan import DevicePlan, TreePlan
from genlm_trie_cuda.weights import as_rows, as_tensor, result_dtype, stacked

if TYPE_CHECKING:
    import torch

    from genlm_trie_cuda.torch_path import Operation

__all__ = ["DeviceTrie", "Kernels", "Returns"]

Returns: TypeAlias = Literal["numpy", "torch"]
Kernels: TypeAlias = Literal["triton", "torch"]


class DeviceTrie(TokenCharacterTrie):
    """A `TokenCharacterTrie` that reduces weights on the device that holds them.

    Weights on a CUDA device (NVIDIA or AMD) are reduced by Triton kernels, weights on other
    devices by torch operations, and weights on the CPU, numpy included, by
    `TokenCharacterTrie`. Nodes, mappings and methods are those of `TokenCharacterTrie`.

    On a device sums are computed in float32 (float64 weights in float64) over a balanced
    tree without subtraction: with `m` tokens below a node the error is at most
    `3 log2(m) + 2` roundings of the sum of absolute values. `logsumexp` shifts by the
    largest log-weight below each node. bfloat16 and float16 are converted when they are
    read. Integers become float64, on MPS float32. Rows are independent of each other.

    With `returns="torch"` the result stays on the device. Reductions of all nodes then do
    not wait for the device and can be captured in a CUDA graph. The first reduction on a
    device, or of another operation, dtype or number of rows, copies index arrays and
    compiles, so run it once before capturing. Reductions of some nodes copy indices on every
    call and wait for the copy.

    Args:
        decode: As for `TokenCharacterTrie`.
        device: Device that reduces weights on the CPU, for example `"cuda"`; with
            `returns="torch"` their results stay there. None reduces them on the CPU.
        kernels: `"triton"` or `"torch"` to use only these, on the CPU as well (Triton only
            in its interpreter).
        compiled: As for `TokenCharacterTrie`, for weights that it reduces; by default False
            if `device` or `kernels` leaves none to it.

    Attributes:
        kernels: As given.

    Raises:
        VocabularyError: As for `TokenCharacterTrie`.
        ValueError: `kernels` is neither of the two.
        RuntimeError: torch does not know the device.
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
        self._device = _torch_device(device)
        self.kernels = kernels
        if compiled is None and (kernels or (self._device and self._device.type != "cpu")):
            compiled = False  # all weights are reduced by this class
        super().__init__(decode, compiled=compiled)
        self._device_plans: dict[torch.device, DevicePlan] = {}
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device | None:
        """The device that reduces weights on the CPU; None for the CPU."""
        return self._device

    def reduce(self, ws: Any, operation: Operation, *, batch: bool, returns: Returns) -> Any:
        """Reduce weights over all nodes; implements the `weight_` methods."""
        ws = stacked(ws, self.layout.n_tokens) if batch else ws
        tensor = self._device_tensor(ws)
        if tensor is None:
            return super().reduce(ws, operation, batch=batch, returns=returns)
        import torch

        rows = as_rows(tensor, self.layout.n_tokens, (2,) if batch else (1,))
        _check(returns)
        shape = (len(rows), self.layout.n_nodes)
        out = torch.empty(shape, dtype=result_dtype(rows), device=rows.device)
        plan = self._plan_on(rows.device)
        if self._kernels_on(rows.device) == "triton":
            from genlm_trie_cuda.triton_path import reduce_rows
        else:
            from genlm_trie_cuda.torch_path import reduce_rows
        with torch.no_grad():
            reduce_rows(plan, operation, rows, out)
        return _delivered(out if batch else out[0], returns)

    def reduce_some(
        self, ws: Any, nodes: npt.NDArray[np.int64], operation: Operation, *, returns: Returns
    ) -> Any:
        """Reduce weights below some nodes; implements the `partial_` methods."""
        tensor = self._device_tensor(ws)
        if tensor is None:
            return super().reduce_some(ws, nodes, operation, returns=returns)
        import torch

        from genlm_trie_cuda.torch_path import reduce_nodes

        rows = as_rows(tensor, self.layout.n_tokens, (1, 2))
        _check(returns)
        with torch.no_grad():
            result = reduce_nodes(self.layout, nodes, operation, rows)
        return _delivered(result if tensor.ndim == 2 else result[0], returns)

    def _device_tensor(self, ws: Any) -> torch.Tensor | None:
        """The weights as a tensor on the device that reduces them; None for the core."""
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

    def _plan_on(self, device: torch.device) -> DevicePlan:
        """The plan on a device, copied there once."""
        with self._lock:
            if device not in self._device_plans:
                self._device_plans[device] = self._plan.to(device)
            return self._device_plans[device]

    @cached_property
    def _plan(self) -> TreePlan:
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
