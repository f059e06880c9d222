"""The tiny families cover every mechanism, and each mechanism changes rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from genlm import ModelFacts
from genlm.testing import Family, TinyModel, families

LONGEST = 60
FAMILIES = families()

# Of heads of several widths, or of none.
ODD_HEADS = {"mamba", "falcon_mamba", "rwkv", "llama with narrow heads"}


WIDTHS = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels")


def head_dims(family: Family) -> set[int]:
    """Widths of heads that a config states, or the model's width by the number of heads."""
    config = transformers.AutoConfig.for_model(family.model_type, **family.settings)
    text = config.get_text_config()
    stated = {getattr(text, name, None) for name in WIDTHS} - {None}
    heads = getattr(text, "num_attention_heads", None)
    return stated or ({text.hidden_size // heads} if heads else set())


def facts_of(family: Family) -> ModelFacts:
    return ModelFacts.of(
        transformers.AutoConfig.for_model(family.model_type, **family.settings)
    )


@pytest.mark.parametrize("head_dim", [8, 16, 64])
def test_heads_have_the_requested_width(head_dim: int) -> None:
    listed = families(head_dim)
    assert list(listed) == list(FAMILIES)
    for name in {*listed} - ODD_HEADS:
        assert head_dims(listed[name]) in ({head_dim}, set()), name


@pytest.mark.parametrize("head_dim", [0, 4, 20, -8])
def test_other_widths_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim}; use a positive multiple of 8"):
        families(head_dim)


def test_a_third_represents_every_mechanism() -> None:
    assert len(FAMILIES) >= 90
    representatives = [family for family in FAMILIES.values() if family.representative]
    assert len(FAMILIES) / 4 < len(representatives) < len(FAMILIES) / 2
    everything = {m for family in FAMILIES.values() for m in facts_of(family).mechanisms}
    represented = {m for family in representatives for m in facts_of(family).mechanisms}
    structures = {"is_decoder", "multi_query", "parallel_attn", "use_qk_norm", "qk_layernorm"}
    assert everything - represented <= structures | {"sparse_attention"}


def test_sequences_are_longer_than_windows_and_unscaled_contexts() -> None:
    for family in FAMILIES.values():
        facts = facts_of(family)
        assert all(window <= 16 for window in facts.sliding_windows), family.name
        assert (facts.attention_chunk_size or 0) <= 16, family.name
        if family.settings.get("rope_parameters") and facts.original_positions:
            assert facts.original_positions == 16, family.name


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("mistral with a window of 16", {"sliding_window": None}),
    ("qwen2 with a window of 16", {"use_sliding_window": False}),
    ("gemma2 with a window of 16", {"sliding_window": 64}),
    ("gemma3_text with a window of 16", {"sliding_window": 64}),
    ("gpt_oss with a window of 16", {"sliding_window": 64}),
    ("gpt_neo", {"window_size": 64}),
    ("llama4_text with chunks of 16", {"attention_chunk_size": 64}),
    ("recurrent_gemma", {"attention_window_size": 64}),
    ("gemma2 with capped scores", {"attn_logit_softcapping": 50.0}),
    ("gemma2 with capped scores", {"final_logit_softcapping": None}),
    ("llama with dynamic rope", {"rope_parameters": PLAIN}),
    ("llama with linear rope", {"rope_parameters": PLAIN}),
    ("llama with llama3 rope", {"rope_parameters": PLAIN}),
    ("llama with yarn rope", {"rope_parameters": PLAIN}),
    ("phi3 with longrope", {"rope_parameters": PLAIN}),
    ("falcon with ALiBi", {"alibi": False}),
    ("stablelm with parallel layers", {"use_parallel_residual": False}),
]


@pytest.mark.parametrize(("name", "changes"), WITHOUT, ids=[name for name, _ in WITHOUT])
def test_a_model_without_the_mechanism_has_other_rows(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    family = FAMILIES[name]
    without = Family(name, family.model_type, {**family.settings, **changes}, 64, False)
    ids = [5 + 7 * place % 290 for place in range(LONGEST)]
    row = TinyModel.of(tmp_path / "with", family).logprobs(ids)
    other = TinyModel.of(tmp_path / "without", without).logprobs(ids)
    assert float((row - other).abs().max()) > 1e-2


# "falcon with ALiBi" is not among them: transformers' plain attention adds its biases twice.
@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.representative])
def test_the_oracle_does_not_depend_on_the_implementation_of_attention(
    name: str, tmp_path: Path
) -> None:
    import torch

    model = TinyModel.of(tmp_path, FAMILIES[name])
    ids = [5 + 7 * place % 290 for place in range(LONGEST)]
    load = transformers.AutoModelForCausalLM.from_pretrained
    eager = load(model.path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = eager(torch.tensor([ids]), use_cache=False).logits
    row = logits[0, -1, : model.vocab_size].double().log_softmax(-1)
    assert float((row - model.logprobs(ids)).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", ["llama with dynamic rope", "phi3 with longrope", "mamba"])
def test_the_oracle_remembers_no_other_sequence(name: str, tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path / "used", FAMILIES[name])
    for first, bound in ((6, 0.0), (5, 1e-5)):  # the second one is a prefix
        short, longer = range(first, 30), range(5, 5 + LONGEST)
        fresh = TinyModel.of(tmp_path / f"fresh {first}", FAMILIES[name]).logprobs(short)
        model.logprobs(longer)
        assert float((model.logprobs(short) - fresh).abs().max()) <= bound


def test_every_parameter_is_random(tmp_path: Path) -> None:
    import torch

    model = TinyModel.of(tmp_path, FAMILIES["qwen2"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert parameter.unique().numel() > 0.9 * parameter.numel(), name
