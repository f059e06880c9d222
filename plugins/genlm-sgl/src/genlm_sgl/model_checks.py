"""Differences between the model that SGLang built and its config: corrected, or refused.

Some of SGLang's model classes ignore a part of a config, such as a window, an activation or the
base of the rotary embeddings. Nothing raises; rows are wrong. The functions here compare the
config with the attributes of the built modules, so that they cover classes that were not
tested. `docs/sglang-engine.md` lists the defects.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from genlm.plugin import ModelFacts, ModelLoadError, rope_settings
from genlm_sgl.versions import installed_version

__all__ = ["BuiltModel", "check_model", "correct_model", "rope_overrides"]

_TORCH_NATIVE = "torch_native"

_APPROXIMATIONS = {
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu": "none",
}
"""Transformers' names of GELU activations, and their approximations in torch."""

_LONGROPE = {"longrope", "su"}
"""Names of LongRoPE; the first Phi-3 models call it su."""

_OTHER_TOWERS = re.compile("vision|visual|audio")
"""Part of the names of modules outside the text model."""


@dataclass(frozen=True)
class BuiltModel:
    """A model that SGLang built.

    Attributes:
        module: The torch module.
        config: Config of the text model, read by transformers, with the user's overrides.
        facts: Facts of this config.
        backends: SGLang's names of the attention backends in use.
        max_context: The longest prompt.
        is_fallback: Whether SGLang has no model class and runs transformers' model.
    """

    module: torch.nn.Module
    config: Any
    facts: ModelFacts
    backends: frozenset[str]
    max_context: int
    is_fallback: bool


def correct_model(module: torch.nn.Module, config: Any, backend: str | None) -> list[str]:
    """Set attributes of the built modules that SGLang did not set from the config.

    Call it before the weights are loaded. It changes only attributes that a module reads in
    each forward pass: the approximation of GELU, the dtype of xIELU's parameters and, with the
    backend `torch_native`, the window of each layer, which there only masks keys.

    Args:
        module: The model that SGLang built.
        config: Config of the text model, read by transformers.
        backend: SGLang's name of the attention backend; None if SGLang chooses it.

    Returns:
        Names of the changes.
    """
    changed = {}
    approximation = _APPROXIMATIONS.get(_activation(config))
    for activation in _gelu_modules(module) if approximation else ():
        if activation.approximate != approximation:
            activation.approximate = approximation
            changed["GELU"] = True
    dtype = next(module.parameters()).dtype
    for activation in _rounding(module, dtype):
        activation.to(dtype)
        changed["xIELU"] = True
    if backend == _TORCH_NATIVE and _masks_windows():
        for layer, window in _layer_windows(module, config):
            size = -1 if window is None else window - 1
            if layer.sliding_window_size != size:
                layer.sliding_window_size = size
                changed["windows"] = True
    return list(changed)


def check_model(built: BuiltModel) -> None:
    """Refuse a model whose rows would be wrong.

    Raises:
        ModelLoadError: With the reason and, if there is one, a remedy.
    """
    for check in _CHECKS:
        reason = check(built)
        if reason is not None:
            raise ModelLoadError(f"SGLang {installed_version()} {reason}")


def rope_overrides(config: Any, context_length: int | None) -> dict[str, Any]:
    """Return settings that replace dynamic rotary embeddings by plain ones.

    Both are equal up to the positions that the config states. SGLang scales dynamic ones for
    all lengths alike, and computes only the plain ones correctly.

    Args:
        config: Config of the text model.
        context_length: The user's option.

    Returns:
        Settings of the config; empty for other embeddings or a longer context.
    """
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict) or not _is_dynamic(settings) or context_length is None:
        return {}
    if context_length > config.max_position_embeddings:
        return {}
    return {"rope_parameters": {**settings, "rope_type": "default"}}


# -- checks that return why the rows would be wrong, or None ---------------------------


def _check_fallback(built: BuiltModel) -> str | None:
    facts, chunk = built.facts, built.facts.attention_chunk_size
    left_out = {
        "recurrent state": facts.recurrent,
        "chunks of attention": chunk is not None and chunk < built.max_context,
        "attention sinks": facts.attention_sinks,
        "position biases": facts.alibi,
        "sparse attention": facts.sparse_attention,
    }
    names = [name for name, used in left_out.items() if used]
    if not built.is_fallback or not names:
        return None
    return (
        f"has no model class for {facts.architecture} and would run transformers' model "
        f"without its {' and '.join(names)}: rows would be wrong"
    )


def _check_caps(built: BuiltModel) -> str | None:
    capped = any(layer.logit_cap > 0 for layer in _attention_layers(built.module))
    if not capped and built.facts.attention_softcap is None:
        return None
    if capped and _TORCH_NATIVE not in built.backends:
        return None
    who = f"its attention backend {_TORCH_NATIVE!r}" if capped else "its model"
    return (
        f"does not cap the attention scores of {built.facts.architecture}: {who} leaves it "
        f"out; rows would be wrong"
    )


def _check_windows(built: BuiltModel) -> str | None:
    limit = built.max_context
    for layer, window in _layer_windows(built.module, built.config):
        size = layer.sliding_window_size
        found = limit if size is None or size < 0 else min(size + 1, limit)
        wanted = limit if window is None else min(window, limit)
        if found == wanted:
            continue
        most, stated = min(found, wanted), window or "no window"
        fault = "ignores the sliding window" if found == limit else f"attends to {found} tokens"
        return (
            f"{fault} in layer {layer.layer_id} of {built.facts.architecture} under "
            f"{_listed(built.backends)} attention, where the config has {stated}; rows beyond "
            f"{most} tokens would be wrong. Pass engine_opts={{'context_length': {most}}}"
        )
    return None


def _check_rope(built: BuiltModel) -> str | None:
    for settings in rope_settings(built.config):
        dynamic = _is_dynamic(settings)
        if dynamic or _rope_kind(settings) in _LONGROPE:
            facts = built.facts
            most = facts.max_positions if dynamic else facts.original_positions
            if dynamic or most is None or built.max_context > most:
                return (
                    f"scales the {_rope_kind(settings)} rotary embeddings of "
                    f"{facts.architecture} by other lengths than each sequence's own; rows "
                    f"would be wrong. Pass engine_opts={{'context_length': {most}}}, up to "
                    f"which nothing is scaled"
                )
    wanted = _rope_bases(built.config)
    modules = _rotary_modules(built.module)
    kinds = {type(each).__name__ for each in modules}
    if kinds == {"RotaryEmbedding"} and built.facts.rope_types:
        return (
            f"ignores the {_listed(built.facts.rope_types)} scaling of the rotary embeddings "
            f"of {built.facts.architecture}: rows would be wrong"
        )
    found = {float(each.base) for each in modules}
    if found and not wanted <= found:
        return (
            f"computes the rotary embeddings of {built.facts.architecture} with base "
            f"{_listed(found)}, where the config has {_listed(wanted)}: rows would be wrong"
        )
    return None


def _check_activation(built: BuiltModel) -> str | None:
    if _rounding(built.module, next(built.module.parameters()).dtype):
        return (
            f"rounds the parameters of xIELU in {built.facts.architecture} to bfloat16: rows "
            f"would be wrong"
        )
    wanted = _APPROXIMATIONS.get(_activation(built.config))
    found = {each.approximate for each in _gelu_modules(built.module)}
    if wanted is None or found <= {wanted}:
        return None
    return (
        f"computes another GELU (approximation {_listed(found)}) in "
        f"{built.facts.architecture} than {_activation(built.config)!r}: rows would be wrong"
    )


_CHECKS = (_check_fallback, _check_caps, _check_windows, _check_rope, _check_activation)


# -- the built model ------------------------------------------------------------------


def _attention_layers(module: torch.nn.Module) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [each for each in module.modules() if isinstance(each, RadixAttention)]
    # The fallback has them in a dict, which torch does not traverse.
    return found or [*getattr(module, "attention_instances", {}).values()]


def _layer_windows(module: torch.nn.Module, config: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield attention layers and the window of each in the config, None for no window.

    Yields nothing for configs whose class has no windows.
    """
    if "sliding_window" not in inspect.signature(type(config)).parameters:
        return
    used = getattr(config, "use_sliding_window", True) is not False
    window = config.sliding_window if used else None
    kinds = getattr(config, "layer_types", None)
    for layer in _attention_layers(module):
        kind = kinds[layer.layer_id] if kinds else "sliding_attention"
        if kind == "sliding_attention":
            yield layer, window
        elif kind == "full_attention":
            yield layer, None


def _masks_windows() -> bool:
    """Whether `torch_native` masks keys by the window of a layer as expected."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    mask = getattr(TorchNativeAttnBackend, "_make_sliding_window_mask", None)
    if mask is None:
        return False
    sizes = {"q_len": 4, "kv_len": 4, "sliding_window_size": 1}
    found = mask(**sizes, device=torch.device("cpu"))
    return torch.equal(found, torch.ones(4, 4, dtype=torch.bool).tril().triu(-1))


def _gelu_modules(module: torch.nn.Module) -> list[Any]:
    from sglang.srt.layers.activation import GeluAndMul

    return [
        each
        for name, each in module.named_modules()
        if isinstance(each, GeluAndMul) and not _OTHER_TOWERS.search(name)
    ]


def _rounding(module: torch.nn.Module, dtype: torch.dtype) -> list[Any]:
    from sglang.srt.layers.activation import XIELU

    return [
        each
        for each in module.modules()
        if isinstance(each, XIELU) and each.alpha_p.dtype.itemsize < dtype.itemsize
    ]


def _rotary_modules(module: torch.nn.Module) -> list[Any]:
    return [
        each
        for each in module.modules()
        if hasattr(each, "rotary_dim") and isinstance(getattr(each, "base", None), int | float)
    ]


# -- the config -----------------------------------------------------------------------


def _activation(config: Any) -> str:
    names = (getattr(config, name, None) for name in ("hidden_activation", "hidden_act"))
    return str(next((name for name in names if name is not None), ""))


def _is_dynamic(settings: Mapping[str, Any]) -> bool:
    # With `alpha`, the scale is constant.
    return _rope_kind(settings) == "dynamic" and "alpha" not in settings


def _rope_kind(settings: Mapping[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type") or "default")


def _rope_bases(config: Any) -> set[float]:
    """Return the bases of the rotary embeddings of all layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    each = [settings, *(settings[kind] for kind in kinds & settings.keys())]
    return {float(one["rope_theta"]) for one in each if (one or {}).get("rope_theta")}


def _listed(values: Iterable[Any]) -> str:
    return " and ".join(sorted(map(str, values)))
