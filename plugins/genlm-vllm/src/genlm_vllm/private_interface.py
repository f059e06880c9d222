"""Check of the private functions and attributes of vLLM that this plugin uses.

A supported release that is newer than the tested ones is accepted only if they are equal to
those of the newest tested release. `tests/private_names.txt` lists the other names that the
plugin uses.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

from genlm.plugin import ModelLoadError
from genlm_vllm.versions import TESTED, check_version

_SAMPLE = "vllm.v1.worker.gpu.sample"

_NAMES: Mapping[str, str] = {
    "vllm.v1.engine.llm_engine.LLMEngine.step": "self",
    "vllm.v1.engine.llm_engine.LLMEngine.reset_prefix_cache": "self reset_running_requests "
    "reset_connector",
    "vllm.model_executor.model_loader.reload.initialize_layerwise_reload": "model",
    "vllm.model_executor.model_loader.reload.finalize_layerwise_processing": "model "
    "model_config",
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": "self throttle_prefills",
    "vllm.v1.core.sched.scheduler.Scheduler.get_request_counts": "self",
    "vllm.v1.core.sched.scheduler.Scheduler.add_request": "self request",
    "vllm.v1.core.sched.scheduler.Scheduler.finish_requests": "self request_ids "
    "finished_status",
    "vllm.v1.core.block_pool.BlockPool.touch": "self blocks",
    "vllm.v1.core.block_pool.BlockPool.get_new_blocks": "self num_blocks",
    "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks": "self",
    "vllm.v1.core.block_pool.BlockPool.get_cached_block": "self block_hash kv_cache_group_ids",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "ref_cnt",
    "vllm.v1.core.sched.request_queue.RequestQueue.peek_request": "self",
    "vllm.v1.core.sched.request_queue.PriorityRequestQueue.__init__": "self",
    "vllm.v1.core.sched.request_queue.PriorityRequestQueue.add_request": "self request",
    "vllm.v1.core.sched.request_queue.PriorityRequestQueue.remove_requests": "self requests",
    "vllm.config.SchedulerConfig": "long_prefill_token_threshold max_num_batched_tokens "
    "max_num_scheduled_tokens enable_chunked_prefill",
    "vllm.v1.request.Request.__init__": "self request_id prompt_token_ids sampling_params "
    "pooling_params arrival_time lora_request priority block_hasher",
    "vllm.v1.request.Request.append_output_token_ids": "self token_ids",
    "vllm.v1.request.Request.update_block_hashes": "self",
    "vllm.v1.sample.sampler.Sampler.forward": "self logits sampling_metadata",
    f"{_SAMPLE}.sampler.Sampler.__call__": "self logits input_batch",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_prompt_logprobs_dict": "self "
    "hidden_states num_scheduled_tokens",
    f"{_SAMPLE}.prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs": "self "
    "logits_fn hidden_states input_batch "
    "all_token_ids num_computed_tokens prompt_lens",
    "vllm.v1.core.sched.output.SchedulerOutput": "new_block_ids_to_zero "
    "total_num_scheduled_tokens",
    "vllm.v1.worker.gpu.input_batch.InputBatch": "req_ids query_start_loc_np "
    "num_scheduled_tokens num_computed_prefill_tokens_np",
    "vllm.v1.outputs.SamplerOutput": "sampled_token_ids logprobs_tensors",
    f"{_SAMPLE}.output.SamplerOutput": "sampled_token_ids logprobs_tensors "
    "num_nans num_sampled num_rejected",
    "vllm.v1.engine.llm_engine.LLMEngine": "engine_core model_executor renderer vllm_config "
    "collective_rpc from_vllm_config get_tokenizer reset_prefix_cache",
    "vllm.v1.engine.core_client.InprocClient": "engine_core shutdown _finalizer",
    "vllm.v1.engine.core.EngineCore": "scheduler request_block_hasher model_executor",
    "vllm.v1.core.sched.scheduler.Scheduler": "running waiting kv_holding_waiting "
    "scheduler_config "
    "kv_cache_manager max_num_active_reqs num_waiting_for_streaming_input hash_block_size "
    "needs_kv_cache_zeroing",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "coordinator block_pool",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "single_type_managers block_pool",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "req_to_blocks "
    "num_cached_block _pending_cow_copies block_size kv_cache_group_id _record_new_block_ids",
    "vllm.v1.request.Request": "request_id status lora_request num_tokens num_computed_tokens "
    "num_in_flight_tokens all_token_ids prompt_token_ids output_token_ids block_hashes "
    "_block_hasher prefill_stats skip_reading_prefix_cache",
    "vllm.v1.worker.worker_base.WorkerBase": "distributed_init_method model_runner device "
    "vllm_config add_lora remove_lora list_loras",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "sampler requests input_batch "
    "discard_request_mask query_start_loc model cache_config get_model",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "sampler req_states "
    "prompt_logprobs_worker cache_config get_model",
    "vllm.v1.worker.gpu_input_batch.InputBatch": "req_ids req_id_to_index token_ids_cpu "
    "is_token_ids num_tokens_no_spec",
    "vllm.v1.worker.gpu.states.RequestState": "req_id_to_index last_sampled_tokens",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "needs_kv_cache_zeroing",
    "vllm.model_executor.layers.attention.Attention": "kv_cache sliding_window "
    "get_attn_backend",
    "vllm.lora.worker_manager.WorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager.LoRAModelManager": "modules get_adapter",
    "vllm.lora.lora_model.LoRAModel": "loras",
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin": "lora_manager",
    "vllm.lora.layers.LogitsProcessorWithLoRA": "punica_wrapper",
    "vllm.lora.punica_wrapper.punica_base.PunicaWrapperBase": "_sampler_indices indices_len "
    "token_lora_indices",
}
"""Parameters of functions, fields of dataclasses, and methods, properties and attributes of
other classes. Further parameters with defaults are accepted."""


def check_private_interface() -> None:
    """Compare an installed vLLM with the newest tested version, if it is newer.

    Raises:
        ModelLoadError: Functions or attributes differ; the message lists them.
    """
    installed, newest = check_version(), TESTED[-1]
    if Version(installed).release <= Version(newest).release:
        return
    changed = list(changes())
    if changed:
        raise ModelLoadError(
            f"vLLM {installed} differs from {newest}, the newest version that genlm-vllm was "
            f"tested with, in functions or attributes that it uses: {'; '.join(changed)}. "
            f"Install vllm=={newest}"
        )


def changes() -> Iterator[str]:
    """Yield messages on missing functions and attributes, and on other parameters."""
    for path, listed in _NAMES.items():
        target, names = _resolve(path), set(listed.split())
        if target is None:
            yield f"{path} is gone"
        elif isinstance(target, type):
            for name in sorted(names - _attributes_of(target)):
                yield f"{path} has no attribute {name}"
        else:
            parameters = inspect.signature(target).parameters
            required = {
                name
                for name, parameter in parameters.items()
                if parameter.default is parameter.empty
                and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
            }
            if not required <= names <= parameters.keys():
                yield f"{path} has the parameters ({', '.join(parameters)})"


def _attributes_of(cls: type) -> set[str]:
    """Return the methods and properties of a class and the attributes of its objects."""
    if dataclasses.is_dataclass(cls):
        attributes = {field.name for field in dataclasses.fields(cls)}
    else:
        attributes = set(re.findall(r"\bself\.(\w+)", inspect.getsource(cls)))
    members = inspect.getmembers_static(cls)
    return attributes | {name for name, member in members if hasattr(member, "__get__")}


def _resolve(path: str) -> Any:
    """Return the class or function at a dotted path, None if it does not exist."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return None
