"""Checks and corrections of differences between the model that SGLang built and its config.

Some of SGLang's model classes ignore a part of a config, such as a window, an activation or the
base of the rotary embeddings. SGLang raises no error, but rows are wrong. The functions of this
module compare the config with the attributes of the built modules, so that they cover untested
classes. `docs/sglang-engine.md` lists the defects.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from genlm.plugin import ModelFacts, ModelLoadError, rope_settings
from genlm_sgl.versions import check_version

if TYPE_CHECKING:
    from genlm_sgl.served_model import ServedModel

_TORCH_NATIVE = "torch_native"

_FLEX = "flex_attention"
"""Backend that ignores windows and caps of scores."""

_APPROXIMATIONS = {
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu": "none",
}
"""Transformers' names of GELU activations, and their approximations in torch."""

_NOT_IN_FALLBACK = {
    "recurrent": "recurrent state",
    "chunked_attention": "chunks of attention",
    "attention_sinks": "attention sinks",
    "alibi": "position biases",
    "sparse_attention": "sparse attention",
}
"""Mechanisms that transformers' models do not have in SGLang."""

_OTHER_TOWERS = re.compile("vision|visual|audio")
"""Pattern in the names of modules outside the text model."""


def correct_model(module: torch.nn.Module, config: Any, backend: str | None) -> list[str]:
    """Set attributes of the built modules that SGLang did not set from the config.

    Must be called before the weights are loaded. It changes only attributes that a module reads
    in every forward pass: the approximation of GELU, the dtype of xIELU's parameters and, with
    the backend `torch_native`, the windows of layers, which only mask keys in that backend.

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
    for activation in _rounding_activations(module, dtype):
        activation.to(dtype)
        changed["xIELU"] = True
    if backend == _TORCH_NATIVE and _masks_windows():
        for layer, window in _layer_windows(module, config):
            size = -1 if window is None else window - 1
            if layer.sliding_window_size != size:
                layer.sliding_window_size = size
                changed["windows"] = True
    return list(changed)


def check_model(served: ServedModel, config: Any, facts: ModelFacts) -> None:
    """Refuse a model whose rows would be wrong.

    Args:
        served: The model that SGLang built.
        config: Config of the text model, read by transformers, with the user's overrides.
        facts: Facts of this config.

    Raises:
        ModelLoadError: The message has the reason and, if there is one, a remedy.
    """
    reason = (
        _omitted_by_fallback(served, facts)
        or _ignored_softcap(served, facts)
        or _wrong_window(served, config, facts)
        or _wrong_rope(served, config, facts)
        or _wrong_activation(served.model, config, facts)
        or _wrong_output_embedding(served.model, config, facts)
    )
    if reason is not None:
        raise ModelLoadError(f"SGLang {check_version()} {reason}")


def rope_overrides(config: Any, context_length: int | None) -> dict[str, Any]:
    """Return settings that replace dynamic rotary embeddings by plain ones.

    Both are equal up to the maximum position of the config. SGLang scales dynamic embeddings
    equally for all lengths, and computes only plain embeddings correctly.

    Args:
        config: Config of the text model.
        context_length: The user's option `context_length`.

    Returns:
        Settings of the config; empty for other embeddings or a longer context.
    """
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict) or not _is_dynamic(settings) or context_length is None:
        return {}
    if context_length > config.max_position_embeddings:
        return {}
    return {"rope_parameters": {**settings, "rope_type": "default"}}


# -- checks, which return the reason why rows would be wrong, or None ------------------


def _omitted_by_fallback(served: ServedModel, facts: ModelFacts) -> str | None:
    omitted = set(facts.mechanisms)
    if (facts.attention_chunk_size or 0) >= served.max_context:
        omitted.discard("chunked_attention")
    names = [name for mechanism, name in _NOT_IN_FALLBACK.items() if mechanism in omitted]
    if not served.is_fallback or not names:
        return None
    return (
        f"has no model class for {facts.architecture} and would run transformers' model "
        f"without its {' and '.join(names)}: rows would be wrong"
    )


def _ignored_softcap(served: ServedModel, facts: ModelFacts) -> str | None:
    capped = any(layer.logit_cap > 0 for layer in _attention_layers(served.model))
    if not capped and "attention_softcap" not in facts.mechanisms:
        return None
    ignoring = served.attention_backends & {_TORCH_NATIVE, _FLEX}
    if capped and not ignoring:
        return None
    part = f"attention backend {_join_sorted(ignoring)}" if capped else "model class"
    return (
        f"does not cap the attention scores of {facts.architecture}: its {part} ignores "
        f"the cap; rows would be wrong"
    )


def _wrong_window(served: ServedModel, config: Any, facts: ModelFacts) -> str | None:
    longest = served.max_context
    is_ignored = _FLEX in served.attention_backends
    for layer, window in _layer_windows(served.model, config):
        size = None if is_ignored else layer.sliding_window_size
        attended = longest if size is None or size < 0 else min(size + 1, longest)
        expected = longest if window is None else min(window, longest)
        if attended == expected:
            continue
        limit, stated = min(attended, expected), window or "no window"
        fault = (
            "ignores the sliding window"
            if attended == longest
            else f"attends to {attended} tokens"
        )
        return (
            f"{fault} in layer {layer.layer_id} of {facts.architecture} under "
            f"{_join_sorted(served.attention_backends)} attention, where the config has "
            f"{stated}; rows beyond {limit} tokens would be wrong. Pass "
            f"engine_opts={{'context_length': {limit}}}"
        )
    return None


def _wrong_rope(served: ServedModel, config: Any, facts: ModelFacts) -> str | None:
    is_dynamic = any(map(_is_dynamic, rope_settings(config)))
    if is_dynamic or "longrope" in facts.rope_types:
        limit = facts.original_positions
        if is_dynamic or limit is None or served.max_context > limit:
            return (
                f"scales the {_join_sorted(facts.rope_types)} rotary embeddings of "
                f"{facts.architecture} by lengths other than that of the sequence; rows "
                f"would be wrong. Pass engine_opts={{'context_length': {limit}}}, up to "
                f"which embeddings are not scaled"
            )
    expected = _rope_bases(config)
    modules = _rotary_modules(served.model)
    kinds = {type(module).__name__ for module in modules}
    if kinds == {"RotaryEmbedding"} and facts.rope_types:
        return (
            f"ignores the {_join_sorted(facts.rope_types)} scaling of the rotary "
            f"embeddings of {facts.architecture}: rows would be wrong"
        )
    bases = {float(module.base) for module in modules}
    if bases and not expected <= bases:
        return (
            f"computes the rotary embeddings of {facts.architecture} with base "
            f"{_join_sorted(bases)}, where the config has {_join_sorted(expected)}: rows would "
            f"be wrong"
        )
    return None


def _wrong_activation(module: torch.nn.Module, config: Any, facts: ModelFacts) -> str | None:
    if _rounding_activations(module, next(module.parameters()).dtype):
        return (
            f"rounds the parameters of xIELU in {facts.architecture} to bfloat16: rows "
            f"would be wrong"
        )
    expected = _APPROXIMATIONS.get(_activation(config))
    computed = {activation.approximate for activation in _gelu_modules(module)}
    if expected is None or computed <= {expected}:
        return None
    return (
        f"computes another GELU (approximation {_join_sorted(computed)}) in "
        f"{facts.architecture} than {_activation(config)!r}: rows would be wrong"
    )


def _wrong_output_embedding(
    module: torch.nn.Module, config: Any, facts: ModelFacts
) -> str | None:
    head = getattr(getattr(module, "lm_head", None), "weight", None)
    if config.tie_word_embeddings or head is None:
        return None
    is_tied = any(
        getattr(child, "weight", None) is head
        for name, child in module.named_modules(remove_duplicate=False)
        if name.partition(".")[0] != "lm_head"
    )
    if not is_tied:
        return None
    return (
        f"uses the input embedding of {facts.architecture} as output embedding, where "
        f"the config has tie_word_embeddings=False: rows would be wrong"
    )


# -- the built model ------------------------------------------------------------------


def _attention_layers(module: torch.nn.Module) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [child for child in module.modules() if isinstance(child, RadixAttention)]
    # The fallback has a dict of layers, which torch does not traverse.
    return layers or [*getattr(module, "attention_instances", {}).values()]


def _layer_windows(module: torch.nn.Module, config: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield the attention layers and their windows in the config, None for no window.

    If the class of the config has no windows, no layer is yielded.
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
    """Whether `torch_native` masks keys correctly by the window of a layer."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    mask = getattr(TorchNativeAttnBackend, "_make_sliding_window_mask", None)
    if mask is None:
        return False
    sizes = {"q_len": 4, "kv_len": 4, "sliding_window_size": 1}
    computed = mask(**sizes, device=torch.device("cpu"))
    return torch.equal(computed, torch.ones(4, 4, dtype=torch.bool).tril().triu(-1))


def _gelu_modules(module: torch.nn.Module) -> list[Any]:
    from sglang.srt.layers.activation import GeluAndMul

    return [
        child
        for name, child in module.named_modules()
        if isinstance(child, GeluAndMul) and not _OTHER_TOWERS.search(name)
    ]


def _rounding_activations(module: torch.nn.Module, dtype: torch.dtype) -> list[Any]:
    from sglang.srt.layers.activation import XIELU

    return [
        child
        for child in module.modules()
        if isinstance(child, XIELU) and child.alpha_p.dtype.itemsize < dtype.itemsize
    ]


def _rotary_modules(module: torch.nn.Module) -> list[Any]:
    return [
        child
        for child in module.modules()
        if hasattr(child, "rotary_dim")
        and isinstance(getattr(child, "base", None), int | float)
    ]


# -- the config -----------------------------------------------------------------------


def _activation(config: Any) -> str:
    names = (getattr(config, name, None) for name in ("hidden_activation", "hidden_act"))
    return str(next((name for name in names if name is not None), ""))


def _is_dynamic(settings: Mapping[str, Any]) -> bool:
    # With `alpha`, the scale is constant.
    kind = settings.get("rope_type") or settings.get("type")
    return kind == "dynamic" and "alpha" not in settings


def _rope_bases(config: Any) -> set[float]:
    """Return the bases of the rotary embeddings of all layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    parameters = [settings, *(settings[kind] for kind in kinds & settings.keys())]
    thetas = ((layer_type or {}).get("rope_theta") for layer_type in parameters)
    return {float(theta) for theta in thetas if theta}


def _join_sorted(values: Iterable[Any]) -> str:
    return " and ".join(sorted(map(str, values)))
