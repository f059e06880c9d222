"""Tiny models and the oracle: an unbatched forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from genlm import Completion, ModelFacts, Query
from genlm.testing import TINY_LLAMA, TINY_LOGITS, TINY_VOCABULARY, random_model
from genlm_hf.engine import HFEngine

VOCAB_SIZE = TINY_VOCABULARY
WIDTH = TINY_LOGITS


def build_model(model_type: str, **settings: Any) -> Any:
    """A model with weights large enough that every token matters to every row."""
    return random_model(model_type, settings)


def llama_settings(**changes: Any) -> dict[str, Any]:
    """The config of the conformance suite's Llama, changed as told."""
    return {**TINY_LLAMA, **changes}


def alone(model: Any, token_ids: Sequence[int], size: int = VOCAB_SIZE) -> torch.Tensor:
    """The oracle: the row of one sequence, unbatched, by a model without a past."""
    if model.training or ModelFacts.of(model.config).rope_by_longest:
        model = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0, -1, :size].float().log_softmax(-1)


def answers(engine: HFEngine, requests: Iterable[Any]) -> list[Any]:
    """Put token ids, or pairs of ids and adapter, through an engine, step by step."""
    count = 0
    for request in requests:
        ids, adapter = request if isinstance(request, tuple) else (request, None)
        engine.submit(Query(count, tuple(ids), adapter))
        count += 1
    completions: dict[int, Completion] = {}
    while len(completions) < count:
        step = {c.query_id: c for c in engine.step()}
        assert step or engine._unfinished
        assert not step.keys() & completions.keys()
        completions |= step
    assert sorted(completions) == list(range(count))
    assert engine.step() == []
    return [
        completions[i].result if completions[i].error is None else completions[i].error
        for i in range(count)
    ]


def ids_of_lengths(*lengths: int) -> list[list[int]]:
    """Random sequences of these lengths, always the same ones."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
