"""The model, tokenizer and prompt of `bench_hf_particles.py`, with transformers alone.

Imported also where only the peer's packages are installed.
"""

from __future__ import annotations

import random
from typing import Any

import tokenizers
import torch
import transformers

VOCAB_SIZE = 8000


def llama() -> Any:
    """A Llama of 31 million parameters with random weights, always the same."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def tokenizer() -> Any:
    """A byte-level tokenizer of as many ids as the model has; its merges are arbitrary."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet][: VOCAB_SIZE - len(alphabet)]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe)


def prompt_of(length: int) -> list[int]:
    """A prompt of random ids, always the same."""
    generator = random.Random(length)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]
