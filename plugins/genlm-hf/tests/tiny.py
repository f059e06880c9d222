"""Tiny models, their tokenizer, and the oracle: an unbatched forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from genlm import Query
from genlm_hf.engine import HFEngine

VOCAB_SIZE = 300
WIDTH = 320


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of exactly `VOCAB_SIZE` ids."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    text = "Once upon a time there was a fox who ran through the woods and the windy hills. "
    bpe.train_from_iterator(
        [text * 3, "the quick brown foxes jumped over lazy dogs " * 3], trainer
    )
    assert bpe.get_vocab_size() == VOCAB_SIZE
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def build_model(model_type: str, **settings: Any) -> Any:
    """A model with weights large enough that every token matters to every row."""
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
                elif name.endswith("sinks"):
                    parameter.normal_(0, 2)
    return model


def llama_settings(**changes: Any) -> dict[str, Any]:
    """A Llama of two layers, `WIDTH` logits and 64 positions, changed as told."""
    settings = {
        "vocab_size": WIDTH,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return settings | changes


def alone(model: Any, token_ids: Sequence[int], size: int = VOCAB_SIZE) -> torch.Tensor:
    """The oracle: the row of one sequence, unbatched, by a model without a past."""
    fresh = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = fresh(torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0, -1, :size].float().log_softmax(-1)


def answers(engine: HFEngine, requests: Iterable[Any]) -> list[Any]:
    """Put token ids, or pairs of ids and adapter, through one step of an engine."""
    count = 0
    for request in requests:
        ids, adapter = request if isinstance(request, tuple) else (request, None)
        engine.submit(Query(count, tuple(ids), adapter))
        count += 1
    completions = {c.query_id: c for c in engine.step()}
    assert sorted(completions) == list(range(count))
    return [
        completions[i].result if completions[i].error is None else completions[i].error
        for i in range(count)
    ]


def ids_of_lengths(*lengths: int) -> list[list[int]]:
    """Random sequences of these lengths, always the same ones."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
