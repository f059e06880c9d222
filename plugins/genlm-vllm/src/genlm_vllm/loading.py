"""The options of vLLM's engine: checks and defaults.

Options have vLLM's names. An option that would make rows wrong raises `ValueError`.
`docs/vllm-engine.md` lists the defaults that differ from vLLM's.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from typing import Any

from genlm.plugin import ModelLoadError, cache_budget_bytes, dtype_name, options_mapping

CPU_BLOCK_SIZE = 32
"""Tokens in a KV block on the CPU, the smallest size that vLLM supports there. With vLLM's
default of 128, prefixes of fewer tokens would not be cached."""

CPU_WORKER = "genlm_vllm.cpu_worker.CPUWorker"

CPU_KV_SHARE = 0.25
"""Default share of the free memory for the KV blocks of all workers on the CPU. vLLM's default
is 92 % of a memory node, and vLLM does not start if less is free."""

CPU_MIN_KV_BYTES, CPU_MAX_KV_BYTES = 2**26, 2**32

DEFAULT_MAX_LORAS = 4
"""Maximum number of adapters in one batch."""

DEFAULT_MAX_CPU_LORAS = 32
"""Maximum number of loaded adapters where not all of them need to be on the device."""

_REFUSED = {
    "async_scheduling": "vLLM would plan a step before its tokens are known",
    "scheduler_cls": "requests stay in vLLM's own scheduler between steps",
    "logits_processors": "they would change the log-probabilities",
    "worker_extension_cls": "genlm-vllm sets it to the class that returns rows",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "rows of drafted tokens would be taken for rows of the sequence",
    ),
    "enable_batch_sharded_sampling": "each rank would have the rows of only some requests",
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokens_only"), "the tokenizer's ids define the rows"
    ),
    "kv_transfer_config": "a connector would supply keys and values by their tokens, also "
    "those of earlier weights, of other adapters and of other programs",
    "enable_prompt_embeds": "vLLM would add a token to the tokenizer, also for later engines "
    "of this process, so that rows would have an entry that the model does not have",
    **dict.fromkeys(
        ("runner", "convert"), "a pooling model does not compute next-token logits"
    ),
    "data_parallel_size": "rows of other replicas could not be fetched; load several models",
    "prefill_context_parallel_size": "several ranks would store rows, which is untested",
    "nnodes": "vLLM would wait for programs on other machines, which only distribute its own "
    "requests; distributed_executor_backend='ray' runs workers there",
}
"""Refused options and the reasons; values that disable an option are accepted."""

_ACCEPTED = {
    **dict.fromkeys(("data_parallel_size", "prefill_context_parallel_size", "nnodes"), (1,)),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
}
"""Values of refused options that are accepted, besides false ones."""

_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


def checked_options(engine_opts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the caller's options.

    Raises:
        TypeError: `engine_opts` is not a mapping, or a number of workers is not an integer.
        ValueError: `dtype` is unknown.
    """
    options = options_mapping("engine_opts", engine_opts)
    for name in _PARALLEL_SIZES:
        if not isinstance(options.get(name, 1), int):
            raise TypeError(f"engine_opts[{name!r}]={options[name]!r}; expected an integer")
    dtype = {"dtype": dtype_name(options["dtype"])} if "dtype" in options else {}
    return {**options, **dtype}


def needs_processes(engine_opts: Mapping[str, Any]) -> bool:
    """Whether options request several workers or an executor with other processes."""
    backend = engine_opts.get("distributed_executor_backend")
    return backend not in {None, "uni"} or any(
        engine_opts.get(name, 1) > 1 for name in _PARALLEL_SIZES
    )


def engine_arguments(
    source: str, engine_opts: Mapping[str, Any], *, multiprocess: bool = False
) -> dict[str, Any]:
    """Check options and return the arguments of `vllm.EngineArgs` with defaults.

    Args:
        source: A folder or a hub id.
        engine_opts: The user's options.
        multiprocess: Whether workers run in other processes.

    Raises:
        ValueError: An option would make rows wrong.
        TypeError: vLLM does not have an option.
        ModelLoadError: vLLM accepts the options but fails with them on this platform.
    """
    import vllm
    from vllm.platforms import current_platform

    option_names = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    for name, value in engine_opts.items():
        if name == "model":
            raise TypeError(
                f"engine_opts['model']={value!r}: the model is load_model's first argument"
            )
        if name not in option_names:
            matches = difflib.get_close_matches(name, option_names, n=1)
            hint = f" Did you mean {matches[0]!r}?" if matches else ""
            raise TypeError(f"vllm.EngineArgs has no option {name!r}.{hint}")
        if name in _REFUSED and value and value not in _ACCEPTED.get(name, ()):
            raise ValueError(f"engine_opts[{name!r}]={value!r}: {_REFUSED[name]}; leave it out")
    on_cpu = current_platform.is_cpu()
    problem = _unsupported(engine_opts, current_platform)
    if problem is not None:
        raise ModelLoadError(f"engine_opts {format_options(engine_opts)}: {problem}")
    arguments = {
        "async_scheduling": False,  # a row would come one step later
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "distributed_executor_backend": "mp" if multiprocess else None,
        **(_cpu_defaults(engine_opts) if on_cpu else {}),
        **engine_opts,
        "model": source,
        "worker_extension_cls": "genlm_vllm.worker.RowWorker",
    }
    if arguments.get("enable_lora"):
        arguments |= _lora_slots(engine_opts, on_cpu=on_cpu)
    return arguments


def _unsupported(engine_opts: Mapping[str, Any], platform: Any) -> str | None:
    """Return why options fail on a platform where vLLM would fail late or without a reason."""
    executor = engine_opts.get("distributed_executor_backend")
    if executor == "external_launcher":
        return (
            "vLLM would compute only together with other processes of a launcher. Leave "
            "distributed_executor_backend out, which starts the workers"
        )
    if executor == "ray" and not platform.ray_device_key:
        return (
            f"vLLM does not run Ray's workers on {platform.device_name!r}. Leave "
            f"distributed_executor_backend out to run the workers as processes of this machine"
        )
    dtype = str(engine_opts.get("dtype", "")).removeprefix("torch.")
    if platform.is_cuda() and engine_opts.get("enable_lora") and dtype in {"float", "float32"}:
        return (
            f"vLLM's kernels for adapters compute in float16 and bfloat16 on "
            f"{platform.device_name!r}. Pass dtype='bfloat16'"
        )
    return _unsupported_on_cpu(engine_opts, dtype) if platform.is_cpu() else None


def _unsupported_on_cpu(engine_opts: Mapping[str, Any], dtype: str) -> str | None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if engine_opts.get("kv_offloading_size"):
        return "vLLM offloads KV blocks from GPUs only. Leave kv_offloading_size out"
    cache_dtype = engine_opts.get("kv_cache_dtype", "auto")
    cache_dtypes = CPUAttentionBackend.supported_kv_cache_dtypes
    # vLLM checks the dtypes that a backend supports on GPUs only.
    if cache_dtype not in cache_dtypes and cache_dtype != (dtype or "float32"):
        return (
            f"kv_cache_dtype={cache_dtype!r}, which vLLM's attention on a CPU does not "
            f"support: rows would be wrong. Leave it out, or pass one of "
            f"{', '.join(cache_dtypes)}"
        )
    if engine_opts.get("pipeline_parallel_size", 1) > 1:
        for name in ("enable_lora", "enforce_eager"):
            if engine_opts.get(name):
                return (
                    f"vLLM's pipelines fail on the CPU with {name}, at the first request. "
                    f"Leave it out, or use tensor_parallel_size instead"
                )
    return None


def _lora_slots(engine_opts: Mapping[str, Any], *, on_cpu: bool) -> dict[str, int]:
    loras = engine_opts.get("max_loras", DEFAULT_MAX_LORAS)
    if on_cpu:
        # vLLM's CPU build computes requests without an adapter with the last slot.
        return {"max_loras": loras + 1, "max_cpu_loras": loras + 1}
    loaded = engine_opts.get("max_cpu_loras") or max(loras, DEFAULT_MAX_CPU_LORAS)
    return {"max_loras": loras, "max_cpu_loras": loaded}


def adapter_capacity(engine: Any) -> int:
    """Return the number of adapters that a vLLM engine can load without evicting any."""
    from vllm.platforms import current_platform

    config = engine.vllm_config.lora_config
    if config is None:
        return 0
    return int(config.max_loras - 1 if current_platform.is_cpu() else config.max_cpu_loras)


def _cpu_defaults(engine_opts: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": CPU_BLOCK_SIZE,
        "worker_cls": CPU_WORKER,
    }
    if engine_opts.get("pipeline_parallel_size", 1) > 1:
        # Pipelines need vLLM's warm-up, which vLLM omits for models that are not traced.
        defaults["compilation_config"] = {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}
    else:
        defaults["enforce_eager"] = True  # compiling takes minutes and a C++ compiler
    has_size = bool({"kv_cache_memory_bytes", "gpu_memory_utilization"} & engine_opts.keys())
    if not has_size and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        defaults["kv_cache_memory_bytes"] = _cpu_kv_bytes(engine_opts)
    return defaults


def _cpu_kv_bytes(engine_opts: Mapping[str, Any]) -> int:
    """Return the default size of each worker's KV cache."""
    if "num_gpu_blocks_override" in engine_opts:
        return 1  # ignored; without a size vLLM requires 92 % of the memory to be free
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

    workers = math.prod(engine_opts.get(name, 1) for name in _PARALLEL_SIZES)
    return cache_budget_bytes(
        share=CPU_KV_SHARE / workers,
        at_least=CPU_MIN_KV_BYTES,
        at_most=CPU_MAX_KV_BYTES,
        option="engine_opts['kv_cache_memory_bytes']",
        # vLLM binds itself to the memory node of the first allowed core.
        memory_nodes=[get_allowed_cpu_list()[0].numa_node],
    )


def format_options(engine_opts: Mapping[str, Any]) -> str:
    """Format options for an error message."""
    return ", ".join(f"{k}={v!r}" for k, v in engine_opts.items()) or "no options"
