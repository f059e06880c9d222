"""Families of decoder-only models, one or two for each mechanism, compared with docs/.

`scripts/architectures.py --backend sgl` measures all families and writes the table and the list
of verified families. These tests compare the rows of a third of them with the table.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from architecture_tables import read_table

import genlm
from genlm.testing import TinyModel, families

from .driving import prompts_of

TABLE = read_table("sgl")
REPRESENTATIVE = [name for name, family in families().items() if family.representative]

# Around windows and chunks of 4 and 16, and beyond the positions of scaled rotary embeddings.
PROMPTS = prompts_of(9, 1, 4, 5, 16, 17, 33, 56)


def test_the_table_lists_every_family_right_or_refused() -> None:
    assert list(TABLE) == list(families())
    assert {row.status for row in TABLE.values()} == {"right", "refused"}


def test_the_verified_families_are_those_that_are_right() -> None:
    verified = genlm.VerifiedFamilies.of_package("genlm_sgl")
    right = [row for row in TABLE.values() if row.status == "right"]
    assert 30 <= len(verified.errors) <= len(right)
    assert max(verified.errors.values()) <= 1e-4


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_family_is_right_or_refused_as_the_table_says(name: str, tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path / "model", families()[name])
    options = {"device": "cpu", "max_total_tokens": 2048, "max_mamba_cache_size": 400}
    expected = TABLE[name]
    with warnings.catch_warnings():
        # Also for a class that is refused because its first row fails.
        if expected.status == "refused" or expected.path.startswith("Transformers"):
            warnings.simplefilter("ignore", genlm.UnverifiedModelWarning)
        if expected.status == "refused":
            with pytest.raises(genlm.ModelLoadError):
                genlm.load_model(model.path, "sgl", engine_opts=options)
            return
        llm = genlm.load_model(model.path, "sgl", engine_opts=options)
    with llm:
        prompts = [prompt[: llm.max_context] for prompt in PROMPTS]
        rows = llm.batch_next_token_logprobs_sync(prompts)
        grown = [(*prompt[: llm.max_context - 1], 7) for prompt in prompts]
        rows = [*rows, *llm.batch_next_token_logprobs_sync(grown)]
        assert llm.statistics().engine["model_class"] == expected.path
    for prompt, row in zip([*prompts, *grown], rows, strict=True):
        assert (row - model.logprobs(prompt)).abs().max() <= expected.bound, len(prompt)
