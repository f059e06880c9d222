"""`TinyModel` is reproducible, and its rows depend on every token and adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from genlm import decode_vocab
from genlm.testing import TINY_LOGITS, TINY_VOCABULARY, TinyModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("tiny") / "llama", adapters=("red", "blue"))


def test_rows_are_distributions_over_the_tokenizers_ids(tiny: TinyModel) -> None:
    row = tiny.logprobs([5, 6, 7])
    assert row.shape == (TINY_VOCABULARY,)
    assert float(row.logsumexp(0)) == pytest.approx(0)


def test_the_folder_loads_as_a_model_with_more_logits_than_ids(tiny: TinyModel) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path)
    assert config.vocab_size == TINY_LOGITS
    byte_vocab, _ = decode_vocab(tokenizer)
    assert len(byte_vocab) == TINY_VOCABULARY


def test_every_token_matters(tiny: TinyModel) -> None:
    row = tiny.logprobs(range(5, 25))
    for place in range(20):
        changed = [*range(5, 25)]
        changed[place] += 100
        assert float((tiny.logprobs(changed) - row).abs().max()) > 1e-3


def test_adapters_differ_from_the_base_and_from_each_other(tiny: TinyModel) -> None:
    rows = [tiny.logprobs([5, 6], adapter) for adapter in (None, *tiny.adapters)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert float((rows[i] - rows[j]).abs().max()) > 0.1


def test_the_same_settings_give_the_same_model_and_leave_the_seed_alone(
    tiny: TinyModel, tmp_path: Path
) -> None:
    state = torch.get_rng_state()
    again = TinyModel(tmp_path / "again")
    torch.testing.assert_close(again.logprobs([9, 8]), tiny.logprobs([9, 8]))
    assert torch.equal(torch.get_rng_state(), state)
