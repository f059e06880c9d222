"""What a config says about how a model computes."""

from __future__ import annotations

from typing import Any

import pytest

from genlm import ModelFacts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}


def test_a_plain_llama_has_no_mechanism() -> None:
    facts = ModelFacts.of(LLAMA)
    assert facts.key == "LlamaForCausalLM"
    assert facts.mechanisms == ()
    assert facts.original_positions is None
    assert not facts.rope_by_longest


@pytest.mark.parametrize(
    ("settings", "kinds", "by_longest", "original"),
    [
        ({"rope_scaling": None}, (), False, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, (), False, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear",), False, None),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic",), True, 8192),
        ({"rope_scaling": {"type": "longrope"}}, ("longrope",), True, 8192),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}},
            ("yarn",),
            False,
            4096,
        ),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
            ("longrope",),
            True,
            4096,
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            ("linear",),
            False,
            None,
        ),
    ],
)
def test_rotary_scaling_is_read_in_every_form(
    settings: Any, kinds: tuple[str, ...], by_longest: bool, original: int | None
) -> None:
    facts = ModelFacts.of(LLAMA | settings)
    assert facts.rope_types == kinds
    assert facts.rope_by_longest is by_longest
    assert facts.original_positions == original
    expected = ["LlamaForCausalLM", *(f"{kind}_rope" for kind in kinds)]
    assert facts.key == " + ".join(expected)


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({}, (4096,)),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 32768}, ()),
        ({"use_sliding_window": False}, ()),
        ({"layer_types": ["full_attention", "full_attention"]}, ()),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (4096,)),
        ({"attention_layers": ["global", "global"]}, ()),
        ({"attention_layers": ["global", "local"]}, (4096,)),
        ({"sliding_window": None, "attention_window_size": 2048}, (2048,)),
    ],
)
def test_a_window_counts_if_a_layer_uses_it_and_a_context_is_longer(
    settings: Any, windows: tuple[int, ...]
) -> None:
    facts = ModelFacts.of(MISTRAL | settings)
    assert facts.sliding_windows == windows
    assert facts.key == "MistralForCausalLM" + " + sliding_window" * bool(windows)


@pytest.mark.parametrize(
    ("settings", "mechanism"),
    [
        ({"alibi": True}, "alibi"),
        ({"model_type": "bloom"}, "alibi"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "alibi"),
        ({"position_embedding_type": "alibi"}, "alibi"),
        ({"attn_logit_softcapping": 50.0}, "attention_softcap"),
        ({"final_logit_softcapping": 30.0}, "logit_softcap"),
        ({"model_type": "gpt_oss"}, "attention_sinks"),
        ({"attention_chunk_size": 8192}, "chunked_attention"),
        ({"num_local_experts": 8}, "experts"),
        ({"kv_lora_rank": 512}, "latent_attention"),
        ({"index_topk": 2048}, "sparse_attention"),
        ({"state_size": 16}, "recurrent"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent"),
        ({"layer_types": ["conv", "full_attention"]}, "recurrent"),
        ({"mamba_d_state": 16, "attn_layer_period": 2}, "recurrent"),
        ({"lru_width": 16, "block_types": ["recurrent", "attention"]}, "recurrent"),
        ({"use_parallel_residual": True}, "use_parallel_residual"),
    ],
)
def test_each_mechanism_is_found_and_part_of_the_key(settings: Any, mechanism: str) -> None:
    facts = ModelFacts.of(LLAMA | settings)
    assert facts.mechanisms == (mechanism,)
    assert facts.key == f"LlamaForCausalLM + {mechanism}"


@pytest.mark.parametrize(
    "settings",
    [
        {"alibi": False, "model_type": "bloom"},
        {"model_type": "mpt", "attn_config": {"alibi": False}},
        {"attention_chunk_size": 8192, "layer_types": ["full_attention"]},
        {"num_local_experts": 0},
        {"use_parallel_residual": False},
    ],
)
def test_a_mechanism_that_is_off_is_not_used(settings: Any) -> None:
    assert ModelFacts.of(LLAMA | settings).mechanisms == ()


def test_the_text_model_of_several_is_read() -> None:
    facts = ModelFacts.of(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "vision_config": {"num_attention_heads": 16},
            "text_config": {"model_type": "gemma3_text", "sliding_window": 1024},
        }
    )
    assert facts.key == "Gemma3ForConditionalGeneration + sliding_window"


def test_a_config_of_transformers_is_read_and_nothing_else() -> None:
    import transformers

    config = transformers.AutoConfig.for_model("mistral", sliding_window=16)
    facts = ModelFacts.of(config)
    assert facts == ModelFacts.of(config.to_dict())
    assert facts.sliding_windows == (16,)
    with pytest.raises(TypeError, match=r"expected the mapping of a config.* found str"):
        ModelFacts.of("config.json")
