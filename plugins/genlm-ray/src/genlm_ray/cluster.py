"""Ray: the connection of this process, resources, and the actors of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.node import Node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genlm.plugin import ModelLoadError
from genlm_ray.replica import Replica, ReplicaSpec

__all__ = [
    "NAMESPACE",
    "Resources",
    "connect",
    "join",
    "leave",
    "remove",
    "reservations",
    "reserve_resources",
    "start_replicas",
    "until_head_is_lost",
]

NAMESPACE = "genlm"
"""The namespace of Ray that served replicas are named in."""

_AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}

Resources = Mapping[str, float] | Sequence[Mapping[str, float]]

HEAD_TIMEOUT_S = 20.0
"""Silence of the cluster's head after which it counts as lost. Ray itself waits 60 seconds, and
then ends the process of every driver."""

LEAVE_TIMEOUT_S = 10.0
"""Timeout of a process that leaves its cluster."""

_PROBE_S = 2.0

_ATTEMPTS = 3
"""Maximum number of attempts to start a cluster on this machine. Ray's processes have
15 seconds to connect, which is too short on an overloaded machine."""

_MAX_CONCURRENCY = 4096
"""Maximum number of concurrent calls of a replica: up to 8 long polls per driver, and pings,
which must never wait behind them."""

_lock = threading.Lock()

logger = logging.getLogger("genlm.ray")


def connect(
    address: str | None, options: Mapping[str, Any] | None = None, *, default: str | None
) -> str:
    """Join a cluster, or start one on this machine that ends with this process.

    Args:
        address: As for `ray.init`; None takes the cluster that this process has joined, else
            `RAY_ADDRESS`.
        options: Further arguments of `ray.init`. They count for the first connection of a
            process only.
        default: Address where there is none: `"local"` starts a cluster, `"auto"` is the one
            that runs on this machine, None is an error.

    Returns:
        The address of the cluster.

    Raises:
        ModelLoadError: There is no cluster, none was named, another version of Ray or Python
            runs it, or this process has joined another one.
    """
    with _lock:
        if not ray.is_initialized():
            _connect(address, options or {}, default)
        joined: str = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local") and not _is_same(address, joined):
            raise ModelLoadError(
                f"asked for the Ray cluster at {address!r}; this process has joined the "
                f"one at {joined!r}, and can join one at a time: ray.shutdown() leaves it"
            )
        return joined


def _connect(address: str | None, options: Mapping[str, Any], default: str | None) -> None:
    named = address or os.environ.get("RAY_ADDRESS") or default
    if named is None:
        raise ModelLoadError(
            "no Ray cluster was named: pass its address as host:port, set RAY_ADDRESS, or for "
            "`genlm serve` pass --local, the cluster that runs on this machine. `ray start "
            "--head` starts one"
        )
    starts = named == "local"
    # Without an address Ray joins the cluster last started on this machine.
    arguments: dict[str, Any] = {"address": named, "log_to_driver": False}
    if starts:
        arguments["include_dashboard"] = False
    arguments |= options
    for left in range(_ATTEMPTS - 1 if starts else 0, -1, -1):
        error = _init(arguments)
        if error is None:
            return
        if isinstance(error, (TypeError, ValueError)):  # an argument that Ray refuses
            break
        if left:
            logger.warning("starting a Ray cluster failed, trying again: %s", error)
    what = "started on this machine" if starts else f"the one at {named!r}"
    raise ModelLoadError(
        f"asked for a Ray cluster, {what}: {type(error).__name__}: {error}. `ray start "
        f"--head` starts one on this machine; address='host:port' joins another"
    ) from error


def join(address: str | None = None, *, is_local: bool = False) -> str:
    """Join the named cluster, never another one that happens to run.

    Args:
        address: As for `connect`.
        is_local: Whether to join this machine's cluster and ignore `RAY_ADDRESS`.

    Returns:
        The address of the cluster.

    Raises:
        ModelLoadError: No cluster was named, or as `connect`.
    """
    if not is_local:
        return connect(address, default=None)
    was_joined, named = ray.is_initialized(), os.environ.pop("RAY_ADDRESS", None)
    try:
        joined = connect("auto", default=None)
    finally:
        if named is not None:
            os.environ["RAY_ADDRESS"] = named
    if joined.rpartition(":")[0] not in _own_hosts():
        if not was_joined:
            leave()
        raise ModelLoadError(
            f"asked for the Ray cluster of this machine, which is a node of the one at "
            f"{joined!r}; pass this address to use it"
        )
    return joined


def leave(timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
    """Leave the cluster of this process.

    Returns:
        False if the cluster does not answer; this process then could not end normally.
    """
    leaving = threading.Thread(target=ray.shutdown, name="genlm-ray-leave", daemon=True)
    leaving.start()
    leaving.join(timeout_s)
    return not leaving.is_alive()


def _own_hosts() -> set[str]:
    return {"127.0.0.1", ray.util.get_node_ip_address()}


def _is_same(address: str, joined: str) -> bool:
    """Whether an address is that of the cluster of this process."""
    host, _, port = address.rpartition(":")
    joined_host, _, joined_port = joined.rpartition(":")
    if address == joined or port != joined_port:
        return address == joined
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        return False
    return resolved == joined_host or {resolved, joined_host} <= _own_hosts()


def _init(arguments: dict[str, Any]) -> BaseException | None:
    """Call `ray.init` on a thread that lives as long as the process; return its exception.

    Linux ends the processes of a local cluster when the thread that started them ends.
    """
    done = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            ray.init(**arguments)
        except BaseException as error:  # noqa: BLE001 - raised by `connect`
            _end_processes(error)
            raised.append(error)
            return
        finally:
            done.set()
        threading.Event().wait()

    threading.Thread(target=run, name="genlm-ray-cluster", daemon=True).start()
    done.wait()
    return raised[0] if raised else None


def _end_processes(error: BaseException) -> None:
    """End the unreferenced processes that a failed `ray.init` has started."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, wait=True)


async def until_head_is_lost() -> None:
    """Return when the cluster's head has not answered for too long, or Ray was shut down.

    This process may be paused between requests: only the time of a request counts.
    """
    loop = asyncio.get_running_loop()
    while ray.is_initialized():
        answered = asyncio.Event()

        def ask(answered: asyncio.Event = answered) -> None:
            with contextlib.suppress(Exception):  # only silence counts as a failure
                ray.nodes()
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(answered.set)

        threading.Thread(target=ask, name="genlm-ray-head", daemon=True).start()
        try:  # a thread, because the call may block
            await asyncio.wait_for(answered.wait(), HEAD_TIMEOUT_S)
        except TimeoutError:
            return
        await asyncio.sleep(_PROBE_S)


def reserve_resources(
    bundles: list[dict[str, float]], count: int, *, name: str, timeout_s: float
) -> list[PlacementGroup]:
    """Reserve the resources of `count` replicas, all or none.

    Args:
        bundles: Bundles of one replica.
        count: Number of replicas.
        name: Name of a served model, whose reservations outlive this process; else `""`.
        timeout_s: Maximum wait for resources that are in use.

    Raises:
        ModelLoadError: The cluster does not have enough resources, or they are in use.
    """
    needed = _summed(bundles * count)
    total = ray.cluster_resources()
    lacking = {key: n for key, n in needed.items() if total.get(key, 0.0) < n}
    if lacking:
        raise ModelLoadError(
            f"asked for {count} replicas of {_shown(_summed(bundles))} each, in all "
            f"{_shown(needed)}; the cluster has {_shown(total, lacking)}. Ask for fewer "
            f"replicas, for less in resources=, or add nodes"
        )
    lifetime = "detached" if name else None
    groups: list[PlacementGroup] = []
    try:
        for i in range(count):
            label = f"{NAMESPACE}/{name}/{i}" if name else ""
            groups.append(placement_group(bundles, "PACK", name=label, lifetime=lifetime))
        if not all(group.wait(timeout_s) for group in groups):
            free = ray.available_resources()
            raise ModelLoadError(
                f"asked for {count} replicas of {_shown(_summed(bundles))} each; after "
                f"{timeout_s:g} s other programs still use what they need: of "
                f"{_shown(total, needed)}, {_shown(free, needed)} is free"
            )
    except BaseException:  # a user's Ctrl-C as well
        remove(groups)
        raise
    return groups


def remove(groups: Sequence[PlacementGroup]) -> None:
    """Release reservations."""
    for group in groups:
        remove_placement_group(group)


def reservations(name: str) -> list[PlacementGroup]:
    """The reservations of a served model."""
    return [
        PlacementGroup(ray.PlacementGroupID.from_hex(identifier))
        for identifier, each in ray.util.placement_group_table().items()
        if each["name"].startswith(f"{NAMESPACE}/{name}/") and each["state"] != "REMOVED"
    ]


def start_replicas(
    spec: ReplicaSpec,
    resources: Resources | None,
    *,
    max_restarts: int,
    place_timeout_s: float,
) -> tuple[list[Any], list[PlacementGroup]]:
    """Start an actor in a reservation for each replica; detached ones of a served model.

    Args:
        spec: Load options.
        resources: Resources of a replica, by default one CPU.
        max_restarts: Maximum number of restarts of each replica, -1 for no limit.
        place_timeout_s: Maximum wait for resources that are in use.

    Returns:
        The actors and their reservations.

    Raises:
        ModelLoadError: As `reserve_resources`.
    """
    bundles = _bundles(resources)
    groups = reserve_resources(
        bundles, spec.replicas, name=spec.name, timeout_s=place_timeout_s
    )
    own = dict(bundles[0])
    options: dict[str, Any] = {
        "num_cpus": own.pop("CPU", 0.0),
        "num_gpus": own.pop("GPU", 0.0),
        "memory": own.pop("memory", None),
        "resources": own,
        "max_restarts": max_restarts,
        "max_concurrency": _MAX_CONCURRENCY,
    }
    if spec.name:
        options |= {"namespace": NAMESPACE, "lifetime": "detached"}
    actors = []
    for index, group in enumerate(groups):
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, 0, placement_group_capture_child_tasks=True
        )
        if spec.name:
            options["name"] = f"{spec.name}/{index}"
        actors.append(ray.remote(Replica).options(**options).remote(spec))
    return actors, groups


def _bundles(resources: Resources | None) -> list[dict[str, float]]:
    """Translate a replica's resources to Ray's names; the first bundle is the actor's."""
    if resources is None:
        return [{"CPU": 1.0}]
    several = [resources] if isinstance(resources, Mapping) else list(resources)
    bundles = []
    for one in several:
        bundle = {_AMOUNTS.get(name, name): float(amount) for name, amount in one.items()}
        if not bundle or min(bundle.values()) < 0:
            raise ValueError(f"resources={resources!r}: expected amounts such as num_cpus=1")
        bundles.append({name: amount for name, amount in bundle.items() if amount})
    return bundles


def _summed(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def _shown(amounts: Mapping[str, float], of: Mapping[str, float] | None = None) -> str:
    names = amounts if of is None else of
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names) or "nothing"
