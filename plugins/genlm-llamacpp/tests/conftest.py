"""Tiny models as GGUF, made here: nothing is downloaded, nothing is mocked."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable, Sequence

import pytest
import torch

from genlm.plugin import Query, TokenSequence, rows_from_logits
from genlm_llamacpp.conformance import TinyGguf
from genlm_llamacpp.engine import LlamaCppEngine

Make = Callable[..., TinyGguf]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make a model of a family, with its oracle; each once."""
    made: dict[tuple[str, str], TinyGguf] = {}

    def model(name: str, weights: str = "F32") -> TinyGguf:
        if (name, weights) not in made:
            made[name, weights] = TinyGguf(tmp_path_factory.mktemp(name), name, weights=weights)
        return made[name, weights]

    return model


@pytest.fixture(scope="session")
def llama(make: Make) -> TinyGguf:
    return make("llama")


def rows_of(engine: LlamaCppEngine, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows by one `evaluate`, which does not try again with each sequence alone."""
    queries = [Query(i, ids) for i, ids in enumerate(sequences)]
    return rows_from_logits(engine.evaluate(queries).values, engine.vocabulary)


def check_memory(engine: LlamaCppEngine) -> None:
    """llama.cpp holds the recorded lengths, and the index refers to equal tokens.

    Contexts may be released on the engine's thread, which must run this.
    """
    sequences = engine._sequences
    count = engine._context.n_seq_max
    held = [engine._context.held(seq_id) for seq_id in range(count)]
    assert held == sequences._lengths.tolist()
    known = [*sequences._free, *sequences._idle, *sequences._pinned]
    assert sorted(known) == list(range(count))
    assert sequences._prompts <= sequences._idle.keys()
    assert sum(map(len, sequences._marks)) == len(sequences._seq_id_by_key)
    for (adapter, key), seq_id in sequences._seq_id_by_key.items():
        assert sequences._adapters[seq_id] == adapter
        ids = sequences._ids[seq_id, : sequences._marks[seq_id][key]]
        assert TokenSequence.of(ids.tolist()).key == key
