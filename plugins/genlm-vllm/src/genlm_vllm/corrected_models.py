"""vLLM's models, corrected where they differ from transformers' definition.

vLLM builds them instead of its own by its option `model_class_overrides`, in every process that
computes. They change the modules before the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.models import apertus, bloom, commandr, gemma3n

__all__ = [
    "ApertusForCausalLM",
    "BloomForCausalLM",
    "Cohere2ForCausalLM",
    "Gemma3nForCausalLM",
]


class ApertusForCausalLM(apertus.ApertusForCausalLM):  # type: ignore[misc]
    """Apertus with the parameters of xIELU in the model's dtype, not in bfloat16."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, XIELU):
                module.to(vllm_config.model_config.dtype)


class BloomForCausalLM(bloom.BloomForCausalLM):  # type: ignore[misc]
    """BLOOM with the tanh approximation of GELU, not the exact GELU."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, bloom.BloomMLP):
                module.gelu_impl = torch.nn.GELU(approximate="tanh")


class Cohere2ForCausalLM(commandr.CohereForCausalLM):  # type: ignore[misc]
    """Cohere2 with windows of the size in its config, not one token more."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        window = config.sliding_window
        config.sliding_window = window - 1
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            config.sliding_window = window


class Gemma3nForCausalLM(gemma3n.Gemma3nForCausalLM):  # type: ignore[misc]
    """Gemma 3n with its embeddings per layer, which vLLM's model of text alone leaves out.

    vLLM also normalises their projection without scaling it by 1 / sqrt(hidden_size) before,
    which is the same but for the norm's epsilon.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        norm = self.model.self_decoder.per_layer_projection_norm
        norm.variance_epsilon *= self.config.hidden_size

    def forward(self, input_ids: Any, positions: Any, **arguments: Any) -> Any:
        """Compute hidden states as vLLM's method does, of embeddings per layer too."""
        if arguments.get("per_layer_inputs") is None and input_ids is not None:
            sizes = (self.config.num_hidden_layers, self.config.hidden_size_per_layer_input)
            embeddings = self.model.get_per_layer_input_embeddings(input_ids)
            arguments["per_layer_inputs"] = embeddings.reshape(len(input_ids), *sizes)
        return super().forward(input_ids, positions, **arguments)
