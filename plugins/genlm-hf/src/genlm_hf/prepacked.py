"""A second copy of the weights of linear layers, prepacked for oneDNN.

In float32 torch uses BLAS, which repacks the weights at every product. oneDNN, which is part
of torch, accepts prepacked weights and has faster products on many CPUs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear, pad

from genlm.plugin import free_memory_bytes

_logger = logging.getLogger("genlm_hf")

# Maximum share of the free memory for the copies.
_MEMORY_SHARE = 0.25

# With fewer weights the call costs more time than it saves (measured on two CPU cores).
_MIN_WEIGHTS = 2**16

# oneDNN packs weights for a number of tokens; this one suits all measured numbers, 1-2048.
_TOKENS = 16

# It compiles and caches code for each number of tokens, 0.5 ms and 0.7 MB per weight shape.
# Other numbers are therefore padded to one of these, or split into passes of the largest.
_SIZES = (1, 2, *range(4, 64, 4), *range(64, 128, 8), *range(128, 257, 16))

_Forward = Callable[[torch.Tensor], torch.Tensor]


class PrepackedWeights:
    """Prepacked copies of a model's weights, which forward passes on a CPU read.

    The weights of the model itself stay; later changes to them do not change the copies, which
    the engine then makes again.

    Args:
        modules: Modules of a model. Only plain linear layers on a CPU are copied, if the
            copies fit into a quarter of the free memory.

    Attributes:
        nbytes: Memory of the copies.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.nbytes = 0
        self._forwards: list[tuple[dict[str, Any], _Forward]] = []
        layers: list[tuple[Any, torch.Tensor]]
        layers = [
            (m, weight) for m in modules if (weight := _prepackable_weight(m)) is not None
        ]
        needed = sum(weight.nbytes for _, weight in layers)
        if needed > _MEMORY_SHARE * free_memory_bytes():
            _logger.info("weights are not prepacked: %d bytes are too many", needed)
            return
        with torch.inference_mode():
            for layer, weight in layers:
                forward = _prepacked_forward(weight, layer.bias)
                if forward is not None:
                    self._forwards.append((vars(layer), forward))
                    self.nbytes += weight.nbytes
        if layers and not self._forwards:
            _logger.warning(
                "none of %d weights could be prepacked, so forward passes on this CPU are "
                "slower (the log level INFO shows why); prepack=False suppresses this message",
                len(layers),
            )

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let the layers use the copies within this context."""
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in self._forwards:
                del attributes["forward"]


def _prepackable_weight(layer: torch.nn.Module) -> torch.Tensor | None:
    """Return the weight of a layer that can be prepacked, `(outputs, inputs)`."""
    from transformers.pytorch_utils import Conv1D

    # Subclasses and layers whose forward was replaced (accelerate) compute something else.
    if type(layer) not in {torch.nn.Linear, Conv1D} or "forward" in vars(layer):
        return None
    weight = layer.weight
    if type(weight) is not torch.nn.Parameter or weight.numel() < _MIN_WEIGHTS:
        return None
    if weight.device.type != "cpu" or not _is_supported(weight.dtype):
        return None
    return weight.detach() if type(layer) is torch.nn.Linear else weight.detach().T


def _is_supported(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())  # noqa: SLF001
    return dtype == torch.float32


def _prepacked_forward(weight: torch.Tensor, bias: torch.Tensor | None) -> _Forward | None:
    """Return a forward pass on a prepacked copy, None if it fails or is inexact on this CPU."""
    product = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
    outputs, inputs = weight.shape

    def forward(states: torch.Tensor) -> torch.Tensor:
        if states.numel() // inputs in _SIZES:
            output: torch.Tensor = product(states, copy, bias, "none", [], "")
            return output
        parts = torch.split(states.reshape(-1, inputs), _SIZES[-1])
        if len(parts) == 1:
            return padded_product(parts[0]).view(*states.shape[:-1], outputs)
        joined = states.new_empty(*states.shape[:-1], outputs)
        targets = torch.split(joined.view(-1, outputs), _SIZES[-1])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(padded_product(part))  # one part at a time is in memory twice
        return joined

    def padded_product(states: torch.Tensor) -> torch.Tensor:
        count = len(states)
        states = pad(states, (0, 0, 0, _SIZES[bisect_left(_SIZES, count)] - count))
        output: torch.Tensor = product(states, copy, bias, "none", [], "")[:count]
        return output

    try:
        copy = reorder(weight.contiguous(), _TOKENS)
        is_exact = _products_agree(forward, lambda states: linear(states, weight, bias), weight)
    except RuntimeError as error:
        _logger.info("oneDNN refuses a weight of shape %s: %s", tuple(weight.shape), error)
        return None
    if not is_exact:
        _logger.info("oneDNN's products differ for a weight of shape %s", tuple(weight.shape))
    return forward if is_exact else None


def _products_agree(left: _Forward, right: _Forward, weight: torch.Tensor) -> bool:
    """Whether two functions that multiply by a weight agree up to rounding."""
    states = torch.linspace(-1, 1, weight.shape[1]).to(weight.dtype)[None]
    difference = (left(states) - right(states)).float().abs()[0]
    scale = states.float().norm() * weight.norm(dim=1, dtype=torch.float32)
    rounding = max(1e-5, 4 * torch.finfo(weight.dtype).eps)
    return bool((difference <= rounding * scale).all())
