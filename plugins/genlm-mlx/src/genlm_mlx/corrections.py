"""Corrects differences of mlx-lm's models from transformers, or refuses the model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from genlm.plugin import ModelLoadError, rope_settings
from genlm_mlx.layers import ACTIVATIONS, TANH_GELUS, correct_layers, corrects_activation
from genlm_mlx.rotary import correct_rotary, scaled_beyond
from genlm_mlx.windows import correct_windows, own_windows

__all__ = ["correct"]

# Settings that change the rows of the same weights.
_TELLING = (
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
        _experts(text, config)
        or _ignored(text, config)
        or _indexer(config, max_context)
        or _scaled_by_length(config, max_context)
    )
    if reason is not None:
        raise _wrong(model, reason)
    _correct_windows(model, config, max_context)
    correct_layers(text, config)
    correct_rotary(model, config)


def _wrong(model: Any, reason: str) -> ModelLoadError:
    name = type(model).__module__.rpartition(".")[2]
    return ModelLoadError(
        f"mlx-lm {version('mlx-lm')} would compute wrong rows of this model with its "
        f"{name!r}: {reason}"
    )


def _correct_windows(model: Any, config: Any, max_context: int | None) -> None:
    def effective(window: int | None) -> int | None:
        return None if window is None or (max_context and window >= max_context) else window

    stated = [effective(window) for window in _windows(config, len(model.layers))]
    own = own_windows(model).items()
    found = {place: effective(window) for place, window in own if place < len(stated)}
    differing = [place for place, window in found.items() if window != stated[place]]
    problem = correct_windows(model, stated) if differing else None
    if problem is not None:
        place = differing[0]
        sizes = [w for p in differing for w in (found[p], stated[p]) if w is not None]
        raise _wrong(
            model,
            f"its layer {place} sees {_named(found[place])}, that of the config "
            f"{_named(stated[place])}, which cannot be corrected, as {problem}. Rows of up to "
            f"{min(sizes)} tokens would be right: max_context={min(sizes)}",
        )


def _windows(config: Any, layers: int) -> list[int | None]:
    """Return the window of each layer by the config; None for all tokens."""
    name = next((name for name in _WINDOWS if hasattr(type(config)(), name)), None)
    window = None if name is None else getattr(config, name)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind in {"sliding_attention", "attention"} else None for kind in kinds]


def _named(window: int | None) -> str:
    return "all tokens" if window is None else f"{window} tokens"


def _ignored(model: Any, config: Any) -> str | None:
    """Return an unusual setting of the architecture that mlx-lm does not read."""
    read, usual = vars(model.args), type(config)()
    for name in _TELLING:
        if name in ACTIVATIONS and corrects_activation(model, config):
            continue
        value, default = getattr(config, name, None), getattr(usual, name, None)
        if name not in read and value != default and not {value, default} <= TANH_GELUS:
            return f"it does not read the setting {name}={value!r}"
        if "softcapping" in name and name in read and value != read[name]:
            return f"it takes {name}={read[name]!r} for {value!r}"
    return None


def _experts(model: Any, config: Any) -> str | None:
    name = type(model).__module__.rpartition(".")[2]
    if name == "jamba" and config.num_experts > 1:
        return (
            "it normalises the weights of the experts chosen for a token, which transformers "
            "does not"
        )
    return None


def _scaled_by_length(config: Any, max_context: int | None) -> str | None:
    """Return why rows differ where rotary frequencies depend on the length of the context."""
    for settings in rope_settings(config):
        if "short_mscale" in settings:
            return "its rotary embeddings are not scaled by short_mscale in short contexts"
        longest = scaled_beyond(config, settings)
        if longest is not None and (max_context is None or longest < max_context):
            return (
                f"beyond {longest} tokens its rotary embeddings depend on the length of the "
                f"context. Rows of up to {longest} tokens would be right: max_context={longest}"
            )
    return None


def _indexer(config: Any, max_context: int | None) -> str | None:
    """Return why rows of sparse attention differ: its choice between equal scores."""
    chosen, heads = getattr(config, "index_topk", None), getattr(config, "index_n_heads", 0)
    if chosen is None or heads >= _INDEX_HEADS or (max_context or chosen + 1) <= chosen:
        return None
    return (
        f"beyond {chosen} tokens its attention chooses other tokens than transformers where "
        f"scores are equal, as many are with index_n_heads={heads}. Rows of up to {chosen} "
        f"tokens would be right: max_context={chosen}"
    )
