"""Particles that fork and grow, and an oracle that remembers their rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch

from genlm_hf.engine import HFEngine

from .tiny import VOCAB_SIZE


class Oracle:
    """Rows of single sequences, remembered."""

    def __init__(self, model: Any) -> None:
        self._model = copy.deepcopy(model).eval()  # no adapter or hook can reach it
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def row(self, sequence: Any) -> torch.Tensor:
        ids = tuple(sequence)
        if ids not in self._rows:
            with torch.no_grad():
                token_ids = torch.tensor([ids], device=self._model.device)
                logits = self._model(token_ids, use_cache=False).logits
            self._rows[ids] = logits[0, -1, :VOCAB_SIZE].float().log_softmax(-1).cpu()
        return self._rows[ids]

    def largest_error(self, sequences: Any, rows: list[torch.Tensor]) -> float:
        pairs = zip(sequences, rows, strict=True)
        errors = [(row - self.row(ids)).abs().max() for ids, row in pairs]
        return float(torch.stack(errors).max())  # NaN if one is


def bytes_per_token(model: Any, tokenizer: Any, path: str) -> int:
    """Size of the keys and values of a token."""
    engine = HFEngine.from_model(model, tokenizer, execution_path=path, self_test=False)
    size = engine._choice.path.forward.storage.bytes_per_token
    assert isinstance(size, int)
    return size


def particles(steps: int, count: int, prompt: list[int]) -> Iterator[list[list[int]]]:
    """Contexts of a population that grows by one to three tokens and is resampled."""
    population = [list(prompt) for _ in range(count)]
    for step in range(steps):
        if step % 3 == 2:
            population = [list(random.choice(population)) for _ in population]
        for context in population:
            context.extend(random.choices(range(3, 9), k=random.choice([1, 1, 1, 2, 12])))
        population = [context[:60] for context in population]
        yield [list(context) for context in population]


def unique(sequences: list[list[int]]) -> list[list[int]]:
    return [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]


def used(engine: HFEngine, name: str) -> int:
    return int(engine.statistics()[name])
