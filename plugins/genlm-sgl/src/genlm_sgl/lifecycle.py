"""Building SGLang's `Scheduler` in this process and shutting it down.

All version-dependent code is here, selected by the signatures of SGLang's functions.
`scheduler_api` and `resident_api` use the scheduler in the same way for all versions.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from genlm.plugin import ModelLoadError

__all__ = [
    "LoadWeightsHook",
    "build_scheduler",
    "close_sockets",
    "copy_to_prefix_cache",
    "leave_process_groups",
    "release_cache_slots",
    "senders",
    "separate_streams",
    "server_options",
]

Weights = Iterator[tuple[str, Any]]

LoadWeightsHook = Callable[[Any, Weights], Weights]
"""Takes a built model and the weights of its checkpoint; returns the weights to load."""

_ONLY_RANK = ("tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank")


def server_options() -> frozenset[str]:
    """Return the names of the options of this version's `ServerArgs`."""
    from sglang.srt.server_args import ServerArgs

    return frozenset(inspect.signature(ServerArgs).parameters)


def build_scheduler(
    options: Mapping[str, Any], gpu_id: int, on_load_weights: LoadWeightsHook
) -> Any:
    """Build a scheduler that is the only rank.

    Args:
        options: Arguments of `ServerArgs`.
        gpu_id: Index of the GPU.
        on_load_weights: Called when the model is built, before its weights are loaded.

    Raises:
        ModelLoadError: This version's scheduler has an unknown parameter.
        Exception: Any other error of SGLang; its process groups are left.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(**options)
    ports = PortArgs.init_new(arguments)
    ranks = _rank_arguments(Scheduler, gpu_id)
    scheduler: Any = Scheduler.__new__(Scheduler)
    try:
        _publish(arguments, gpu_id)
        with _no_watchdog(), _weights_hooked(on_load_weights):
            scheduler.__init__(arguments, ports, **ranks)
    except BaseException:
        # A partly built scheduler holds sockets. If the garbage collector collected them with
        # their zmq context, the thread that it runs in would wait forever.
        if hasattr(scheduler, "ipc_channels"):
            close_sockets(scheduler)
        leave_process_groups()
        raise
    return scheduler


def _rank_arguments(scheduler: type, gpu_id: int) -> dict[str, Any]:
    """Return the scheduler's arguments about ranks, which it has before 0.5.21."""
    known = {"gpu_id": gpu_id, "dp_rank": None, **dict.fromkeys(_ONLY_RANK, 0)}
    wanted = [*inspect.signature(scheduler).parameters][2:]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ModelLoadError(
            f"SGLang's Scheduler has the parameters {', '.join(unknown)}, which genlm-sgl does "
            f"not know; use a supported version"
        )
    return {name: known[name] for name in wanted}


def _publish(arguments: Any, gpu_id: int) -> None:
    """Publish the arguments, and from 0.5.21 on the ranks, in SGLang's global context.

    A mixture-of-experts model whose loading failed leaves the locations of its experts behind,
    with which the next model fails with an AssertionError.
    """
    from sglang.srt import runtime_context

    resources = getattr(runtime_context, "get_resources", None)
    if resources is not None:
        resources().expert_location_metadata = None
    place = {}
    if "ranks" in inspect.signature(runtime_context.publish).parameters:
        place["ranks"] = runtime_context.SpawnRanks(world_rank=0, gpu_id=gpu_id)
    runtime_context.publish(arguments, role="scheduler", **place)


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Build the scheduler without its watchdog.

    SGLang's watchdog is a thread that never ends. Five minutes after the last batch it sends
    SIGQUIT to the parent of this process, which is the user's shell or test runner.
    """
    from sglang.srt.managers import scheduler

    original = scheduler.create_scheduler_watchdog
    scheduler.create_scheduler_watchdog = lambda *_, **__: None
    try:
        yield
    finally:
        scheduler.create_scheduler_watchdog = original


@contextlib.contextmanager
def _weights_hooked(hook: LoadWeightsHook) -> Iterator[None]:
    """Call `hook` with each model that is built and the weights that it loads."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader._get_all_weights  # noqa: SLF001

    def hooked(self: Any, model_config: Any, model: Any) -> Weights:
        return hook(model, original(self, model_config, model))

    DefaultModelLoader._get_all_weights = hooked  # noqa: SLF001
    try:
        yield
    finally:
        DefaultModelLoader._get_all_weights = original  # noqa: SLF001


def separate_streams(scheduler: Any) -> None:
    """Separate the scheduler's work from the passes on a GPU, as SGLang does before its loop.

    CUDA's streams come from a small pool. If the stream of the scheduler were that of the
    passes, neither would run beside the other under overlap.
    """
    on_cuda = scheduler.device == "cuda"
    scheduler._war_barrier_enabled = on_cuda  # noqa: SLF001
    if not (on_cuda and scheduler.enable_overlap):
        return
    while scheduler.schedule_stream.cuda_stream == scheduler.forward_stream.cuda_stream:
        scheduler.schedule_stream = scheduler.device_module.Stream(priority=0)


def senders(scheduler: Any) -> list[Any]:
    """Return the objects with which a scheduler sends its results."""
    channels = scheduler.ipc_channels
    return [channels.send_to_tokenizer, channels.send_to_detokenizer]


def close_sockets(scheduler: Any) -> None:
    """Close the sockets of a scheduler and their zmq contexts."""
    channels = scheduler.ipc_channels
    found = [channels.recv_from_tokenizer, channels.recv_from_rpc]
    found += [sender.socket for sender in senders(scheduler)]
    for context in {socket.context for socket in found if socket is not None}:
        context.destroy(linger=0)


def leave_process_groups() -> None:
    """Shut torch.distributed down, which SGLang starts even for one process."""
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    gc.collect()


def release_cache_slots(request: Any, prefix_cache: Any) -> None:
    """Move the keys and values of a finished request to the prefix cache and free its slots."""
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(request, prefix_cache, **{_keep_argument(): True})


@functools.cache
def _keep_argument() -> str:
    """Return the argument of `release_kv_cache` that keeps the tokens; from 0.5.22 another."""
    from sglang.srt.mem_cache.common import release_kv_cache

    known = inspect.signature(release_kv_cache).parameters
    return "checkpoint" if "checkpoint" in known else "is_insert"


def copy_to_prefix_cache(request: Any, prefix_cache: Any, length: int) -> None:
    """Have the radix cache share the first tokens of a request that continues.

    Args:
        request: SGLang's request, which has computed these tokens.
        prefix_cache: The radix cache.
        length: The number of tokens.
    """
    # SGLang only ever appends to this array. The last token of the request, which may yet be
    # replaced, must not be in it.
    ids = request.origin_input_ids + request.output_ids
    request.full_untruncated_fill_ids = ids[:length]
    if hasattr(prefix_cache, "checkpoint"):  # from 0.5.22 on
        request.extend_end = length
        prefix_cache.checkpoint(request, up_to=length)
    else:
        request.set_extend_range(length - 1, length)
        prefix_cache.cache_unfinished_req(request)
