"""Corrects models of mlx-lm that differ from transformers, or refuses them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from genlm.plugin import ModelFacts, ModelLoadError, rope_settings
from genlm_mlx.layers import ACTIVATIONS, TANH_GELUS, can_correct_activation, correct_layers
from genlm_mlx.rotary import correct_rotary
from genlm_mlx.windows import cache_windows, correct_windows

# Settings that change the rows of the same weights.
_ROW_SETTINGS = (
    "activation_function",
    "attn_logit_softcapping",
    "attention_multiplier",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "logit_scale",
    "logits_scaling",
    "mlp_hidden_act",
    "norm_topk_prob",
    "residual_multiplier",
    "routed_scaling_factor",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "use_parallel_residual",
)

# Names of the attention window in configs.
_WINDOWS = ("sliding_window", "attention_window_size")

# With this many heads that score tokens, a score of exactly zero is rare.
_INDEX_HEADS = 16


def correct(model: Any, config: Any, max_context: int | None) -> None:
    """Make an mlx-lm model compute the rows of transformers with the same config.

    Args:
        model: Changed in place.
        config: transformers' config of the model.
        max_context: Maximum length of a context, None for no limit.

    Raises:
        ModelLoadError: Rows would be wrong; the message has the reason, the length from
            which they are wrong, and the versions.
    """
    text, config = getattr(model, "language_model", model), config.get_text_config()
    reason = (
        _wrong_experts(text, config)
        or _ignored_setting(text, config)
        or _wrong_indexer(config, max_context)
        or _wrong_rope(config, max_context)
    )
    if reason is not None:
        raise _wrong_rows_error(model, reason)
    _correct_windows(model, config, max_context)
    correct_layers(text, config)
    correct_rotary(model, config)


def _wrong_rows_error(model: Any, reason: str) -> ModelLoadError:
    name = type(model).__module__.rpartition(".")[2]
    return ModelLoadError(
        f"mlx-lm {version('mlx-lm')} would compute wrong rows of this model with its "
        f"{name!r}: {reason}"
    )


def _correct_windows(model: Any, config: Any, max_context: int | None) -> None:
    def effective(window: int | None) -> int | None:
        return None if window is None or (max_context and window >= max_context) else window

    stated = [effective(window) for window in _windows(config, len(model.layers))]
    windows = cache_windows(model).items()
    actual = {layer: effective(window) for layer, window in windows if layer < len(stated)}
    differing = [layer for layer, window in actual.items() if window != stated[layer]]
    problem = correct_windows(model, stated) if differing else None
    if problem is not None:
        layer = differing[0]
        sizes = [w for i in differing for w in (actual[i], stated[i]) if w is not None]
        raise _wrong_rows_error(
            model,
            f"its layer {layer} sees {_describe_window(actual[layer])}, that of the config "
            f"{_describe_window(stated[layer])}, which cannot be corrected, as {problem}. Rows "
            f"of up to {min(sizes)} tokens would be right: max_context={min(sizes)}",
        )


def _windows(config: Any, layers: int) -> list[int | None]:
    """Return the windows of the layers from the config; None for all tokens."""
    name = next((name for name in _WINDOWS if hasattr(type(config)(), name)), None)
    window = None if name is None else getattr(config, name)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind in {"sliding_attention", "attention"} else None for kind in kinds]


def _describe_window(window: int | None) -> str:
    return "all tokens" if window is None else f"{window} tokens"


def _ignored_setting(model: Any, config: Any) -> str | None:
    """Return an unusual setting of the architecture that mlx-lm does not read."""
    settings, defaults = vars(model.args), type(config)()
    for name in _ROW_SETTINGS:
        if name in ACTIVATIONS and can_correct_activation(model, config):
            continue
        value, default = getattr(config, name, None), getattr(defaults, name, None)
        if name not in settings and value != default and not {value, default} <= TANH_GELUS:
            return f"it does not read the setting {name}={value!r}"
        if "softcapping" in name and name in settings and value != settings[name]:
            return f"it uses {name}={settings[name]!r} for {value!r}"
    return None


def _wrong_experts(model: Any, config: Any) -> str | None:
    name = type(model).__module__.rpartition(".")[2]
    if name == "jamba" and config.num_experts > 1:
        return (
            "it normalises the weights of the experts chosen for a token, which transformers "
            "does not"
        )
    return None


def _wrong_rope(config: Any, max_context: int | None) -> str | None:
    """Return why rows differ if rotary frequencies depend on the length of the context."""
    if any("short_mscale" in settings for settings in rope_settings(config)):
        return "its rotary embeddings are not scaled by short_mscale in short contexts"
    facts = ModelFacts.of(config)
    longest = facts.original_positions if facts.rope_by_longest else None
    if longest is None or (max_context is not None and max_context <= longest):
        return None
    return (
        f"beyond {longest} tokens its rotary embeddings depend on the length of the context. "
        f"Rows of up to {longest} tokens would be right: max_context={longest}"
    )


def _wrong_indexer(config: Any, max_context: int | None) -> str | None:
    """Return why rows of sparse attention differ: the selection among equal scores."""
    top_k, heads = getattr(config, "index_topk", None), getattr(config, "index_n_heads", 0)
    if top_k is None or heads >= _INDEX_HEADS or (max_context or top_k + 1) <= top_k:
        return None
    return (
        f"beyond {top_k} tokens its attention chooses other tokens than transformers where "
        f"scores are equal, as many are with index_n_heads={heads}. Rows of up to {top_k} "
        f"tokens would be right: max_context={top_k}"
    )
