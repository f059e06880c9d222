"""Bits per byte of the demo model, and of the n-grams with which it is compared.

Bits per byte is the code length of a text under a model, divided by its length in
UTF-8 bytes:

    bits per byte = -sum over documents of log2 p(document, end) / number of bytes

It does not depend on tokens, so models with different vocabularies can be
compared. `p(document, end)` includes the mark that ends a document, for every model;
the marks are not counted as bytes. English prose has 8 bits per byte when stored,
about 4.5 with letter frequencies alone, and roughly 1 for the best models.

For the transformer, it is the cost of the tokenizer's tokenization: an upper
bound, since other tokenizations spell the same bytes. The n-grams are
`genlm.core.reference.ngram.NgramModel`, whose interpolation weights are estimated from the
training text (Witten and Bell, 1991).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from genlm.core.reference.ngram import END_OF_TEXT, NgramModel

WINDOWS_PER_BATCH = 16
NGRAMS = {"trigram": 3, "unigram": 1}


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> list[np.ndarray]:
    """Encode each document between two end-of-text tokens."""
    end = tokenizer.eos_token_id
    ids = tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array([end, *row, end]) for row in ids]


def token_bits(model: LlamaForCausalLM, documents: Sequence[np.ndarray], context: int) -> float:
    """Return the code length in bits of `documents`, each with its end mark.

    A document longer than the context is scored in windows that overlap by half, so
    that every token has at least half a context, or all there is, before it.
    """
    windows = []
    for document in documents:
        for start in range(0, max(1, len(document) - 1 - context // 2), context // 2):
            piece = document[start : start + context + 1]
            windows.append((piece, 0 if start == 0 else context // 2))
    windows.sort(key=lambda window: len(window[0]))
    total = 0.0
    model.eval()
    for i in range(0, len(windows), WINDOWS_PER_BATCH):
        group = windows[i : i + WINDOWS_PER_BATCH]
        ids = torch.zeros(len(group), len(group[-1][0]), dtype=torch.long)
        scored = torch.zeros(ids.shape, dtype=torch.bool)
        for row, (piece, skip) in enumerate(group):
            ids[row, : len(piece)] = torch.from_numpy(piece)
            scored[row, skip + 1 : len(piece)] = True
        with torch.no_grad():
            logprobs = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
        losses = -logprobs.gather(2, ids[:, 1:, None])[..., 0]
        total += losses[scored[:, 1:]].double().sum().item()
    return total / math.log(2)


def ngram_bits_per_byte(training: Sequence[str], held_out: Sequence[str]) -> dict[str, float]:
    """Score `held_out` under byte n-grams counted on `training`, by name."""
    counted = [text.encode() for text in training]
    scored = [text.encode() for text in held_out]
    return {
        name: ngram_bits(NgramModel(counted, order), scored) / sum(map(len, scored))
        for name, order in NGRAMS.items()
    }


def ngram_bits(model: NgramModel, documents: Sequence[bytes]) -> float:
    """Return the code length in bits of `documents`, each with its end mark."""
    total = 0.0
    for document in documents:
        symbols = [END_OF_TEXT, *document, END_OF_TEXT]
        ends = range(1, len(symbols))
        rows = model.probabilities([symbols[max(0, i - model.order) : i] for i in ends])
        total -= float(np.log2(rows[np.arange(len(rows)), symbols[1:]]).sum())
    return total


def transformer_bits_per_byte(folder: Path, held_out: Sequence[str]) -> float:
    """Score `held_out` under the model saved in `folder`, in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    context = model.config.max_position_embeddings
    bits = token_bits(model, encode(tokenizer, held_out), context)
    return bits / sum(len(text.encode()) for text in held_out)
