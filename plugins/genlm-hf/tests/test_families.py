"""Families, loaded as users load them, with the requests of particle programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Gemma2ForCausalLM

from genlm import AsyncLM, ModelLoadError, load_model
from genlm.testing import TinyModel, families, measure_family

from .families import TABLE, path_of

REPRESENTATIVE = {
    name: family for name, family in families(head_dim=8).items() if family.representative
}


def load(folder: Path) -> AsyncLM:
    return load_model(folder, "hf", device="cpu", dtype="float32")


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_rows_are_right_and_served_as_the_table_says(name: str, tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, REPRESENTATIVE[name])
    result = measure_family(load, model, bound=TABLE[name].bound)
    assert (result.status, result.reason) == (TABLE[name].status, "")
    assert result.statistics["execution_path"] == path_of(name)


def test_rows_of_deepseek_v32_are_those_of_unbatched_passes(tmp_path: Path) -> None:
    """It selects tokens by scores; the choice between equal scores depends on the length."""
    model = TinyModel.of(tmp_path, families(head_dim=8)["deepseek_v32"])
    result = measure_family(load, model)
    assert (result.status, result.reason) == ("right", "")


def test_capped_scores_are_capped_unless_another_attention_is_requested(tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, REPRESENTATIVE["gemma2 with capped scores"])
    ids = [*range(5, 45)]
    with load_model(model.path, "hf", device="cpu", dtype="float32") as llm:
        row = llm.next_token_logprobs_sync(ids)
    assert (row - model.logprobs(ids)).abs().max() <= 1e-5
    options = {"attn_implementation": "sdpa"}
    if not Gemma2ForCausalLM._supports_sdpa:  # False in transformers 5.23, True in 5.19
        with pytest.raises(ModelLoadError, match="does not support an attention"):
            load_model(model.path, "hf", device="cpu", dtype="float32", hf_opts=options)
        return
    with load_model(model.path, "hf", device="cpu", dtype="float32", hf_opts=options) as llm:
        row = llm.next_token_logprobs_sync(ids)
    assert (row - model.logprobs(ids)).abs().max() > 0.1
