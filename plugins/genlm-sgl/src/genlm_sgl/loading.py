"""Options of SGLang's `ServerArgs`: checks and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from genlm.plugin import ModelLoadError, cache_budget_bytes, dtype_name

__all__ = [
    "checked_options",
    "cpu_running_requests",
    "cpu_sizes",
    "cpu_token_capacity",
    "default_options",
    "environment",
    "load_error",
    "mapping_of",
    "runs_on_cpu",
]

_ONE_PROCESS = ("tp_size", "dp_size", "pp_size", "ep_size", "attn_cp_size", "nnodes")
_MODEL_NAMES = ("model_path", "model", "base_gpu_id")

_REFUSED = {
    "speculative_algorithm": "its passes compute several tokens of a request, and draw them",
    "dllm_algorithm": "a diffusion model has no row after each prefix",
    "disaggregation_mode": "requests would wait for another server",
    "is_embedding": "an embedding model computes no logits",
    "skip_tokenizer_init": "the tokenizer's ids define the rows",
    "enable_hierarchical_cache": "the KV cache holds genlm's prefix tree",
    "enable_hisparse": "the KV cache holds genlm's prefix tree",
    "enable_unified_memory": "the KV cache holds genlm's prefix tree",
    "enable_two_batch_overlap": "passes are not divided",
}
"""Refused options with reasons; values without effect are accepted."""

_LORA_RANK = 16

_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_KV_SHARE = 0.25
"""Share of the free memory for the KV cache on a CPU."""

_MIN_TOKENS, _MAX_TOKENS = 2**10, 2**17

_REQUESTS_BYTES = 2**26
"""Maximum bytes of SGLang's table of slots, and of the logits of a full pass."""

_MIN_REQUESTS, _MAX_REQUESTS = 64, 1024


def environment(*, cpu: bool) -> dict[str, str]:
    """Return environment variables that SGLang reads while it is imported and built."""
    return {"SGLANG_USE_CPU_ENGINE": "1"} if cpu else {}


def runs_on_cpu(options: Mapping[str, Any]) -> bool:
    """Whether SGLang computes on the CPU: by option, or without an accelerator."""
    return options.get("device") == "cpu" or not torch.accelerator.is_available()


def default_options(*, cpu: bool) -> dict[str, Any]:
    """Return the default arguments of `ServerArgs`.

    Features of SGLang's scheduler and server are off, because the engine does not run them. On
    a CPU, SGLang has no graphs, and only its plain torch kernels.
    """
    options = {
        "disable_cuda_graph": cpu,
        "disable_hybrid_swa_memory": True,  # one kind of slots for all layers
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "grammar_backend": "none",
        "log_level": "error",
        "lora_strict_loading": True,
        "lora_target_modules": list(_LORA_MODULES),
        "max_lora_rank": _LORA_RANK,
        "page_size": 1,
        "random_seed": 0,
        "skip_server_warmup": True,
    }
    if cpu:
        options |= {
            "lora_backend": "torch_native",
            "attention_backend": "torch_native",
            "device": "cpu",
            "dtype": "float32",
            # `max_total_tokens` sizes the cache. SGLang would shrink it, or refuse to start,
            # if other processes took more than this share of memory during loading.
            "mem_fraction_static": 0.999,
            "sampling_backend": "pytorch",
        }
    return options


def mapping_of(engine_opts: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the caller's options, `{}` for None.

    Raises:
        TypeError: They are not a mapping.
    """
    options: object = {} if engine_opts is None else engine_opts
    if not isinstance(options, Mapping):
        raise TypeError(
            f"engine_opts={engine_opts!r}; expected a dict of arguments of SGLang's "
            f"ServerArgs, such as {{'max_total_tokens': 20_000}}"
        )
    return options


def checked_options(options: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return a copy of the caller's options.

    Raises:
        ValueError: An option that the engine sets itself, that needs other processes or would
            make rows wrong, or an unknown dtype.
        TypeError: An option that SGLang does not have.
    """
    for name in _ONE_PROCESS:
        if options.get(name, 1) != 1:
            raise ValueError(
                f"engine_opts[{name!r}] = {options[name]}: SGLang runs one process for each "
                f"part of a model, and this engine is inside yours; use {name}=1, and several "
                f"processes with gpu_id=0, 1, ... for several copies"
            )
    for name in _MODEL_NAMES:
        if name in options:
            raise ValueError(
                f"engine_opts[{name!r}]: the model is load_model's first argument, the GPU "
                f"its gpu_id"
            )
    for name, reason in _REFUSED.items():
        if options.get(name) not in {None, False, "null"}:
            raise ValueError(f"engine_opts[{name!r}]={options[name]!r}: {reason}; leave it out")
    if (options.get("page_size") or 1) != 1:
        raise ValueError(
            f"engine_opts['page_size'] = {options['page_size']}: sequences share single tokens "
            f"of the KV cache; leave it out"
        )
    if options.get("lora_paths"):
        raise ValueError(
            "engine_opts['lora_paths']: pass enable_lora=True instead, and load each adapter "
            "with the model's load_lora, which checks it"
        )
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 3)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise TypeError(
                f"engine_opts[{name!r}]: not an option of SGLang's ServerArgs.{hint}"
            )
    named = {"dtype": dtype_name(options["dtype"])} if "dtype" in options else {}
    return {**options, **named}


def _shown(engine_opts: Mapping[str, Any]) -> str:
    """Return options for an error message."""
    return ", ".join(f"{k}={v!r}" for k, v in engine_opts.items()) or "no options"


def load_error(
    version: str, source: str, wanted: Mapping[str, Any], error: Exception
) -> ModelLoadError:
    """Return the error of a failed build of SGLang, with the request and the cause."""
    first_line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return ModelLoadError(
        f"asked SGLang {version} for the model {source!r} with {_shown(wanted)}; it raised "
        f"{first_line} (options apart, the model must be a folder or an accessible hub id with "
        f"config.json, weights and tokenizer of an architecture that this SGLang serves on "
        f"this device)"
    )


def cpu_sizes(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of SGLang's pools on a CPU that `options` does not set.

    Raises:
        ModelLoadError: Too little memory is free.
    """
    sizes: dict[str, Any] = {}
    if options.get("max_total_tokens") is None:
        sizes["max_total_tokens"] = cpu_token_capacity(model, options)
    if options.get("max_running_requests") is None:
        sizes["max_running_requests"] = cpu_running_requests(model, options)
    return sizes


def cpu_token_capacity(model: str, options: Mapping[str, Any]) -> int:
    """Return the tokens of the KV cache on a CPU: a quarter of the free memory, at most 2^17.

    SGLang's default would take most of the memory.

    Raises:
        ModelLoadError: A quarter of the free memory does not hold 2^10 tokens.
    """
    config = _text_config(model, options)
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dtype = getattr(torch, str(options.get("dtype", "float32")), torch.float32)
    each = max(1, 2 * config.num_hidden_layers * kv_heads * width * dtype.itemsize)
    budget = cache_budget_bytes(
        share=_KV_SHARE,
        at_least=_MIN_TOKENS * each,
        at_most=_MAX_TOKENS * each,
        option="engine_opts['max_total_tokens']",
    )
    return int(budget // each)


def cpu_running_requests(model: str, options: Mapping[str, Any]) -> int:
    """Return the maximum number of sequences of a pass on a CPU: from 64 to 1024.

    Each takes a row of slots as long as the context, and a row of logits: 4 bytes for a
    position or an id.
    """
    try:
        config = _text_config(model, options)
    except Exception:  # noqa: BLE001 - SGLang reads formats that transformers does not
        return _MIN_REQUESTS
    context = options.get("context_length") or getattr(config, "max_position_embeddings", None)
    longest = max(context or 2**15, getattr(config, "vocab_size", None) or 2**15)
    return min(_MAX_REQUESTS, max(_MIN_REQUESTS, _REQUESTS_BYTES // (4 * longest)))


def _text_config(model: str, options: Mapping[str, Any]) -> Any:
    import transformers

    trusted = bool(options.get("trust_remote_code", False))
    return transformers.AutoConfig.from_pretrained(
        model, trust_remote_code=trusted, revision=options.get("revision")
    ).get_text_config()
