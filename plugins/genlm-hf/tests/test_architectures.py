"""Every family of decoder-only models, in every tier, against each sequence alone.

`scripts/hf_architectures.py` makes the table in docs/ from the same models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genlm import ModelLoadError
from genlm_hf.engine import HFEngine
from genlm_hf.packed import layout
from genlm_hf.tiers import choice

from .tiny import WIDTH, alone, answers, build_model, ids_of_lengths, llama_settings

# Longer and shorter than the windows and chunks of 4 below, one length twice.
LENGTHS = (9, 1, 23, 4, 13, 23, 2)


def family(model_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A model of Llama's settings; a change to None leaves a setting out."""
    settings = llama_settings(**changes)
    return model_type, {name: value for name, value in settings.items() if value is not None}


def gpt(model_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A model of GPT-2's settings."""
    settings = {"vocab_size": WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return model_type, settings | {"bos_token_id": 1, "eos_token_id": 2} | changes


def bare(model_type: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """A model of settings all of its own."""
    return model_type, {"vocab_size": WIDTH, "hidden_size": 32} | settings


EXPERTS = {"num_experts_per_tok": 2}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

FAMILIES = {
    "gpt2": gpt("gpt2", n_positions=64),
    "gpt_bigcode": gpt("gpt_bigcode", n_positions=64),
    "gptj": gpt("gptj", n_positions=64, rotary_dim=4),
    "codegen": gpt("codegen", n_positions=64, rotary_dim=4),
    "openai-gpt": gpt("openai-gpt", n_positions=64),
    "gpt_neo": bare(
        "gpt_neo",
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": family("gpt_neox", num_key_value_heads=None),
    "opt": bare(
        "opt", ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "bloom": bare("bloom", n_layer=2, n_head=4),
    "falcon": bare("falcon", num_hidden_layers=2, num_attention_heads=4),
    "falcon with ALiBi": bare("falcon", num_hidden_layers=2, num_attention_heads=4, alibi=True),
    "falcon with grouped heads": bare(
        "falcon",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "falcon with separate heads": bare(
        "falcon", num_hidden_layers=2, num_attention_heads=4, multi_query=False
    ),
    "mpt": ("mpt", {"vocab_size": WIDTH, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "llama": family("llama"),
    "llama with llama3 rope": family(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral with a short window": family("mistral", sliding_window=4),
    "mixtral": family("mixtral", num_local_experts=4, **EXPERTS),
    "qwen2": family("qwen2"),
    "qwen3": family("qwen3", head_dim=8),
    "qwen3_moe": family(
        "qwen3_moe", head_dim=8, num_experts=4, moe_intermediate_size=16, **EXPERTS
    ),
    "qwen3_next": family(
        "qwen3_next",
        num_hidden_layers=4,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **EXPERTS,
        **LINEAR_ATTENTION,
    ),
    "gemma2": family("gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "gemma2 with capped scores": family(
        "gemma2",
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=0.5,
        attn_implementation="eager",
    ),
    "gemma3_text": family(
        "gemma3_text",
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
        num_hidden_layers=6,
    ),
    "phi": family("phi"),
    "phi3": family("phi3"),
    "olmo2": family("olmo2"),
    "stablelm": family("stablelm"),
    "starcoder2": family("starcoder2", sliding_window=4),
    "cohere": family("cohere", logit_scale=0.5),
    "cohere2": family("cohere2", sliding_window=4, num_hidden_layers=4),
    "granite": family("granite", logits_scaling=3.0),
    "deepseek_v3": family(
        "deepseek_v3",
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_shared_experts=1,
        **EXPERTS,
    ),
    "gpt_oss": family("gpt_oss", head_dim=8, num_local_experts=4, sliding_window=4, **EXPERTS),
    "llama4_text": family(
        "llama4_text",
        head_dim=8,
        num_hidden_layers=4,
        num_local_experts=2,
        attention_chunk_size=4,
        intermediate_size_mlp=48,
    ),
    "lfm2": family("lfm2", layer_types=["conv", "full_attention"]),
    "recurrent_gemma": bare(
        "recurrent_gemma",
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        lru_width=32,
        attention_window_size=4,
    ),
    "mamba": bare("mamba", num_hidden_layers=2, state_size=8),
    "mamba2": bare(
        "mamba2",
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
    "rwkv": bare("rwkv", num_hidden_layers=2, attention_hidden_size=32, context_length=64),
    "jamba": family(
        "jamba",
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
}


# What the faster tiers serve; all others are padded.
PACKED = {"gpt2", "gpt_bigcode", "gpt_neox", "opt", "mixtral", "phi", "phi3", "olmo2"}
PACKED |= {"llama", "llama with llama3 rope", "mistral with a short window", "stablelm"}
PACKED |= {"qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "starcoder2", "cohere"}
PACKED |= {"cohere2", "granite", "deepseek_v3", "gpt_oss", "gemma2 with capped scores"}
GATHERED = {"gptj", "codegen", "gpt_neo", "bloom", "mpt", "falcon", "falcon with ALiBi"}
GATHERED |= {"falcon with grouped heads", "falcon with separate heads"}


def unbatched(name: str) -> tuple[Any, list[list[int]], torch.Tensor]:
    """The model of a family, sequences, and the row of each alone."""
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    sequences = ids_of_lengths(*LENGTHS)
    return model, sequences, torch.stack([alone(model, ids) for ids in sequences])


# GPTBigCode still compiles its activation functions with TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_give_the_rows_of_each_sequence_alone(name: str, tokenizer: Any) -> None:
    model, sequences, expected = unbatched(name)
    engine = HFEngine.from_model(model, tokenizer, tier="padded")
    before = engine.statistics()["forwards"]
    rows = torch.stack(answers(engine, sequences))
    assert (rows - expected).abs().max() <= 1e-4
    assert (rows.logsumexp(-1)).abs().max() <= 1e-4
    # One pass, so the rows were padded; and no two sequences could be confused.
    assert engine.statistics()["forwards"] == before + 1
    assert torch.pdist(rows).min() > 1e-2

    engine = HFEngine.from_model(model, tokenizer)
    tier = "packed" if name in PACKED else "gathered" if name in GATHERED else "padded"
    assert engine.statistics()["tier"] == tier
    for _ in range(2):
        rows = torch.stack(answers(engine, sequences))
        assert (rows - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["llama4_text", "lfm2", "recurrent_gemma", "jamba"])
def test_the_self_test_alone_finds_what_the_rules_refuse(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, *_ = unbatched(name)
    monkeypatch.setattr(choice, "_refuse_by_config", lambda served: None)
    monkeypatch.setattr(choice, "_refuse_few_layers", lambda *_: None)
    monkeypatch.setattr(layout._Recorder, "_check_arguments", lambda *_: None)
    monkeypatch.setattr(layout, "window_of", lambda mask_function: None)
    with pytest.raises(ModelLoadError, match="in the self-test"):
        HFEngine.from_model(model, tokenizer, tier="packed")
