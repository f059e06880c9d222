"""Translates a config of transformers to the names that mlx-lm reads.

mlx-lm reads the names of older configs, such as `rope_theta` and `rope_scaling`, for which
transformers 5 writes `rope_parameters`. Where a setting is missing, mlx-lm uses its default
without a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any


def published_config(
    source: str | os.PathLike[str],
    changes: Mapping[str, Any],
    *,
    revision: str | None = None,
) -> tuple[Mapping[str, Any], Any]:
    """Return a config with changes, and transformers' reading of it.

    Args:
        source: A folder or a hub id.
        changes: Changed settings, as in `mlx_lm.load`'s `model_config`.
        revision: Revision of a hub id.

    Returns:
        The settings, and the `transformers.PretrainedConfig`; None for an architecture that
        transformers does not support, and for a model whose config it cannot read.
    """
    from transformers import PretrainedConfig

    try:
        settings, _ = PretrainedConfig.get_config_dict(source, revision=revision)
    except OSError:  # mlx-lm reads the same files and reports what is missing
        return changes, None
    settings = {**settings, **changes}
    return settings, read_config(settings)


def read_config(settings: Mapping[str, Any]) -> Any:
    """Return transformers' config of settings, None for an unsupported architecture."""
    from transformers import CONFIG_MAPPING

    kind = settings.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[kind].from_dict(dict(settings))


def mlx_settings(written: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the settings with which mlx-lm builds the model that transformers builds.

    Args:
        written: Contents of the config's file.
        config: The config that `published_config` returns.
    """
    nested = written.get("text_config")
    text_settings = nested if isinstance(nested, Mapping) else written
    text = config.get_text_config()
    settings = text.to_dict()
    names = {alias: name for alias, name in text.attribute_map.items() if name in settings}
    settings |= {alias: settings[name] for alias, name in names.items()}
    added = {
        name: value
        for name, value in settings.items()
        if value is not None and text_settings.get(name) is None
    }
    added |= _older_rope_settings(settings.get("rope_parameters") or {})
    added |= _derived_settings(settings)
    return {"text_config": {**text_settings, **added}} if text_settings is nested else added


def _older_rope_settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of rotary embeddings by their older names."""
    added: dict[str, Any] = {}
    if any(isinstance(value, Mapping) for value in parameters.values()):  # by kind of layer
        local = parameters.get("sliding_attention") or {}
        if "rope_theta" in local:
            added["rope_local_base_freq"] = local["rope_theta"]
        parameters = parameters.get("full_attention") or {}
    if "rope_theta" in parameters:
        added["rope_theta"] = added["rotary_emb_base"] = parameters["rope_theta"]
    share = parameters.get("partial_rotary_factor")
    if share is not None:
        added["partial_rotary_factor"] = added["rotary_pct"] = share
    kind = parameters.get("rope_type", "default")
    if parameters:
        scaling = {"type": kind, **parameters}
        added["rope_scaling"] = None if kind == "default" else scaling
    return added


def _derived_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of mlx-lm that transformers derives from other settings."""
    added: dict[str, Any] = {}
    if settings.get("n_positions"):
        added["n_ctx"] = settings["n_positions"]
    if settings.get("n_embd") and not settings.get("n_inner"):
        added["n_inner"] = 4 * settings["n_embd"]
    heads = settings.get("num_attention_heads")
    if settings.get("head_dim") is None and isinstance(heads, int):
        added["head_dim"] = settings["hidden_size"] // heads
    return added | _window_pattern(settings["model_type"], settings.get("layer_types") or ())


def _window_pattern(model_type: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the period of layers with full attention, if all others have windows."""
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if model_type == "exaone4":  # a letter for each layer
        letters = "".join("G" if kind == "full_attention" else "L" for kind in kinds)
        return {"sliding_window_pattern": letters if "L" in letters else None}
    if not full or set(kinds) != {"full_attention", "sliding_attention"}:
        return {}
    period = full[0] + 1
    is_periodic = full == list(range(full[0], len(kinds), period))
    return {"sliding_window_pattern": period} if is_periodic else {}
