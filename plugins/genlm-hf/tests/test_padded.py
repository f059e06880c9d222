"""The path `padded`: batches of whole sequences, with few enough logits at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from genlm import rows_from_logits
from genlm_hf.engine import HFEngine
from genlm_hf.padded import PaddedPath

from .tiny import alone


@pytest.mark.parametrize("max_rows", [1, 3, 4, 100])
def test_requested_logits_are_computed_in_parts_of_so_many(
    llama: Any, tokenizer: Any, max_rows: int
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path="padded")
    path = engine._choice.path
    assert isinstance(path, PaddedPath)
    path.limits = dataclasses.replace(path.limits, max_rows=max_rows)
    sequences, firsts = [[3, 4, 5, 6], [7, 8], [9]], np.array([1, 0, 0])
    parts = list(path.run(sequences, firsts))
    requested = [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)]
    assert np.concatenate([places for places, _ in parts], axis=1).T.tolist() == [
        list(place) for place in requested
    ]
    assert max(len(logits) for _, logits in parts) == min(max_rows, len(requested))
    logits = torch.cat([logits for _, logits in parts])
    rows = rows_from_logits(logits, engine.vocabulary)
    for (row, position), found in zip(requested, rows, strict=True):
        correct = alone(llama, sequences[row][: position + 1])
        torch.testing.assert_close(found, correct, rtol=0, atol=1e-5)
