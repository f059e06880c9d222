"""Llamas of real shapes with random weights, created on the device that runs them.

For `bench_gpu.py` and its peer's process; it imports only transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

__all__ = ["SHAPES", "device_clock", "random_llama"]

# Of Llama 3.2 1B and Llama 3.1 8B, with the vocabulary of the project's other figures.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 8_000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest of vLLM's CPU build
        "tie_word_embeddings": True,
    },
}


def random_llama(shape: str, device: str) -> Any:
    """A Llama with random weights, always the same on a device; bfloat16 but on a CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = transformers.LlamaConfig(**SHAPES[shape], max_position_embeddings=4096)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def device_clock(device: str) -> Callable[[], float]:
    """A clock in seconds that first waits until the device has computed everything."""
    if device == "cpu":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
