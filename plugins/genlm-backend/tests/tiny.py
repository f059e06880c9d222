"""A tiny Llama, its tokenizer, and the oracle: an unbatched forward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

SIZE = 258
"""Ids of the tokenizer: two special ones and 256 bytes."""

WIDTH = 320
"""Logits of the model, more than the tokenizer has ids."""

CONTEXT = 64


def make_tokenizer() -> Any:
    """One id for each byte, and `<s>` and `</s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: token_id for token_id, name in enumerate(["<s>", "</s>", *alphabet])}
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>"
    )


def make_model(**changes: Any) -> Any:
    """A Llama of two layers whose every token matters to every row."""
    config = transformers.LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
    return model


def alone(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The oracle: the row of one sequence, unbatched, by a copy without a past."""
    fresh = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = fresh(torch.tensor([list(token_ids)]), use_cache=False).logits
    row: torch.Tensor = logits[0, -1, :SIZE].float().log_softmax(-1)
    return row


def rows_alone(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([alone(model, token_ids) for token_ids in sequences])


def assert_right(found: torch.Tensor, model: Any, *sequences: Sequence[int]) -> None:
    """Compare rows with the oracle's."""
    expected = rows_alone(model, sequences)
    torch.testing.assert_close(found.reshape(expected.shape), expected, atol=1e-4, rtol=0)
