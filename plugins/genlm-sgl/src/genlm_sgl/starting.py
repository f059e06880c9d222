"""Starts SGLang's `Scheduler` in this process, and ends it; all that depends on its version.

What differs between the supported versions is chosen by the signatures that are found. What
its scheduler does in between is the same in all of them, and in `scheduler_api`.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from genlm import ModelLoadError

__all__ = [
    "WatchWeights",
    "close_sockets",
    "leave_groups",
    "senders",
    "server_options",
    "started",
]

Weights = Iterator[tuple[str, Any]]

WatchWeights = Callable[[Any, Weights], Weights]
"""Given a model that is built and the weights of its checkpoint, returns these weights."""

_ONLY_RANK = ("tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank")


def server_options() -> frozenset[str]:
    """Names of the options that this version's `ServerArgs` takes."""
    from sglang.srt.server_args import ServerArgs

    return frozenset(inspect.signature(ServerArgs).parameters)


def started(options: Mapping[str, Any], gpu_id: int, watch_weights: WatchWeights) -> Any:
    """Build a scheduler that is the only rank there is.

    Args:
        options: Arguments of `ServerArgs`.
        gpu_id: Which GPU.
        watch_weights: Is called when the model is built and before it has its weights.

    Raises:
        ModelLoadError: This version's scheduler takes something unknown.
        Exception: Whatever else SGLang raises; its process groups are left.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(**options)
    ports = PortArgs.init_new(arguments)
    place = _place(Scheduler, gpu_id)
    scheduler: Any = Scheduler.__new__(Scheduler)
    try:
        _publish(arguments, gpu_id)
        with _no_watchdog(), _weights_watched(watch_weights):
            scheduler.__init__(arguments, ports, **place)
    except BaseException:
        # One that was never whole holds sockets; collected with their zmq context, they
        # would keep it, and whoever the garbage collector ran in, waiting for ever.
        if hasattr(scheduler, "ipc_channels"):
            close_sockets(scheduler)
        leave_groups()
        raise
    return scheduler


def _place(scheduler: type, gpu_id: int) -> dict[str, Any]:
    """What the scheduler wants to know about its place among others, before 0.5.21."""
    known = {"gpu_id": gpu_id, "dp_rank": None, **dict.fromkeys(_ONLY_RANK, 0)}
    wanted = [*inspect.signature(scheduler).parameters][2:]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ModelLoadError(
            f"SGLang's Scheduler wants {', '.join(unknown)}, which genlm-sgl does not know; "
            f"use a version in its range"
        )
    return {name: known[name] for name in wanted}


def _publish(arguments: Any, gpu_id: int) -> None:
    """Make the arguments known to the process, and from 0.5.21 on its place.

    A model of experts whose loading failed leaves the places of its experts behind, over
    which SGLang would refuse the next model with a bare AssertionError.
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
    """Have the scheduler make no watchdog while it is built.

    SGLang's watches from a thread that never ends, and when nothing has run for five
    minutes after a batch, it sends SIGQUIT to the parent of this process, which is the
    user's shell or test runner.
    """
    from sglang.srt.managers import scheduler

    original = scheduler.create_scheduler_watchdog
    scheduler.create_scheduler_watchdog = lambda *_, **__: None
    try:
        yield
    finally:
        scheduler.create_scheduler_watchdog = original


@contextlib.contextmanager
def _weights_watched(watch: WatchWeights) -> Iterator[None]:
    """Have `watch` see each model that is built and the weights that it loads."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader._get_all_weights  # noqa: SLF001

    def watched(self: Any, model_config: Any, model: Any) -> Weights:
        return watch(model, original(self, model_config, model))

    DefaultModelLoader._get_all_weights = watched  # noqa: SLF001
    try:
        yield
    finally:
        DefaultModelLoader._get_all_weights = original  # noqa: SLF001


def senders(scheduler: Any) -> list[Any]:
    """What a scheduler sends its answers with."""
    channels = scheduler.ipc_channels
    return [channels.send_to_tokenizer, channels.send_to_detokenizer]


def close_sockets(scheduler: Any) -> None:
    """Close the sockets of a scheduler, and what they belong to."""
    channels = scheduler.ipc_channels
    found = [channels.recv_from_tokenizer, channels.recv_from_rpc]
    found += [sender.socket for sender in senders(scheduler)]
    for context in {socket.context for socket in found if socket is not None}:
        context.destroy(linger=0)


def leave_groups() -> None:
    """Undo torch.distributed, which SGLang starts even for one process."""
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    gc.collect()
