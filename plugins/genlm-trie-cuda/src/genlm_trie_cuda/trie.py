"""`DeviceTrie`: a token trie that reduces weights on their device."""

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from genlm.plugin import TokenCharacterTrie, WeightsError
from genlm_trie_cuda.plan import TreePlan

if TYPE_CHECKING:
    import torch

    from genlm_trie_cuda.torch_path import Operation

Kernels: TypeAlias = Literal["triton", "torch"]


class DeviceTrie(TokenCharacterTrie):
    """A `TokenCharacterTrie` that reduces weights on their device.

    Weights on a CUDA device (NVIDIA or AMD) are reduced by Triton kernels, weights on other
    devices by torch operations, and weights on the CPU, numpy included, by
    `TokenCharacterTrie`. Nodes and methods are those of `TokenCharacterTrie`.

    On a device sums are computed in float32 (float64 weights in float64) over a balanced
    tree without subtraction: with `m` tokens below a node the error is at most
    `3 log2(m) + 2` roundings of the sum of absolute values. `logsumexp` shifts by the
    largest log-weight below each node. bfloat16 and float16 are converted when they are
    read. Integers become float64, on MPS float32. Rows are independent of each other.

    With `returns="torch"` the result stays on the device. Reductions of all nodes then do
    not wait for the device and can be captured in a CUDA graph. The first reduction on a
    device, and the first with another operation, dtype or number of rows, copies index arrays
    and compiles kernels, so run it once before capturing. Reductions of some nodes copy
    indices on every call and wait for the copy.

    Args:
        decode: As for `TokenCharacterTrie`.
        device: Device that reduces weights on the CPU, for example `"cuda"`; with
            `returns="torch"` their results stay there. None reduces them on the CPU.
        kernels: `"triton"` or `"torch"` to use only this implementation, on the CPU as well
            (Triton only in its interpreter).
        compiled: As for `TokenCharacterTrie`, for the weights that it reduces; by default
            False if `device` or `kernels` excludes all weights from it.

    Attributes:
        kernels: The argument `kernels`.

    Raises:
        VocabularyError: As for `TokenCharacterTrie`.
        ValueError: `kernels` is an unknown name.
        RuntimeError: torch does not support the device.
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
        self._device_plans: dict[torch.device, TreePlan] = {}

    @property
    def device(self) -> torch.device | None:
        """The device that reduces weights on the CPU; None for the CPU."""
        return self._device

    def reduce_rows(self, rows: Any, operation: Operation) -> Any:
        """Reduce rows over all nodes; see `TokenCharacterTrie.reduce_rows`."""
        weights = self._device_rows(rows)
        if weights is None:
            return super().reduce_rows(rows, operation)
        import torch

        from genlm_trie_cuda.torch_path import reduce_rows, result_dtype

        device = weights.device
        if self._kernels_on(device) == "triton":
            from genlm_trie_cuda.triton_path import reduce_rows
        shape = (len(weights), self.layout.n_nodes)
        out = torch.empty(shape, dtype=result_dtype(weights), device=device)
        reduce_rows(self._plan_on(device), operation, weights, out)
        return out

    def reduce_nodes(
        self, rows: Any, nodes: npt.NDArray[np.int64], operation: Operation
    ) -> Any:
        """Reduce rows over some nodes; see `TokenCharacterTrie.reduce_nodes`."""
        weights = self._device_rows(rows)
        if weights is None:
            return super().reduce_nodes(rows, nodes, operation)
        from genlm_trie_cuda.torch_path import reduce_nodes

        return reduce_nodes(self.layout, nodes, operation, weights)

    def _device_rows(self, rows: Any) -> torch.Tensor | None:
        """Return floating rows on the device that reduces them; None if the base class does."""
        is_array = isinstance(rows, np.ndarray)
        on_cpu = is_array or rows.device.type == "cpu"
        if on_cpu and self.kernels is None and self._device is None:
            return None
        import torch

        device = (self._device or torch.device("cpu")) if on_cpu else rows.device
        if device.type == "cpu" and self.kernels is None:
            return None
        try:
            if is_array:  # torch takes neither negative strides nor another byte order
                rows = np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
            weights = torch.tensor(rows, device=device) if is_array else rows.to(device)
        except TypeError as error:  # a numpy dtype without an equivalent in torch
            raise WeightsError("real numbers", f"values of type {rows.dtype}") from error
        if not weights.is_floating_point():
            return weights.to(torch.float32 if device.type == "mps" else torch.float64)
        return weights.float() if weights.element_size() < 2 else weights

    def _kernels_on(self, device: torch.device) -> Kernels:
        if self.kernels is not None:
            return self.kernels
        has_triton = importlib.util.find_spec("triton") is not None
        return "triton" if device.type == "cuda" and has_triton else "torch"

    def _plan_on(self, device: torch.device) -> TreePlan:
        """Return the plan on a device, to which it is copied once."""
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
