"""Conversion of engine objects that are passed to constructors.

Rows need hooks that are installed while an engine is built. Therefore an engine that the caller
built is shut down, and its model is loaded again with the same settings.
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

__all__ = ["Recipe", "recipe_of_sglang", "recipe_of_vllm"]


_SGLANG_OPTIONS = (
    *("dtype", "device", "quantization", "revision", "trust_remote_code", "load_format"),
    *("context_length", "kv_cache_dtype", "mem_fraction_static", "max_total_tokens"),
    *("max_running_requests", "chunked_prefill_size", "attention_backend"),
    *("sampling_backend", "disable_cuda_graph", "tokenizer_path"),
)
"""Settings of an SGLang scheduler that its successor gets too."""

_VLLM_MODEL_OPTIONS = (
    *("revision", "code_revision", "tokenizer", "tokenizer_revision", "tokenizer_mode"),
    *("trust_remote_code", "quantization", "hf_overrides"),
)
"""Attributes of vLLM's `ModelConfig` that are options of the same name."""


@dataclass(frozen=True)
class Recipe:
    """Name of a model, options of the engine, and index of the GPU."""

    model: str
    engine_opts: dict[str, Any]
    gpu_id: int = 0


def recipe_of_vllm(llm: Any) -> Recipe:
    """End a `vllm.LLM` or `vllm.LLMEngine` and return how to load its model.

    Raises:
        TypeError: Another object.
    """
    engine = getattr(llm, "llm_engine", llm)
    config = getattr(engine, "vllm_config", None)
    if config is None:
        raise TypeError(
            f"AsyncVirtualLM got a {type(llm).__name__}; expected a vllm.LLM, or use "
            f"AsyncVirtualLM.from_name(name)"
        )
    _warn("AsyncVirtualLM(llm)", "AsyncVirtualLM.from_name(name, engine_opts=...)")
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    options: dict[str, Any] = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
    }
    options |= {name: getattr(model, name) for name in _VLLM_MODEL_OPTIONS}
    options |= {
        "kv_cache_dtype": cache.cache_dtype,
        "load_format": config.load_config.load_format,
    }
    options = {name: value for name, value in options.items() if value not in (None, {})}
    if cache.kv_cache_memory_bytes is not None:
        options["kv_cache_memory_bytes"] = cache.kv_cache_memory_bytes
    elif config.device_config.device_type != "cpu":
        # On a CPU vLLM takes it as a share of all memory, and refuses to start with less.
        options["gpu_memory_utilization"] = cache.gpu_memory_utilization
    if config.lora_config is not None:
        options |= {
            "enable_lora": True,
            "max_loras": config.lora_config.max_loras,
            "max_lora_rank": config.lora_config.max_lora_rank,
        }
    engine.engine_core.shutdown()
    gc.collect()
    return Recipe(model.model, options)


def recipe_of_sglang(scheduler: Any) -> Recipe:
    """End an SGLang `Scheduler` and return how to load its model.

    Raises:
        TypeError: Another object.
    """
    arguments = getattr(scheduler, "server_args", None)
    if arguments is None or not hasattr(scheduler, "tp_worker"):
        raise TypeError(
            f"AsyncSGLTransformer got a {type(scheduler).__name__}; expected a Scheduler of "
            f"SGLang in this process, or use AsyncSGLTransformer.from_name(name)"
        )
    _warn(
        "AsyncSGLTransformer(scheduler)", "AsyncSGLTransformer.from_name(name, engine_opts=...)"
    )
    options = {name: getattr(arguments, name, None) for name in _SGLANG_OPTIONS}
    recipe = Recipe(
        arguments.model_path,
        {name: value for name, value in options.items() if value is not None},
        arguments.base_gpu_id,
    )
    _end_sglang(scheduler)
    return recipe


def _end_sglang(scheduler: Any) -> None:
    """Free a scheduler's memory and process groups; SGLang has no method for that."""
    from sglang.srt.distributed import parallel_state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # its sockets are closed with it
        vars(scheduler).clear()
        gc.collect()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=4)
