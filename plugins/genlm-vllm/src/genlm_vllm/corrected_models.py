"""vLLM's models with what they compute otherwise than transformers' definition put right.

vLLM builds these instead of its own by its option `model_class_overrides`, in every process
that computes. They change what a model is built of before its weights are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.models import apertus, bloom, commandr

__all__ = ["ApertusForCausalLM", "BloomForCausalLM", "Cohere2ForCausalLM"]


class ApertusForCausalLM(apertus.ApertusForCausalLM):  # type: ignore[misc]
    """Apertus with the parameters of xIELU in the model's dtype; vLLM has them in bfloat16."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, XIELU):
                module.to(vllm_config.model_config.dtype)


class BloomForCausalLM(bloom.BloomForCausalLM):  # type: ignore[misc]
    """BLOOM with the tanh approximation of GELU; vLLM computes the exact one."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, bloom.BloomMLP):
                module.gelu_impl = torch.nn.GELU(approximate="tanh")


class Cohere2ForCausalLM(commandr.CohereForCausalLM):  # type: ignore[misc]
    """Cohere2 with windows of as many tokens as its config says; vLLM adds one."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        window = config.sliding_window
        config.sliding_window = window - 1
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            config.sliding_window = window
