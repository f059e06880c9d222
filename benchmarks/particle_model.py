"""The model, tokenizer and prompts of the engines' benchmarks, with transformers alone.

Imported also where only the peer's packages are installed.
"""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

VOCAB_SIZE = 8000


def llama(vocab_size: int = VOCAB_SIZE, *, tiny: bool = False) -> Any:
    """A Llama with random weights, always the same; of 31 million parameters by default.

    A tiny one costs nearly nothing but has as many ids.
    """
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64 if tiny else 512,
        intermediate_size=64 if tiny else 1376,
        num_hidden_layers=1 if tiny else 8,
        num_attention_heads=2 if tiny else 8,
        num_key_value_heads=1 if tiny else 4,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def tokenizer(vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level tokenizer of as many ids as the model has; its merges are arbitrary."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet]
    triples = [(a + b, c) for a, b in pairs[:300] for c in alphabet]  # up to 142,592 ids
    merges = [*pairs, *triples][: vocab_size - len(alphabet)]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe)


def save_model(folder: Path, vocab_size: int, *, tiny: bool = False) -> None:
    """Save the Llama with as many ids as wanted, and the tokenizer for them."""
    llama(vocab_size, tiny=tiny).save_pretrained(folder)
    tokenizer(vocab_size).save_pretrained(folder)


def cache_argument(model: Any, cache: transformers.Cache) -> dict[str, Any]:
    """Return a cache as the argument of `forward` that transformers 5.24 has renamed."""
    renamed = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


def prompt_of(length: int) -> list[int]:
    """A prompt of random ids, always the same."""
    generator = random.Random(length)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]
