"""The configs of `families` as functions of the head width, as one table."""

from __future__ import annotations

from typing import Any, NamedTuple

from genlm.testing.tiny_model import TINY_LLAMA, TINY_LOGITS, TINY_VOCABULARY

Settings = dict[str, dict[str, Any]]
"""Settings by the family's name, which begins with transformers' name of the architecture."""

_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Sizes(NamedTuple):
    """Widths of a model with four heads, and settings shared by many models."""

    head: int

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return 4 * self.head

    @property
    def inner(self) -> int:
        """Width of a feed-forward layer or an expert; SGLang requires a multiple of 64."""
        return 8 * self.head

    def llama(self, **changes: Any) -> dict[str, Any]:
        """Settings with Llama's names; None removes a setting."""
        widths = {"hidden_size": self.hidden, "intermediate_size": self.inner}
        settings = {**TINY_LLAMA, **widths, **changes}
        return {name: value for name, value in settings.items() if value is not None}

    def plain(self, **changes: Any) -> dict[str, Any]:
        """Settings with two layers and four heads, without those of the feed-forward layers."""
        return self.bare(num_hidden_layers=2, num_attention_heads=4, **changes)

    def bare(self, **changes: Any) -> dict[str, Any]:
        """Settings with the sizes of vocabulary and model only, and `changes`."""
        return {"vocab_size": TINY_LOGITS, "hidden_size": self.hidden, **_IDS, **changes}


def attention(sizes: Sizes) -> Settings:
    """Dense models: kinds of attention, layers and windows."""
    d, llama, plain = sizes.head, sizes.llama, sizes.plain
    neox = {"num_key_value_heads": None, "intermediate_size": 4 * sizes.hidden}
    gemma = {"head_dim": d, "query_pre_attn_scalar": d}
    return {
        "gpt2": plain(max_position_embeddings=64),
        "gpt_bigcode": plain(max_position_embeddings=64),
        "gptj": plain(max_position_embeddings=64, rotary_dim=d // 2),
        "codegen": plain(max_position_embeddings=64, rotary_dim=d // 2),
        "openai-gpt": plain(max_position_embeddings=64),
        "gpt_neo": plain(
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            max_position_embeddings=64,
        ),
        "gpt_neox": llama(**neox),
        "gpt_neox with sequential layers": llama(use_parallel_residual=False, **neox),
        "gpt_neox_japanese": llama(num_key_value_heads=None),
        "opt": plain(
            ffn_dim=sizes.inner, word_embed_proj_dim=sizes.hidden, max_position_embeddings=64
        ),
        "falcon": plain(),
        "falcon with grouped heads": plain(num_kv_heads=2, new_decoder_architecture=True),
        "falcon with separate heads": plain(multi_query=False),
        "ctrl": plain(dff=sizes.inner),
        "xglm": plain(ffn_dim=sizes.inner, max_position_embeddings=64),
        "xlnet": {"vocab_size": TINY_LOGITS, "d_model": sizes.hidden, **_IDS}
        | {"n_layer": 2, "n_head": 4, "d_inner": sizes.inner},
        "biogpt": llama(num_key_value_heads=None),
        "bert as a decoder": llama(num_key_value_heads=None, is_decoder=True),
        "roberta as a decoder": llama(num_key_value_heads=None, is_decoder=True),
        "modernbert-decoder": llama(num_key_value_heads=None, local_attention=4),
        "llama": llama(),
        "llama with the tokenizer's vocabulary": llama(vocab_size=TINY_VOCABULARY),
        "llama with tied embeddings": llama(tie_word_embeddings=True),
        "llama with biases": llama(attention_bias=True, mlp_bias=True),
        "llama with narrow heads": llama(hidden_size=2 * sizes.hidden, head_dim=d),
        "llama with a long context": llama(max_position_embeddings=4096),
        "diffllama": llama(),
        "mistral": llama(sliding_window=None),
        "mistral with a short window": llama(sliding_window=4),
        "mistral with a window of 16": llama(sliding_window=16),
        "ministral3": llama(head_dim=d),
        "qwen2": llama(),
        "qwen2 with a window of 16": llama(
            use_sliding_window=True, sliding_window=16, max_window_layers=1
        ),
        "qwen3": llama(head_dim=d),
        "gemma": llama(head_dim=d),
        "gemma2": llama(sliding_window=4, **gemma),
        "gemma2 with a window of 16": llama(sliding_window=16, **gemma),
        "gemma2 with capped scores": llama(
            sliding_window=4, attn_logit_softcapping=0.5, final_logit_softcapping=2.0, **gemma
        ),
        "gemma3_text": llama(sliding_window=4, num_hidden_layers=6, **gemma),
        "gemma3_text with a window of 16": llama(
            sliding_window=16, num_hidden_layers=6, **gemma
        ),
        "gemma3n_text": llama(
            head_dim=d,
            sliding_window=4,
            num_hidden_layers=5,
            num_kv_shared_layers=0,
            vocab_size_per_layer_input=TINY_LOGITS,
            hidden_size_per_layer_input=d,
            laurel_rank=8,
            altup_num_inputs=2,
        ),
        "phi": llama(),
        "phi3": llama(),
        "phi3 with a window of 16": llama(sliding_window=16),
        "olmo": llama(),
        "olmo2": llama(),
        "olmo3": llama(sliding_window=4, num_hidden_layers=4),
        "stablelm": llama(),
        "stablelm with parallel layers": llama(use_parallel_residual=True, qk_layernorm=True),
        "starcoder2": llama(sliding_window=4),
        "cohere": llama(logit_scale=0.5),
        "cohere2": llama(sliding_window=4, num_hidden_layers=4, logit_scale=0.5),
        "granite": llama(logits_scaling=3.0),
        "granite_swa": llama(sliding_window=4),
        "glm4": llama(head_dim=d),
        "smollm3": llama(),
        "exaone4": llama(sliding_window=4, num_hidden_layers=4),
        "nemotron": llama(),
        "apertus": llama(),
        "persimmon": llama(num_key_value_heads=None),
        "ernie4_5": llama(head_dim=d),
        "hunyuan_v1_dense": llama(head_dim=d),
        "nanochat": llama(),
        "bitnet": llama(),
        "seed_oss": llama(head_dim=d),
        "doge": llama(),
    }


def positions(sizes: Sizes) -> Settings:
    """Length-dependent position encodings: attention biases and scaled rotary embeddings."""
    llama, plain = sizes.llama, sizes.plain
    pairs = sizes.head // 2
    theta = {"rope_theta": 10000.0}
    original = {"original_max_position_embeddings": 16, "factor": 4.0, **theta}
    longrope = original | {
        "rope_type": "longrope",
        "short_factor": [1 + i / (2 * pairs) for i in range(pairs)],
        "long_factor": [2 + 4 * i / pairs for i in range(pairs)],
    }
    linear = {"rope_type": "linear", "factor": 4.0, **theta}
    yarn = {"rope_type": "yarn", **original}
    return {
        "bloom": plain(),
        "falcon with ALiBi": plain(alibi=True),
        "mpt": plain(max_seq_len=64),
        "llama with llama3 rope": llama(
            rope_parameters={
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **original,
            }
        ),
        "llama with linear rope": llama(rope_parameters=linear),
        "llama with dynamic rope": llama(
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, **theta},
        ),
        "llama with yarn rope": llama(rope_parameters=yarn),
        "qwen3 with yarn rope": llama(head_dim=sizes.head, rope_parameters=yarn),
        "phi3 with longrope": llama(
            original_max_position_embeddings=16, rope_parameters=longrope
        ),
        "gemma3_text with linear rope": llama(
            head_dim=sizes.head,
            query_pre_attn_scalar=sizes.head,
            sliding_window=16,
            num_hidden_layers=6,
            rope_parameters={
                "full_attention": linear,
                "sliding_attention": {"rope_type": "default", **theta},
            },
        ),
    }


def experts(sizes: Sizes) -> Settings:
    """Mixtures of experts and latent attention."""
    d, llama = sizes.head, sizes.llama
    four = {"num_experts": 4, "num_experts_per_tok": 2}
    moe = {**four, "moe_intermediate_size": sizes.inner}
    shared = {**moe, "shared_expert_intermediate_size": sizes.inner}
    latent = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 2 * d,
        "q_lora_rank": 2 * d,
        "qk_rope_head_dim": d,
        "qk_nope_head_dim": d,
        "v_head_dim": d,
    }
    deepseek = {
        "moe_intermediate_size": sizes.inner,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        **latent,
    }
    llama4 = {
        "head_dim": d,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": sizes.inner,
    }
    return {
        "mixtral": llama(**_TWO_OF_FOUR),
        "mixtral with a window of 16": llama(sliding_window=16, **_TWO_OF_FOUR),
        "qwen2_moe": llama(**shared),
        "qwen3_moe": llama(head_dim=d, **moe),
        "olmoe": llama(**four),
        "granitemoe": llama(**_TWO_OF_FOUR),
        "afmoe": llama(
            head_dim=d, sliding_window=4, num_hidden_layers=4, num_shared_experts=1, **moe
        ),
        "jetmoe": llama(
            kv_channels=d, num_key_value_heads=4, num_attention_heads=None, **_TWO_OF_FOUR
        ),
        "gpt_oss": llama(head_dim=d, sliding_window=4, **_TWO_OF_FOUR),
        "gpt_oss with a window of 16": llama(head_dim=d, sliding_window=16, **_TWO_OF_FOUR),
        "llama4_text": llama(attention_chunk_size=4, **llama4),
        "llama4_text with chunks of 16": llama(attention_chunk_size=16, **llama4),
        "minicpm3": llama(dim_model_base=sizes.hidden, **latent),
        "deepseek_v2": llama(topk_method="greedy", **deepseek),
        "deepseek_v3": llama(**deepseek),
        "deepseek_v32": llama(index_topk=4, index_n_heads=2, index_head_dim=2 * d, **deepseek),
        "qwen3_next": llama(
            head_dim=d,
            num_hidden_layers=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=d,
            linear_value_head_dim=d,
            **shared,
        ),
    }


def recurrent(sizes: Sizes) -> Settings:
    """Models with recurrent state, with or without attention."""
    d, llama, bare = sizes.head, sizes.llama, sizes.bare
    return {
        "lfm2": llama(layer_types=["conv", "full_attention"]),
        "recurrent_gemma": bare(
            intermediate_size=sizes.inner,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=d,
            lru_width=sizes.hidden,
            attention_window_size=4,
        ),
        "mamba": bare(num_hidden_layers=2, state_size=8),
        "falcon_mamba": bare(num_hidden_layers=2, state_size=8),
        "mamba2": bare(
            num_hidden_layers=2, state_size=8, num_heads=8, head_dim=d, n_groups=1, chunk_size=8
        ),
        "rwkv": bare(
            num_hidden_layers=2, attention_hidden_size=sizes.hidden, context_length=64
        ),
        "jamba": llama(
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
