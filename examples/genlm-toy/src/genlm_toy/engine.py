"""An engine whose next byte is one seen before, the likelier the more recently."""

import torch

from genlm.plugin import BatchEngine, Token, Vocabulary


class Bytes:
    """A tokenizer: one id per byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


class ToyEngine(BatchEngine):
    """Weigh byte b by 1 + sum of 1/age over its occurrences; the last byte has age 1."""

    def __init__(self, model):
        tokens = [Token(i, bytes([i])) for i in range(256)]
        self.vocabulary = Vocabulary(Bytes(), tokens, [repr(t.byte_string) for t in tokens])

    def evaluate(self, queries):
        weights = torch.ones(len(queries), 256)
        for row, query in zip(weights, queries, strict=True):
            age = torch.arange(len(query.token_ids), 0, -1)
            row.index_add_(0, torch.tensor(query.token_ids), 1 / age)
        return (weights / weights.sum(1, keepdim=True)).log()
