"""A model of a few tokens with random rows, and enumerations of what it can write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import genlm

END, SPECIAL = 0, 1
TOKENS = [
    *(b"<end>", b"<pad>", b"a", b"b", b"ab", b""),
    *(b"\xc3", b"\xa9", "é".encode(), b"\xa9a", b"a\xc3"),
]
"""Parts of the characters a, b and é, among them some across the bounds of characters."""
TOKENIZER = SimpleNamespace(eos_token_id=END, pad_token_id=SPECIAL)
TEXT_IDS = [place for place in range(2, len(TOKENS)) if TOKENS[place]]


def row(token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after a sequence, float64."""
    logits = np.random.default_rng((3, *token_ids)).normal(scale=1.5, size=len(TOKENS))
    return torch.log_softmax(torch.from_numpy(logits), dim=0)


class SmallEngine(genlm.BatchEngine):
    """`TOKENS`, each with a fixed random row after every sequence."""

    def __init__(self, tokenizer: Any = TOKENIZER, max_context: int | None = None) -> None:
        byte_vocab = [genlm.Token(index, token) for index, token in enumerate(TOKENS)]
        names = [repr(token) for token in TOKENS]
        self.vocabulary = genlm.Vocabulary(tokenizer, byte_vocab, names)
        self.max_context = max_context

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        return torch.stack([row(query.token_ids).float() for query in queries])


def text_of(token_ids: Sequence[int]) -> bytes:
    """The bytes of tokens, the end of text left out."""
    return b"".join(TOKENS[each] for each in token_ids if each != END)


def writings(accepts: Callable[[bytes], bool], longest: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of up to `longest` text tokens whose text is accepted."""
    for length in range(longest + 1):
        for ids in itertools.product(TEXT_IDS, repeat=length):
            if accepts(text_of(ids)):
                yield ids


def probability(prompt: Sequence[int], ids: Sequence[int]) -> float:
    """The probability of a continuation of a prompt."""
    logprob = sum(float(row((*prompt, *ids[:place]))[token]) for place, token in enumerate(ids))
    return float(np.exp(logprob))


def unpacked(constraint: Any, member: int = 0) -> set[int]:
    """The tokens that a member may have next."""
    masks, index = constraint.masks()
    words = masks[0 if index is None else index[member]].numpy()
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
