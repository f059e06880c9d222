"""`ScriptedEngine`: an engine with closed-form rows whose steps a test controls.

A row depends on the adapter and on every token id with its position, so an answer for
another sequence, another order or another adapter is never right by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from genlm import BatchEngine, Capability, Query, Token, Vocabulary
from genlm.testing.probes import StepGate

TIMEOUT_S = 120.0
"""How long a test waits for a condition before it fails; never reached when all is well."""


def oracle_row(token_ids: Sequence[int], adapter: str | None, vocab_size: int) -> torch.Tensor:
    """The next-token row of `ScriptedEngine`, computed without it: `(vocab_size,)`."""
    seed = [0 if adapter is None else 1 + sum(adapter.encode()), len(token_ids), *token_ids]
    logits = np.random.default_rng(seed).normal(size=vocab_size)
    return torch.log_softmax(torch.from_numpy(logits), dim=-1).float()


class ScriptedEngine(BatchEngine, StepGate):
    """Answers with `oracle_row`; its `evaluate` can be held, made to fail, and watched.

    Args:
        vocab_size: Number of ids, at most 256.
        max_context: The longest sequence taken.
        poison: Sequences containing one of these ids make `evaluate` raise.
    """

    capabilities = frozenset({Capability.LORA})

    def __init__(
        self, vocab_size: int = 16, max_context: int | None = None, poison: Sequence[int] = ()
    ) -> None:
        StepGate.__init__(self, TIMEOUT_S)
        tokens = [Token(i, bytes([i])) for i in range(vocab_size)]
        self.vocabulary = Vocabulary(
            None, tokens, [repr(token.byte_string) for token in tokens]
        )
        self.max_context = max_context
        self.poison = set(poison)
        self.batches: list[list[tuple[int, ...]]] = []  # of every `evaluate` call
        self.aborted: list[int] = []
        self.adapters: dict[str, str] = {}
        self.closed = False
        self.during_evaluate: Callable[[], None] = lambda: None

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        self.batches.append([query.token_ids for query in queries])
        self.enter()
        self.during_evaluate()
        for query in queries:
            if self.poison & set(query.token_ids):
                raise ArithmeticError(f"poisoned sequence {query.token_ids}")
        size = self.vocabulary.size
        return torch.stack([oracle_row(q.token_ids, q.adapter, size) for q in queries])

    def abort(self, query_id: int) -> None:
        self.aborted.append(query_id)
        super().abort(query_id)

    def add_adapter(self, name: str, path: str) -> None:
        self.adapters[name] = path

    def close(self) -> None:
        self.closed = True
