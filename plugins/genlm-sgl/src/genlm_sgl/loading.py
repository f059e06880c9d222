"""Options of SGLang's `ServerArgs`: checks and defaults."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from genlm.plugin import (
    ModelLoadError,
    cache_budget_bytes,
    describe_error,
    dtype_name,
)

_ONE = ("dp_size", "attn_dp_size", "pp_size", "ep_size", "attn_cp_size", "nnodes")
_MODEL_NAMES = ("model_path", "model", "base_gpu_id")

_REFUSED = {
    "speculative_algorithm": "its passes compute and draw several tokens of a request",
    "dllm_algorithm": "a diffusion model has no row after each prefix",
    "disaggregation_mode": "requests would wait for another server",
    "gated_launch_port": "loading would wait for a request to this port",
    "is_embedding": "an embedding model computes no logits",
    "skip_tokenizer_init": "the tokenizer's ids define the rows",
    "enable_hierarchical_cache": "the KV cache contains genlm's prefix tree",
    "enable_hisparse": "the KV cache contains genlm's prefix tree",
    "enable_unified_memory": "the KV cache contains genlm's prefix tree",
    "enable_two_batch_overlap": "passes are not divided",
}
"""Refused options and the reasons; values that disable an option are accepted."""

MODEL_OVERRIDES = "json_model_override_args"
"""Option with settings that replace those of the model's config."""

_LORA_RANK = 16

_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_KV_SHARE = 0.25
"""Default share of the free memory for the KV cache on a CPU."""

_MIN_TOKENS, _MAX_TOKENS = 2**10, 2**17

_REQUESTS_BYTES = 2**26
"""Maximum number of bytes of SGLang's table of slots, and of the logits of a full pass."""

_MIN_REQUESTS, _MAX_REQUESTS = 64, 1024


def environment(*, cpu: bool, options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return environment variables that SGLang and NCCL read when a model is built.

    Args:
        cpu: Whether SGLang computes on the CPU.
        options: Arguments of `ServerArgs`.
    """
    variables = {"SGLANG_USE_CPU_ENGINE": "1"} if cpu else {}
    options = options or {}
    ranks = options.get("tp_size", 1)
    if ranks == 1:
        return variables
    # Only SGLang's scheduler uses it. The garbage collector closes its sockets, and would wait
    # without end for processes that have ended.
    variables["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    if cpu:
        # SGLang refuses more ranks than NUMA nodes unless the cores of each rank are given, and
        # ranks that measure different amounts of free memory.
        cores = psutil.Process().cpu_affinity() or [0]
        ends = [len(cores) * rank // ranks for rank in range(ranks + 1)]
        shares = [cores[first:end] or cores for first, end in itertools.pairwise(ends)]
        bind = "|".join(",".join(map(str, share)) for share in shares)
        defaults = {
            "SGLANG_CPU_OMP_THREADS_BIND": bind,
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        }
    else:  # as SGLang's launcher sets them
        has_symmetric_memory = bool(options.get("enable_symm_mem"))
        has_nvls = has_symmetric_memory or bool(options.get("enable_nccl_nvls"))
        defaults = {
            "NCCL_CUMEM_ENABLE": str(int(has_symmetric_memory)),
            "NCCL_NVLS_ENABLE": str(int(has_nvls)),
        }
    return variables | {name: os.environ.get(name, value) for name, value in defaults.items()}


def check_imported_modules() -> None:
    """Check that modules of SGLang that were imported before compute on the CPU.

    When they are imported, they read `environment`.

    Raises:
        ModelLoadError: A module was imported without these variables.
    """
    for name, module in sys.modules.items():
        if name.startswith("sglang.") and vars(module).get("_is_cpu") is False:
            raise ModelLoadError(
                f"this program imported {name} before the model, without the environment "
                f"variable SGLANG_USE_CPU_ENGINE=1, so SGLang does not compute on the CPU in "
                f"this process. Set the variable, or load the model before importing SGLang"
            )


def runs_on_cpu(options: Mapping[str, Any]) -> bool:
    """Whether SGLang computes on the CPU, because of an option or without an accelerator."""
    return options.get("device") == "cpu" or not torch.accelerator.is_available()


def check_device(options: Mapping[str, Any]) -> None:
    """Check that torch has the device of the caller's options.

    Raises:
        ModelLoadError: The device is not available.
    """
    device = options.get("device")
    if device in {None, "cpu"} or torch.accelerator.is_available():
        return
    raise ModelLoadError(
        f"engine_opts['device']={device!r} is not available; torch finds no accelerator. "
        f"Leave it out to compute on the CPU, or install a torch for your device"
    )


def default_options(*, cpu: bool) -> dict[str, Any]:
    """Return the default arguments of `ServerArgs`.

    Features of SGLang's scheduler and server are disabled, because the engine does not use
    them. On a CPU, SGLang has no graphs and only plain torch kernels.
    """
    options = {
        "disable_cuda_graph": cpu,
        "disable_hybrid_swa_memory": True,  # the same slots for all layers
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
            # `max_total_tokens` sets the size of the cache. SGLang would reduce it, or not
            # start, if other processes used more than this share of memory during loading.
            "mem_fraction_static": 0.999,
            "sampling_backend": "pytorch",
        }
    return options


def checked_options(options: Mapping[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    """Check the caller's options and return a copy.

    Args:
        options: Options of the caller.
        supported: Names of SGLang's options.

    Raises:
        ValueError: An option is set by the engine, requires other processes or would make rows
            wrong, or the dtype is unknown.
        TypeError: SGLang does not have an option.
    """
    for name in _ONE:
        if options.get(name, 1) != 1:
            raise ValueError(
                f"engine_opts[{name!r}] = {options[name]}: this engine supports only {name}=1; "
                f"divide a model among GPUs by tp_size, and load copies of it in several "
                f"processes with gpu_id=0, 1, ..."
            )
    for name in _MODEL_NAMES:
        if name in options:
            raise ValueError(
                f"engine_opts[{name!r}]: pass the model as load_model's first argument, and "
                f"the GPU as gpu_id"
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
        if name not in supported:
            matches = difflib.get_close_matches(name, supported, 3)
            hint = f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
            raise TypeError(
                f"engine_opts[{name!r}]: not an option of SGLang's ServerArgs.{hint}"
            )
    dtype = {"dtype": dtype_name(options["dtype"])} if "dtype" in options else {}
    # The ranks, which are on this machine, would find each other at the server's address.
    host = {"host": "127.0.0.1"} if "host" in options else {}
    return {**options, **dtype, **host}


def _format_options(engine_opts: Mapping[str, Any]) -> str:
    """Format options for an error message."""
    return ", ".join(f"{k}={v!r}" for k, v in engine_opts.items()) or "no options"


def load_error(
    version: str, source: str, options: Mapping[str, Any], error: Exception
) -> ModelLoadError:
    """Return the error of a failed build of SGLang, with the caller's options and the cause."""
    first_line = describe_error(error).strip().partition("\n")[0]
    return ModelLoadError(
        f"SGLang {version} cannot load the model {source!r} with {_format_options(options)}; "
        f"it raised {first_line} (besides the options, the model must be a folder or an "
        f"accessible hub id with config.json, weights and tokenizer of an architecture that "
        f"this SGLang serves on this device)"
    )


def read_text_config(source: str, options: Mapping[str, Any]) -> Any | None:
    """Read the config of a text model with transformers; None if that fails.

    SGLang's config is not used, because SGLang changes it. SGLang also reads formats that
    transformers does not read.

    Args:
        source: Folder or hub id.
        options: Arguments of `ServerArgs`; those of `MODEL_OVERRIDES` are applied.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    overrides = json.loads(options.get(MODEL_OVERRIDES) or "{}")
    arguments = {"revision": options.get("revision")}
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(source, **arguments)
        # SGLang registers its own classes with AutoConfig for some names.
        reader = getattr(
            transformers, CONFIG_MAPPING_NAMES.get(raw.get("model_type"), ""), None
        )
        if reader is None:
            reader = transformers.AutoConfig
            arguments["trust_remote_code"] = bool(options.get("trust_remote_code", False))
        config = reader.from_pretrained(source, **arguments)
    except Exception:  # noqa: BLE001 - SGLang reports the error
        return None
    for name, value in overrides.items():
        present = getattr(config, name, None)
        if isinstance(present, transformers.PretrainedConfig) and isinstance(value, dict):
            present.update(value)
        else:
            setattr(config, name, value)
    return config.get_text_config()


def cpu_sizes(config: Any | None, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of SGLang's memory pools on a CPU.

    Args:
        config: The result of `read_text_config`; the sizes are minimal without one.
        options: Arguments of `ServerArgs`; sizes among them are not computed.

    Raises:
        ModelLoadError: Too little memory is free.
    """
    sizes: dict[str, int] = {}
    if options.get("max_total_tokens") is None:
        sizes["max_total_tokens"] = cpu_token_capacity(config, options)
    if options.get("max_running_requests") is None:
        sizes["max_running_requests"] = cpu_running_requests(config, options)
    return sizes


def cpu_token_capacity(config: Any | None, options: Mapping[str, Any]) -> int:
    """Return the tokens of the KV cache on a CPU: a quarter of the free memory, at most 2^17.

    SGLang's default would take most of the memory.

    Raises:
        ModelLoadError: A quarter of the free memory is too small for 2^10 tokens.
    """
    if config is None:
        return _MIN_TOKENS
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dtype = getattr(torch, str(options.get("dtype", "float32")), torch.float32)
    token_bytes = max(1, 2 * config.num_hidden_layers * kv_heads * width * dtype.itemsize)
    budget = cache_budget_bytes(
        share=_KV_SHARE,
        at_least=_MIN_TOKENS * token_bytes,
        at_most=_MAX_TOKENS * token_bytes,
        option="engine_opts['max_total_tokens']",
    )
    return int(budget // token_bytes)


def cpu_running_requests(config: Any | None, options: Mapping[str, Any]) -> int:
    """Return the maximum number of sequences in a pass on a CPU, between 64 and 1024.

    A sequence takes a row of slots with an entry per position, and a row of logits with an
    entry per token id, of 4 bytes each.
    """
    if config is None:
        return _MIN_REQUESTS
    context = options.get("context_length") or getattr(config, "max_position_embeddings", None)
    longest = max(context or 2**15, getattr(config, "vocab_size", None) or 2**15)
    return min(_MAX_REQUESTS, max(_MIN_REQUESTS, _REQUESTS_BYTES // (4 * longest)))
