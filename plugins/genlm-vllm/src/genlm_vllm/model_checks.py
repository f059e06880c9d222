"""Checks that vLLM computes correct rows of a model.

They read the config before the model is built, and the built model afterwards. If vLLM would
compute wrong rows, its arguments are changed or the model is refused. `docs/vllm-engine.md`
describes the defects of vLLM, `docs/vllm-architectures.md` lists the compared families.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from genlm.plugin import (
    ModelFacts,
    ModelLoadError,
    VerifiedFamilies,
    check_causal,
    check_verified,
)
from genlm_vllm.versions import check_version

_WRONG_DEFINITIONS = {
    "BloomForCausalLM": "computes the exact GELU instead of its tanh approximation",
    "Gemma3nForCausalLM": "omits the token embeddings of each layer",
}
"""Models that vLLM defines differently from transformers, without a difference in modules."""

_AUTOMATIC = (None, -1, "auto")
"""Values of `max_model_len` with which vLLM chooses the length."""


_SHORTEST = 2
"""Smallest `max_model_len`: a token of a context, and one that vLLM generates."""


def required_arguments(
    config: Any, facts: ModelFacts, engine_opts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `vllm.EngineArgs` that correct rows require.

    Args:
        config: The `vllm.VllmConfig` without these arguments.
        facts: Facts of the model.
        engine_opts: The user's options.

    Raises:
        ModelLoadError: The user's options contradict them.
    """
    _check_step(config)
    return _max_length_argument(config, facts, engine_opts) | _prefix_cache_argument(
        config, facts, engine_opts
    )


def _check_step(config: Any) -> None:
    """Refuse contexts that vLLM would never compute, because they must fit into one step."""
    longest, settings = config.model_config.max_model_len, config.scheduler_config
    tokens = settings.max_num_scheduled_tokens
    if not settings.enable_chunked_prefill and tokens is not None and tokens < longest:
        raise ModelLoadError(
            f"max_num_scheduled_tokens={tokens} is less than max_model_len={longest}, and "
            f"with enable_chunked_prefill=False vLLM would not compute longer contexts. Raise "
            f"it, or leave one of the two options out"
        )


def _max_length_argument(
    config: Any, facts: ModelFacts, engine_opts: Mapping[str, Any]
) -> dict[str, Any]:
    """Limit contexts if rotary frequencies depend on their length, which vLLM ignores."""
    if config.model_config.max_model_len < _SHORTEST:
        raise ModelLoadError(
            f"max_model_len={config.model_config.max_model_len} has no room for a context, "
            f"because vLLM generates a token; pass at least {_SHORTEST}"
        )
    if not facts.rope_by_longest:
        return {}
    limit = facts.original_positions
    if limit is None or config.model_config.max_model_len <= limit:
        return {}
    if engine_opts.get("max_model_len") in _AUTOMATIC:
        return {"max_model_len": limit}
    kinds = " and ".join(facts.rope_types)
    raise ModelLoadError(
        f"max_model_len={engine_opts['max_model_len']!r}, but {facts.architecture} has {kinds} "
        f"rotary embeddings: beyond {limit} tokens their frequencies depend on the length of "
        f"the context, and vLLM {check_version()} uses the same frequencies for all contexts. "
        f"Rows would be wrong; leave max_model_len out, or pass at most {limit}"
    )


def _prefix_cache_argument(
    config: Any, facts: ModelFacts, engine_opts: Mapping[str, Any]
) -> dict[str, Any]:
    """Disable the prefix cache for recurrent models on the CPU.

    vLLM's scan returns only the last state of a sequence; the cache needs intermediate states.
    """
    from vllm.platforms import current_platform

    caches = config.cache_config.enable_prefix_caching
    if not (caches and "recurrent" in facts.mechanisms and current_platform.is_cpu()):
        return {}
    if engine_opts.get("enable_prefix_caching"):
        raise ModelLoadError(
            f"enable_prefix_caching=True, but {facts.architecture} has recurrent layers, whose "
            f"states vLLM {check_version()} caches wrongly on the CPU. Rows would be wrong; "
            f"leave the option out"
        )
    return {"enable_prefix_caching": False}


def check_served(
    config: Any,
    facts: ModelFacts,
    descriptions: Sequence[Mapping[str, Any]],
    *,
    unverified: str,
) -> bool:
    """Refuse a model that vLLM built differently from its config; warn of an unverified one.

    Args:
        config: The `vllm.VllmConfig`.
        facts: Facts of the model.
        descriptions: `RowWorker.genlm_describe_model` of each worker.
        unverified: `"warn"` or `"refuse"`.

    Returns:
        Whether `forward_problem` must compare the rows, because no model was compared on this
        kind of device and `unverified="refuse"`.

    Raises:
        ModelLoadError: Rows would be wrong, or the family is unverified and
            `unverified="refuse"`.
        ValueError: `unverified` has another value.

    Warns:
        UnverifiedModelWarning: The family is unverified.
    """
    windows: dict[str, int] = {}
    for part in descriptions:
        windows |= part["windows"]
    problem = _window_problem(config, facts, windows) or _definition_problem(
        facts, descriptions
    )
    name = f"vLLM {check_version()}"
    if problem is not None:
        raise ModelLoadError(f"{name} {problem}")
    facts = _describe_implementation(config, facts, descriptions)
    if unverified == "refuse" and not has_compared_kernels():
        check_causal(facts)
        return True
    verified = VerifiedFamilies.of_package("genlm_vllm")
    check_verified(name, facts, verified, unverified=unverified)
    return False


def has_compared_kernels() -> bool:
    """Whether the verified families were compared on this kind of device."""
    from vllm.platforms import current_platform

    on_cpu: bool = current_platform.is_cpu()
    return on_cpu


def _window_problem(config: Any, facts: ModelFacts, windows: Mapping[str, int]) -> str | None:
    """Return how the layers' windows differ from those of the config, None if they agree."""
    longest = config.model_config.max_model_len
    stated = {window for window in facts.sliding_windows if window < longest}
    if not stated:
        return None
    kinds = getattr(config.model_config.hf_text_config, "layer_types", None) or ()
    sliding = sum("sliding" in kind for kind in kinds)
    counts = Counter(windows.values())
    if set(counts) == stated and sliding in (0, counts.total()):
        return None
    layers = ", ".join(f"{window} in {count}" for window, count in sorted(counts.items()))
    expected = f"{', '.join(map(str, sorted(stated)))} in {sliding or 'all'}"
    return (
        f"serves {facts.architecture} with sliding windows that differ from its config: "
        f"{layers or 'none in any'} layers instead of {expected}. Rows beyond {min(stated)} "
        f"tokens would be wrong. Pass max_model_len={min(stated)} at most, or use another "
        f"engine"
    )


def _definition_problem(
    facts: ModelFacts, descriptions: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return how the built model differs from its definition, None if they agree."""
    for part in descriptions:
        if part["model"] in _WRONG_DEFINITIONS:
            defect = _WRONG_DEFINITIONS[part["model"]]
        elif part["rounded"]:
            name, dtype = next(iter(part["rounded"].items()))
            defect = f"stores {name} in {dtype}, which is less precise than the model's dtype"
        else:
            continue
        return (
            f"serves {facts.architecture}, but {defect}. Rows would be wrong; use another "
            f"engine"
        )
    return None


def _describe_implementation(
    config: Any, facts: ModelFacts, descriptions: Sequence[Mapping[str, Any]]
) -> ModelFacts:
    """Append the implementation to the architecture unless it is the one that was compared."""
    from vllm.platforms import current_platform

    name = facts.architecture
    if config.model_config.model_impl not in ("auto", "vllm"):
        name = f"{name} by {' and '.join(sorted({part['model'] for part in descriptions}))}"
    if not has_compared_kernels():
        backends = {backend for part in descriptions for backend in part["attention"]}
        name = f"{name} with {' and '.join(sorted(backends)) or current_platform.device_name}"
    return dataclasses.replace(facts, architecture=name)
