"""Packs weights again when they are replaced on a CPU, where vLLM packs some of them only once.

vLLM's CPU build computes with packed copies of weights. When weights are replaced, it packs
those of linear layers again, but neither those of experts, which it packs when it builds their
kernel, nor those of an output embedding that is tied to the input embedding, because a
checkpoint has no weights for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def packing_again(model: torch.nn.Module) -> Iterator[None]:
    """Make vLLM pack all weights that are replaced in the context; only needed on a CPU."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )
    from vllm.platforms import current_platform

    layers = list(model.modules()) if current_platform.is_cpu() else []
    methods = {layer: getattr(layer, "quant_method", None) for layer in layers}
    kernels = {
        method: method.moe_kernel
        for method in methods.values()
        if isinstance(method, UnquantizedFusedMoEMethod)
    }
    for method in kernels:
        method.moe_kernel = None  # vLLM builds it again when it processes new weights
    yield
    for method, kernel in kernels.items():
        if method.moe_kernel is None:
            method.moe_kernel = kernel
    for layer, method in methods.items():
        if isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
