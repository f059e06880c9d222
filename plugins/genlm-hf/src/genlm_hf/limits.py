"""What a model can take: the length of a context, the ids that it can embed."""

from __future__ import annotations

from typing import Any

import torch

from genlm import rope_settings

__all__ = ["context_window", "embedding_rows", "input_device", "is_offloaded", "padding_id"]

# What configs call the number of positions; transformers maps most to the first.
_WINDOW_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def context_window(config: Any) -> int | None:
    """Return the most tokens that a model takes, None without such a limit.

    Read from the model's config, never from its tokenizer, whose
    `model_max_length` is often arbitrary. Models without positions (Mamba) and
    with ALiBi biases computed on the fly (BLOOM, Falcon) have no limit; a sliding
    attention window is none.
    """
    text = config.get_text_config()
    if getattr(text, "alibi", False):
        return None
    for name in _WINDOW_NAMES:
        window = getattr(text, name, None)
        if isinstance(window, int) and window > 0:
            return max([window, *_scaled_windows(text, window)])
    return None


def _scaled_windows(config: Any, window: int) -> list[int]:
    """Longer windows that rotary scaling gives, where the config states the short one."""
    scaled = []
    for settings in rope_settings(config):
        kind = settings.get("rope_type", settings.get("type"))
        factor = settings.get("factor") or 1.0
        if kind in {"linear", "dynamic"}:
            scaled.append(int(window * factor))
        elif kind == "yarn":
            original = settings.get("original_max_position_embeddings") or window
            scaled.append(int(original * factor))
    return scaled


def embedding_rows(model: Any) -> int | None:
    """Return how many ids the model can embed, None if it does not say."""
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if isinstance(rows, int):
        return rows
    weight = getattr(embedding, "weight", None)
    return int(weight.shape[0]) if weight is not None and weight.ndim == 2 else None


def padding_id(config: Any, rows: int | None) -> int:
    """Return an id that the model can embed, its own padding id where it has one."""
    own = getattr(config.get_text_config(), "pad_token_id", None)
    known = isinstance(own, int) and own >= 0 and (rows is None or own < rows)
    return int(own) if known and own is not None else 0


def input_device(model: Any) -> torch.device:
    """Return where to put token ids for a model, which may be spread over devices."""
    device: torch.device = model.get_input_embeddings().weight.device
    # Offloaded weights rest on "meta"; accelerate then moves what it is given.
    return torch.device("cpu") if device.type == "meta" else device


def is_offloaded(model: Any) -> bool:
    """Whether weights are elsewhere, on disk or a CPU, until a pass needs them."""
    return any(parameter.is_meta for parameter in model.parameters())
