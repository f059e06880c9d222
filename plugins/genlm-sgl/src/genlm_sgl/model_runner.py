"""Construction of SGLang's model runner in this process, for one rank."""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Weights = Iterator[tuple[str, Any]]

LoadWeightsHook = Callable[[Any, Weights], Weights]
"""Function of a built model and the weights of its checkpoint; returns the weights to load."""


def server_options() -> frozenset[str]:
    """Return the names of the options of SGLang's `ServerArgs`."""
    from sglang.srt.server_args import ServerArgs

    return frozenset(inspect.signature(ServerArgs).parameters)


class RunnerConfig(NamedTuple):
    """Settings of a model runner.

    Attributes:
        arguments: SGLang's `ServerArgs`.
        model_config: SGLang's `ModelConfig`.
        gpu_id: Index of the rank's GPU.
        port: Port in which the ranks find each other.
    """

    arguments: Any
    model_config: Any
    gpu_id: int
    port: int


def configure(options: Mapping[str, Any], rank: int, gpu_id: int) -> RunnerConfig:
    """Publish SGLang's settings in this process.

    Args:
        options: Arguments of `ServerArgs`, with `nccl_port` if there are several ranks.
        rank: Tensor-parallel rank.
        gpu_id: Index of the GPU of rank 0.
    """
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(**options)
    # SGLang's `PortArgs` would also create files for its other processes, and leave them.
    port = arguments.nccl_port or free_port()
    # If loading a mixture-of-experts model fails, the locations of its experts remain, and the
    # next model fails with an AssertionError.
    runtime_context.get_resources().expert_location_metadata = None
    # Models share these modules, on which hooks of options such as `forward_hooks` remain.
    factory._ROPE_DICT.clear()  # noqa: SLF001
    gpu_id += rank * arguments.gpu_id_step
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=gpu_id)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    for initialize in (
        *(initialize_moe_config, initialize_fp8_gemm_config),
        *(initialize_bf16_gemm_config, initialize_fp4_gemm_config),
    ):
        initialize()
    model_config = ModelConfig.from_server_args(arguments)
    return RunnerConfig(arguments, model_config, gpu_id, port)


def build_runner(config: RunnerConfig, on_load_weights: LoadWeightsHook) -> Any:
    """Build SGLang's model runner of one rank, at the same time as all other ranks.

    Args:
        config: The published settings.
        on_load_weights: Called when the model is built, before its weights are loaded.

    Returns:
        The `ModelRunner`, with its KV cache.
    """
    from sglang.srt import runtime_context
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor import model_runner

    arguments, model_config, gpu_id, port = config
    device = runtime_context.get_device().device
    bootstrap.init_parallel_runtime(server_args=arguments, device=device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    with _hook_weights(on_load_weights):
        runner: Any = model_runner.ModelRunner(
            model_config=model_config,
            mem_fraction_static=runtime_context.get_schedule().mem_fraction_static,
            gpu_id=gpu_id,
            nccl_port=port,
            server_args=arguments,
        )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    if runner.token_to_kv_pool.post_capture_active:
        runner.post_capture_resize_kv_pool()
    return runner


def load_tokenizer() -> Any:
    """Load the tokenizer of the model that was built last."""
    from sglang.srt import runtime_context
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    serving, model = runtime_context.get_serving(), runtime_context.get_model()
    return get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )


@contextlib.contextmanager
def _hook_weights(hook: LoadWeightsHook) -> Iterator[None]:
    """Call `hook` with every built model and the weights that it loads."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader._get_all_weights  # noqa: SLF001

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Weights:
        return hook(model, original(self, model_config, model))

    DefaultModelLoader._get_all_weights = get_all_weights  # noqa: SLF001
    try:
        yield
    finally:
        DefaultModelLoader._get_all_weights = original  # noqa: SLF001


def free_port() -> int:
    """Return a free port, in which SGLang's processes find each other.

    SGLang draws it by the module `random`. Programs that run at the same time and have set the
    same seed would use the same port.
    """
    from sglang.srt.utils.network import get_free_port_below_ephemeral

    state = random.getstate()
    random.seed()
    try:
        return int(get_free_port_below_ephemeral())
    finally:
        random.setstate(state)


def destroy_process_groups() -> None:
    """Destroy SGLang's process groups, of which a process has one set."""
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    gc.collect()
