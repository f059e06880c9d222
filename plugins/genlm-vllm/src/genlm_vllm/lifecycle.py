"""Building a vLLM engine and shutting it down.

vLLM's scheduler runs in this process, its workers in this process or in others.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.plugin import (
    ModelFacts,
    ModelLoadError,
    loading_stage,
    model_source,
    preserve_process_state,
)
from genlm_vllm.fallback_attention import check_fallback_attention
from genlm_vllm.loading import CPU_WORKER, engine_arguments, format_options
from genlm_vllm.model_checks import required_arguments
from genlm_vllm.private_interface import check_private_interface
from genlm_vllm.process_state import keep_transformers_classes, log_variables
from genlm_vllm.processes import (
    SOCKETS,
    VARIABLE,
    FailureLog,
    ends_while_starting,
    shut_down_executor,
    shut_down_unfinished,
)
from genlm_vllm.versions import check_version
from genlm_vllm.worker import call_workers

_WAIT_S = 5e-5
"""Polling interval while a worker computes its reply."""

_MAX_CAUSE_LENGTH = 600
"""Maximum number of characters of vLLM's message: some messages list all models of vLLM."""


def load_vllm(
    model: str | os.PathLike[str],
    engine_opts: Mapping[str, Any],
    *,
    failures: FailureLog | None = None,
    sockets: str | None = None,
) -> tuple[Any, ModelFacts]:
    """Build a `vllm.LLMEngine` whose workers store rows.

    Args:
        model: A folder or a hub id.
        engine_opts: Arguments of `vllm.EngineArgs`.
        failures: Log of the engine's processes; None if it computes in this process.
        sockets: Folder for the sockets of the engine's processes; None for vLLM's default.

    Returns:
        The engine and the facts of the model's config.

    Raises:
        MissingRequirementError: vLLM is not installed, or its version is not supported.
        ModelLoadError: vLLM cannot serve the model with these options.
        ValueError: An option would make rows wrong.
        TypeError: vLLM does not have an option.
    """
    check_version()
    source, multiprocess = model_source(model), failures is not None
    loading_stage("starting vLLM: weights, memory, kernels")
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # its scheduler runs on this thread
    if failures is not None:
        variables[VARIABLE] = failures.path
        if "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ:
            variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads
    if sockets is not None and "VLLM_RPC_BASE_PATH" not in os.environ:
        variables["VLLM_RPC_BASE_PATH"] = variables[SOCKETS] = sockets
    with preserve_process_state(**variables, **log_variables()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm

        check_private_interface()
        _accept_numba()
        arguments = engine_arguments(source, engine_opts, multiprocess=multiprocess)
        try:
            # vLLM caches its environment variables.
            vllm.envs.disable_envs_cache()
            return _build_engine(arguments, engine_opts, multiprocess=multiprocess)
        except Exception as error:
            if multiprocess:
                shut_down_unfinished(error)
            _clean_up(multiprocess=multiprocess)
            if isinstance(error, ModelLoadError):
                raise
            cause = " ".join(str(error).split()) or "no message"
            text = f"{type(error).__name__}: {cause[:_MAX_CAUSE_LENGTH]}"
            if failures is not None:
                reason = failures.first() or ends_while_starting(error)
                text += f" ({reason[:_MAX_CAUSE_LENGTH]})" if reason else ""
            raise ModelLoadError(
                f"vLLM cannot load the model {source!r} with {format_options(engine_opts)}; it "
                f"raised {text}{_memory_hint(engine_opts, text)}"
            ) from error


def _accept_numba() -> None:
    """Let vLLM start on a CPU in a process that has imported numba.

    vLLM replaces Triton's kernels there, for which it reads the attributes of every object in
    every imported module. One object of llvmlite, which numba imports, has a function in the
    place of the mapping `__dict__`.
    """
    with contextlib.suppress(ImportError):  # vLLM moves it
        from vllm.triton_utils import dispatcher

        dispatcher.vars = _attributes


def _attributes(value: object) -> Mapping[str, Any]:
    """Return the attributes of an object as `vars` does; none if they are not a mapping."""
    attributes: object = vars(value)
    return attributes if isinstance(attributes, Mapping) else {}


def _build_engine(
    arguments: Mapping[str, Any], engine_opts: Mapping[str, Any], *, multiprocess: bool
) -> tuple[Any, ModelFacts]:
    import vllm
    from vllm.usage.usage_lib import UsageContext

    def create_config(**required: Any) -> Any:
        engine_args = vllm.EngineArgs(**{**arguments, **required})
        # `LLM_CLASS`: the `max_num_seqs` and `max_num_batched_tokens` of vLLM's class `LLM`.
        return engine_args.create_engine_config(UsageContext.LLM_CLASS)

    config = create_config()
    facts = ModelFacts.of(config.model_config.hf_config)  # with the user's overrides
    required = required_arguments(config, facts, engine_opts)
    if required:
        config = create_config(**required)
    keep_classes: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not multiprocess and config.model_config.using_transformers_backend():
        check_fallback_attention()
        keep_classes = keep_transformers_classes(lambda: model_of(engine))
    with keep_classes:
        engine = vllm.LLMEngine.from_vllm_config(
            config, disable_log_stats=arguments["disable_log_stats"]
        )
    if arguments.get("worker_cls") == CPU_WORKER:
        _list_new_blocks(engine.engine_core.engine_core.scheduler)
    if multiprocess:
        _sleep_while_waiting(engine.model_executor)
        # vLLM's shutdown also destroys the process groups of an engine in this process.
        client, init_method = engine.engine_core, call_workers(engine, "genlm_init_method")[0]
        client._finalizer.detach()  # noqa: SLF001
        client._finalizer = weakref.finalize(  # noqa: SLF001
            client, _shut_down_workers, client.engine_core.model_executor, init_method
        )
    return engine, facts


def _shut_down_workers(executor: Any, init_method: str) -> None:
    """End the workers, and remove their files on this machine.

    vLLM removes the files when a worker finalises its modules, which it skips
    (`skip_finalization`): the file by which the workers connected, and on a CPU the memory
    through which they exchange tensors.
    """
    shut_down_executor(executor)
    _, is_file, path = init_method.rpartition("file://")
    if is_file:
        Path(path).unlink(missing_ok=True)
    name = glob.escape(path.rpartition("/" if is_file else ":")[2])
    for memory in Path("/dev/shm").glob(f"{name}-*-cpushm_*"):  # noqa: S108
        memory.unlink(missing_ok=True)


def _list_new_blocks(scheduler: Any) -> None:
    """Make a scheduler list the KV blocks of a step, which `CPUWorker` zeroes."""
    scheduler.needs_kv_cache_zeroing = True
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        manager._record_new_block_ids = True  # noqa: SLF001


def _sleep_while_waiting(executor: Any) -> None:
    """Make this process sleep while workers compute.

    vLLM calls `sched_yield` in a loop, which prevents Python's other threads from running.
    """
    for queue in getattr(executor, "response_mqs", ()):
        condition = getattr(queue, "_spin_condition", None)
        if condition is not None:
            condition.wait = lambda timeout_ms=None: time.sleep(_WAIT_S)  # noqa: ARG005


def model_of(engine: Any) -> Any:
    """Return vLLM's model of an engine that computes in this process."""
    return engine.model_executor.driver_worker.worker.model_runner.model


def _memory_hint(engine_opts: Mapping[str, Any], cause: str) -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or "memory" not in cause.lower():
        return ""
    if "num_gpu_blocks_override" in engine_opts:
        return (
            " (num_gpu_blocks_override is the number of KV blocks, one of which vLLM reserves)"
        )
    if "gpu_memory_utilization" in engine_opts:
        return (
            " (on a CPU, gpu_memory_utilization is the share of a memory node that the whole "
            "process may use; leave it out, or pass kv_cache_memory_bytes instead)"
        )
    return " (on a CPU, kv_cache_memory_bytes is the size of the KV cache)"


def shut_down(engine: Any, *, multiprocess: bool) -> None:
    """Shut a vLLM engine down and free its memory."""
    if multiprocess:
        engine.engine_core._finalizer()  # noqa: SLF001 - see `_build_engine`
    else:
        engine.engine_core.shutdown()
    engine.renderer.shutdown()
    _clean_up(multiprocess=multiprocess)


def _clean_up(*, multiprocess: bool) -> None:
    """Free the resources of an engine that was shut down or could not be built."""
    from vllm import envs
    from vllm.distributed import cleanup_dist_env_and_memory

    if multiprocess:  # another engine may compute in this process
        gc.unfreeze()  # vLLM freezes all objects after its start
        gc.collect()
    else:
        cleanup_dist_env_and_memory()  # also unfreezes and collects
    envs.disable_envs_cache()
