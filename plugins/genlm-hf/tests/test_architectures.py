"""Every family of decoder-only models, on every execution path, against each sequence alone.

`scripts/architectures.py --backend hf` makes the table in docs/ from the same models; a
family that changes its path fails here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genlm import ModelLoadError
from genlm_hf import execution_paths, prepacked
from genlm_hf.engine import HFEngine
from genlm_hf.execution_paths import known_path
from genlm_hf.packed import layout

from .families import FAMILIES, SERVED, TABLE, path_of
from .tiny import alone, answers, build_model, ids_of_lengths

# Longer and shorter than the windows and chunks of 4 below, one length twice.
LENGTHS = (9, 1, 23, 4, 13, 23, 2)

# Served in one pass for each length: neither padding nor a batch of lengths is safe.
UNPADDED = {"deepseek_v32", "llama with dynamic rope", "phi3 with longrope"}


def unbatched(name: str) -> tuple[Any, list[list[int]], torch.Tensor]:
    """The model of a family, sequences, and the row of each alone."""
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    sequences = ids_of_lengths(*LENGTHS)
    return model, sequences, torch.stack([alone(model, ids) for ids in sequences])


# GPTBigCode still compiles its activation functions with TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", SERVED)
def test_batches_give_the_rows_of_each_sequence_alone(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepacked, "_MIN_WEIGHTS", 1)
    model, sequences, expected = unbatched(name)
    engine = HFEngine.from_model(model, tokenizer, execution_path="padded")
    before = engine.statistics()["forwards"]
    rows = torch.stack(answers(engine, sequences))
    assert (rows - expected).abs().max() <= 1e-4
    assert (rows.logsumexp(-1)).abs().max() <= 1e-4
    # One pass, so the rows were padded; and no two sequences could be confused.
    passes = len(set(LENGTHS)) if name in UNPADDED else 1
    assert engine.statistics()["forwards"] == before + passes
    assert torch.pdist(rows).min() > 1e-2

    engine = HFEngine.from_model(model, tokenizer, prepack=True)
    assert engine.statistics()["execution_path"] == path_of(name), (
        "make docs writes the table again"
    )
    assert known_path(model) == TABLE[name].path
    for _ in range(2):
        rows = torch.stack(answers(engine, sequences))
        assert (rows - expected).abs().max() <= 1e-4


def test_the_table_lists_every_family_and_no_other() -> None:
    assert list(TABLE) == list(FAMILIES)
    assert {row.status for row in TABLE.values()} == {"right", "refused"}


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*SERVED}))
def test_what_is_no_causal_model_is_refused(name: str, tokenizer: Any) -> None:
    model_type, settings = FAMILIES[name]
    with pytest.raises(ModelLoadError, match="not a causal language model"):
        HFEngine.from_model(build_model(model_type, **settings), tokenizer)


@pytest.mark.parametrize("name", ["llama4_text", "lfm2", "recurrent_gemma", "jamba"])
def test_the_self_test_alone_finds_what_the_rules_refuse(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, *_ = unbatched(name)
    monkeypatch.setattr(execution_paths, "_refuse_by_config", lambda *_: None)
    monkeypatch.setattr(execution_paths, "_require_all_layers", lambda *_: None)
    monkeypatch.setattr(layout._Recorder, "_check_arguments", lambda *_: None)
    monkeypatch.setattr(layout, "window_of", lambda mask_function: None)
    with pytest.raises(ModelLoadError, match="in the self-test"):
        HFEngine.from_model(model, tokenizer, execution_path="packed")
