"""Rotary scaling that depends on the longest sequence of a batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from genlm_hf.engine import HFEngine

from .tiny import alone, answers, build_model, ids_of_lengths, llama_settings

DYNAMIC = (
    "llama",
    llama_settings(
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
)
LONGROPE = (
    "phi3",
    llama_settings(
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 16,
        },
    ),
)
# Below, at and above the 16 positions where the scaling sets in.
LENGTHS = (40, 17, 16, 3, 15, 40, 30, 1)


@pytest.mark.parametrize("kind", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_mixed_lengths_in_one_step_are_right(kind: Any, tokenizer: Any) -> None:
    model = build_model(kind[0], **kind[1])
    expected = [alone(model, ids) for ids in ids_of_lengths(*LENGTHS)]
    engine = HFEngine.from_model(model, tokenizer)
    assert engine.max_context == 64
    rows = answers(engine, ids_of_lengths(*LENGTHS))
    assert max((row - e).abs().max() for row, e in zip(rows, expected)) <= 1e-4


@pytest.mark.parametrize("kind", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_row_does_not_depend_on_earlier_requests(kind: Any, tokenizer: Any) -> None:
    model = build_model(kind[0], **kind[1])
    sequences = ids_of_lengths(40, 16, 20, 5)
    expected = [alone(model, ids) for ids in sequences]
    engine = HFEngine.from_model(model, tokenizer)
    for order in itertools.permutations(range(4)):
        for i in order:
            [row] = answers(engine, [sequences[i]])
            assert (row - expected[i]).abs().max() <= 1e-4, order


def test_scaling_matters_in_these_models() -> None:
    [long] = ids_of_lengths(40)
    for model_type, settings in (DYNAMIC, LONGROPE):
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        scaled = alone(build_model(model_type, **settings), long)
        unscaled = alone(
            build_model(model_type, **{**settings, "rope_parameters": plain}), long
        )
        assert (scaled - unscaled).abs().max() > 1e-2
