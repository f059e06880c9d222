"""`ModelFacts`: the mechanisms that a model uses, read from its config.

Imports neither transformers nor an engine. The defaults of a config class are unknown here, so
pass `config.to_dict()` of transformers where it supports the model, and the content of
config.json otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "local_attention")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_LAYER_TYPES = ("layer_types", "layers_block_type", "block_types", "_block_types")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# Settings that only models with a recurrent or convolutional state have.
_STATES = (
    "state_size",
    "mamba_d_state",
    "ssm_state_size",
    "mamba_d_ssm",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "lru_width",
    "attention_hidden_size",
)

# Booleans that change the computation with the same weights.
_STRUCTURES = (
    "new_decoder_architecture",
    "multi_query",
    "parallel_attn",
    "use_parallel_residual",
    "qk_layernorm",
    "use_qk_norm",
    "is_decoder",
)

_ROPE_ALIASES = {"su": "longrope"}

# Architectures whose configs have no setting for the mechanism.
_ALIBI_TYPES = {"bloom", "mpt"}
_SINK_TYPES = {"gpt_oss"}
_BIDIRECTIONAL_TYPES = {"xlnet"}

# Encoders with a head for language modelling, causal if their config sets `is_decoder`.
_ENCODER_TYPES = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


@dataclass(frozen=True)
class ModelFacts:
    """The mechanisms of a model, or of its text model if it has several, by its config.

    Attributes:
        architecture: Name of the model's class, else its `model_type`.
        mechanisms: Mechanisms beyond plain attention, feed-forward layers and positions, such
            as `"recurrent"` for layers with a recurrent or convolutional state.
        rope_types: Kinds of scaled rotary embeddings, of all layers; empty for plain ones.
        sliding_windows: Sizes of the attention windows that are smaller than the context.
        attention_chunk_size: Number of tokens of a chunk, outside of which they do not attend.
        original_positions: Number of positions before rotary embeddings were scaled. If
            `rope_by_longest`, frequencies are equal for all lengths up to it.
        bidirectional: Reason why tokens attend to later ones, such as `"is_decoder=False"`;
            empty for causal attention.
    """

    architecture: str
    mechanisms: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ()
    sliding_windows: tuple[int, ...] = ()
    attention_chunk_size: int | None = None
    original_positions: int | None = None
    bidirectional: str = ""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read a config.

        Args:
            config: A mapping, such as the content of config.json, or an object with a method
                `to_dict`, such as a config of transformers.

        Raises:
            TypeError: `config` is neither.
        """
        config = _as_mapping(config)
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        model_type = str(text.get("model_type") or config.get("model_type") or "")
        architectures = config.get("architectures") or text.get("architectures") or [model_type]
        layer_types, rope_types = _layer_types(text), _rope_types(text)
        alibi = _alibi(text, model_type)
        positions = None if alibi else _integer(text, *_POSITIONS)
        windows = _sliding_windows(text, layer_types, positions)
        chunk_size = _chunk_size(text, layer_types)
        enabled = {
            "alibi": alibi,
            "attention_sinks": model_type in _SINK_TYPES,
            "attention_softcap": text.get("attn_logit_softcapping") is not None,
            "chunked_attention": chunk_size is not None,
            "experts": _integer(text, *_EXPERTS) is not None,
            "latent_attention": text.get("kv_lora_rank") is not None,
            "logit_softcap": text.get("final_logit_softcapping") is not None,
            "recurrent": _is_recurrent(text, layer_types),
            "sliding_window": bool(windows),
            "sparse_attention": text.get("index_topk") is not None,
        }
        enabled |= {f"{kind}_rope": True for kind in rope_types}
        enabled |= {name: text.get(name) is True for name in _STRUCTURES}
        return cls(
            architecture=str(architectures[0]),
            mechanisms=tuple(name for name, is_enabled in enabled.items() if is_enabled),
            rope_types=rope_types,
            sliding_windows=windows,
            attention_chunk_size=chunk_size,
            original_positions=_original_positions(text, rope_types, positions),
            bidirectional=_bidirectional(text, model_type),
        )

    @property
    def key(self) -> str:
        """Name under which a family is verified: architecture and mechanisms in use."""
        return " + ".join([self.architecture, *self.mechanisms])

    @property
    def rope_by_longest(self) -> bool:
        """Whether frequencies depend on the longest sequence of a pass.

        Sequences of different lengths must then not share a pass.
        """
        return any(kind == "longrope" or "dynamic" in kind for kind in self.rope_types)


def rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary settings of a text config, one for each type of layer.

    Args:
        config: A mapping, or a config of transformers.
    """
    config = _as_mapping(config)
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(settings, Mapping):
        return
    yield settings
    yield from (value for value in settings.values() if isinstance(value, Mapping))


def context_window(config: Any) -> int | None:
    """Return the maximum number of tokens of a context, None for no limit.

    The tokenizer's `model_max_length`, which is often arbitrary, is not read. Models without
    positions (Mamba) and with ALiBi biases computed on the fly (BLOOM, Falcon) have no limit;
    a sliding attention window does not limit the context.

    Args:
        config: The config of a text model: a mapping, or a config of transformers.
    """
    config = _as_mapping(config)
    window = _integer(config, *_POSITIONS)
    if window is None or config.get("alibi"):
        return None
    windows = [window]
    for settings in rope_settings(config):
        kind = settings.get("rope_type", settings.get("type"))
        factor = settings.get("factor") or 1.0
        if kind in {"linear", "dynamic"}:
            windows.append(int(window * factor))
        elif kind == "yarn":
            original = settings.get("original_max_position_embeddings") or window
            windows.append(int(original * factor))
    return max(windows)


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, Mapping) and hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"expected the mapping of a config, or a config of transformers; found "
            f"{type(config).__name__}"
        )
    return config


def _bidirectional(config: Mapping[str, Any], model_type: str) -> str:
    """Return the setting that makes attention bidirectional, `""` if it is causal."""
    if model_type in _BIDIRECTIONAL_TYPES:
        return f"model_type={model_type!r}"
    if model_type in _ENCODER_TYPES and not config.get("is_decoder"):
        return "is_decoder=False"
    if model_type == "xlm" and not config.get("causal"):
        return "causal=False"
    if config.get("use_bidirectional_attention") in (True, "all"):
        return f"use_bidirectional_attention={config['use_bidirectional_attention']!r}"
    return "is_causal=False" if config.get("is_causal") is False else ""


def _integer(config: Mapping[str, Any], *names: str) -> int | None:
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    layer_types = next((config[name] for name in _LAYER_TYPES if config.get(name)), ())
    return tuple(sorted({str(kind) for kind in layer_types}))


def _rope_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of scaling; a mapping by layer types has no kind itself."""
    kinds = {
        str(settings.get("rope_type", settings.get("type")) or "default")
        for settings in rope_settings(config)
    }
    return tuple(sorted({_ROPE_ALIASES.get(kind, kind) for kind in kinds} - {"default"}))


def _sliding_windows(
    config: Mapping[str, Any], layer_types: tuple[str, ...], positions: int | None
) -> tuple[int, ...]:
    """Return the windows in use: those of some layer, shorter than the maximum context."""
    if config.get("use_sliding_window") is False:
        return ()
    attending = [kind for kind in layer_types if "attention" in kind]
    if attending and not any("sliding" in kind or kind == "attention" for kind in attending):
        return ()
    if config.get("attention_layers") and "local" not in config["attention_layers"]:
        return ()
    sizes = {config.get(name) for name in _WINDOWS}
    return tuple(
        sorted(n for n in sizes if type(n) is int and 0 < n < (positions or float("inf")))
    )


def _chunk_size(config: Mapping[str, Any], layer_types: tuple[str, ...]) -> int | None:
    if layer_types and "chunked_attention" not in layer_types:
        return None
    return _integer(config, "attention_chunk_size")


def _alibi(config: Mapping[str, Any], model_type: str) -> bool:
    attention = config.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("alibi") is not None:
        return bool(attention["alibi"])
    setting = config.get("alibi")
    is_embedding = config.get("position_embedding_type") == "alibi"
    return bool(setting) or is_embedding or (setting is None and model_type in _ALIBI_TYPES)


def _is_recurrent(config: Mapping[str, Any], layer_types: tuple[str, ...]) -> bool:
    if any(config.get(name) is not None for name in _STATES):
        return True
    attending = {kind for kind in layer_types if "attention" in kind} - {"linear_attention"}
    return bool({*layer_types} - attending - {"hybrid"})


def _original_positions(
    config: Mapping[str, Any], rope_types: tuple[str, ...], positions: int | None
) -> int | None:
    if any("dynamic" in kind for kind in rope_types):
        return positions
    name = "original_max_position_embeddings"
    default = positions if "longrope" in rope_types else None
    original = [*(_integer(settings, name) for settings in rope_settings(config))]
    return next(filter(None, [*original, _integer(config, name)]), default)
