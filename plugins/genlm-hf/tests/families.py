"""Tiny models of every family of decoder-only models, and the tier that serves each."""

from __future__ import annotations

from typing import Any

from .tiny import WIDTH, llama_settings


def family(model_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A model of Llama's settings; a change to None leaves a setting out."""
    settings = llama_settings(**changes)
    return model_type, {name: value for name, value in settings.items() if value is not None}


def gpt(model_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A model of GPT-2's settings."""
    settings = {"vocab_size": WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return model_type, settings | {"bos_token_id": 1, "eos_token_id": 2} | changes


def bare(model_type: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """A model of settings all of its own; one that is None is left out."""
    settings = {"vocab_size": WIDTH, "hidden_size": 32} | settings
    return model_type, {name: value for name, value in settings.items() if value is not None}


EXPERTS = {"num_experts_per_tok": 2}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
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
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
        **LATENT,
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

FAMILIES |= {
    "gemma": family("gemma", head_dim=8),
    "olmo": family("olmo"),
    "olmo3": family("olmo3", sliding_window=4, num_hidden_layers=4),
    "olmoe": family("olmoe", num_experts=4, **EXPERTS),
    "glm4": family("glm4", head_dim=8),
    "smollm3": family("smollm3"),
    "ministral3": family("ministral3", head_dim=8),
    "exaone4": family("exaone4", sliding_window=4),
    "nemotron": family("nemotron"),
    "apertus": family("apertus"),
    "persimmon": family("persimmon", num_key_value_heads=None),
    "ernie4_5": family("ernie4_5", head_dim=8),
    "hunyuan_v1_dense": family("hunyuan_v1_dense", head_dim=8),
    "biogpt": family("biogpt", num_key_value_heads=None),
    "nanochat": family("nanochat"),
    "bitnet": family("bitnet"),
    "seed_oss": family("seed_oss", head_dim=8),
    "ctrl": ("ctrl", {"vocab_size": WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48}),
    "modernbert-decoder": family(
        "modernbert-decoder", num_key_value_heads=None, local_attention=4
    ),
    "bert as a decoder": family("bert", num_key_value_heads=None, is_decoder=True),
    "roberta as a decoder": family("roberta", num_key_value_heads=None, is_decoder=True),
    "minicpm3": family("minicpm3", **LATENT),
    "granite_swa": family("granite_swa", sliding_window=4),
    "qwen2_moe": family(
        "qwen2_moe",
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **EXPERTS,
    ),
    "afmoe": family(
        "afmoe",
        head_dim=8,
        sliding_window=4,
        num_experts=4,
        moe_intermediate_size=16,
        num_shared_experts=1,
        **EXPERTS,
    ),
    "jetmoe": family(
        "jetmoe",
        kv_channels=8,
        num_local_experts=4,
        num_key_value_heads=4,
        num_attention_heads=None,
        **EXPERTS,
    ),
    "gemma3n_text": family(
        "gemma3n_text",
        head_dim=8,
        sliding_window=4,
        num_hidden_layers=5,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=WIDTH,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "diffllama": family("diffllama"),
    "xglm": bare(
        "xglm", hidden_size=None, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4
    ),
    "gpt_neox_japanese": family("gpt_neox_japanese", num_key_value_heads=None),
    "doge": family("doge"),
    "falcon_mamba": family("falcon_mamba", state_size=8),
    "deepseek_v32": family(
        "deepseek_v32",
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
        **LATENT,
        **EXPERTS,
    ),
}

GATHERED = {"gptj", "codegen", "gpt_neo", "bloom", "mpt", "falcon", "falcon with ALiBi"}
GATHERED |= {"falcon with grouped heads", "falcon with separate heads", "diffllama"}
GATHERED |= {"xglm", "gpt_neox_japanese"}

PADDED = {"openai-gpt", "qwen3_next", "llama4_text", "lfm2", "recurrent_gemma", "mamba"}
PADDED |= {"mamba2", "rwkv", "jamba", "roberta as a decoder", "doge", "falcon_mamba"}

# Served without a cache and without padding.
UNPADDED = {"deepseek_v32"}
