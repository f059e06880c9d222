"""Models of families that were not verified are announced or refused."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest

from genlm import (
    ModelFacts,
    ModelLoadError,
    UnverifiedModelWarning,
    VerifiedFamilies,
    check_verified,
)

VERIFIED = VerifiedFamilies({"toy": "1.2", "transformers": "5.0"}, {"LlamaForCausalLM": 2e-6})
LLAMA = ModelFacts("LlamaForCausalLM")
DYNAMIC = ModelFacts("LlamaForCausalLM", ("dynamic_rope",), rope_types=("dynamic",))


@pytest.mark.parametrize("unverified", ["warn", "refuse"])
def test_a_verified_family_loads_silently(unverified: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_verified("toy 1.2", LLAMA, VERIFIED, unverified=unverified)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "all"}},
        {"model_type": "llama", "is_causal": False},
        {"model_type": "xlm", "causal": False},
        {"model_type": "xlnet"},
    ],
    ids=lambda config: config["model_type"],
)
def test_bidirectional_attention_is_refused_in_every_family(config: dict[str, object]) -> None:
    facts = ModelFacts.of(config)
    known = VerifiedFamilies({}, {facts.key: 1e-6})
    with pytest.raises(ModelLoadError, match="not a causal language model"):
        check_verified("toy 1.2", facts, known)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "gpt_neox", "is_decoder": False},
        {"model_type": "gemma3_text", "use_bidirectional_attention": False},
        {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}},
    ],
    ids=lambda config: config["model_type"],
)
def test_settings_that_leave_attention_causal_are_accepted(config: dict[str, object]) -> None:
    facts = ModelFacts.of(config)
    check_verified("toy 1.2", facts, VerifiedFamilies({}, {facts.key: 1e-6}))


def test_another_mechanism_of_a_verified_architecture_gives_one_warning() -> None:
    with pytest.warns(UnverifiedModelWarning) as caught:
        check_verified("toy 1.2", DYNAMIC, VERIFIED)
    [warning] = caught
    text = str(warning.message)
    assert "toy 1.2: the rows of LlamaForCausalLM + dynamic_rope were not verified" in text
    assert "1 other families were, with toy 1.2, transformers 5.0" in text
    assert "genlm compare MODEL" in text
    assert "unverified='refuse'" in text


def test_it_is_refused_where_that_is_asked_for() -> None:
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM \+ dynamic_rope were not"):
        check_verified("toy 1.2", DYNAMIC, VERIFIED, unverified="refuse")


def test_another_answer_is_a_value_error_whatever_the_model() -> None:
    with pytest.raises(ValueError, match="unverified='ignore'; expected 'warn' or 'refuse'"):
        check_verified("toy 1.2", LLAMA, VERIFIED, unverified="ignore")


def test_a_package_brings_its_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "genlm_with_a_list"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError):
        VerifiedFamilies.of_package(package.name)
    (package / "verified.json").write_text(json.dumps(vars(VERIFIED)))
    assert VerifiedFamilies.of_package(package.name) == VERIFIED
    del sys.modules[package.name]
