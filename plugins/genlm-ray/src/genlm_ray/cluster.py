"""Ray: the connection of this process, resources, and the actors of replicas."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray._private.node import Node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genlm.plugin import ModelLoadError
from genlm_ray.replica import Replica, ReplicaSpec

__all__ = [
    "NAMESPACE",
    "HeadProbe",
    "Resources",
    "bundles_of",
    "connect",
    "join",
    "leave",
    "remove",
    "reservations",
    "reserve_resources",
    "start_replicas",
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


def connect(address: str | None, options: Mapping[str, Any], *, may_start: bool) -> None:
    """Join a cluster, or start one on this machine that ends with this process.

    Args:
        address: As for `ray.init`; None takes `RAY_ADDRESS`, or the cluster of this process if
            it has joined one.
        options: Further arguments of `ray.init`. They count for the first connection of a
            process only.
        may_start: Whether a cluster is started if there is no address.

    Raises:
        ModelLoadError: There is no cluster, another version of Ray or Python runs it, or this
            process has joined another one.
    """
    with _lock:
        if ray.is_initialized():
            joined = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", "local") and not _is_same(address, joined):
                raise ModelLoadError(
                    f"asked for the Ray cluster at {address!r}; this process has joined the "
                    f"one at {joined!r}, and can join one at a time: ray.shutdown() leaves it"
                )
            return
        if address is None and not os.environ.get("RAY_ADDRESS"):
            # Without an address Ray joins the cluster last started on this machine.
            address = "local" if may_start else "auto"
        arguments: dict[str, Any] = {"address": address, "log_to_driver": False}
        starts = address == "local"
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
        joined = address or os.environ.get("RAY_ADDRESS")
        what = "started on this machine" if starts else f"the one at {joined!r}"
        raise ModelLoadError(
            f"asked for a Ray cluster, {what}: {type(error).__name__}: {error}. `ray start "
            f"--head` starts one on this machine; address='host:port' joins another"
        ) from error


def join(
    address: str | None = None,
    *,
    is_local: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Join the named cluster, never another one that happens to run.

    Args:
        address: As for `ray.init`; None takes `RAY_ADDRESS`, or the cluster of this process if
            it has joined one.
        is_local: Whether to join this machine's cluster and ignore `RAY_ADDRESS`.
        options: Further arguments of `ray.init`.

    Returns:
        The address of the cluster.

    Raises:
        ModelLoadError: No cluster was named, or as `connect`.
    """
    was_joined = ray.is_initialized()
    if is_local:
        address = "auto"
    if not (address or was_joined or os.environ.get("RAY_ADDRESS")):
        raise ModelLoadError(
            "no Ray cluster was named: pass its address as host:port, set RAY_ADDRESS, or for "
            "`genlm serve` pass --local, the cluster that runs on this machine. `ray start "
            "--head` starts one"
        )
    with _without_ray_address() if is_local else contextlib.nullcontext():
        connect(address, options or {}, may_start=False)
    joined: str = ray.get_runtime_context().gcs_address
    if is_local and not _is_here(joined):
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


@contextlib.contextmanager
def _without_ray_address() -> Iterator[None]:
    address = os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        if address is not None:
            os.environ["RAY_ADDRESS"] = address


def _is_here(joined: str) -> bool:
    """Whether the head of a cluster runs on this machine."""
    return joined.rpartition(":")[0] in {"127.0.0.1", ray.util.get_node_ip_address()}


def _is_same(address: str, joined: str) -> bool:
    """Whether an address is that of the cluster of this process."""
    if address == joined:
        return True
    host, _, port = address.rpartition(":")
    joined_host, _, joined_port = joined.rpartition(":")
    if port != joined_port:
        return False
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        return False
    here = {"127.0.0.1", ray.util.get_node_ip_address()}
    return resolved == joined_host or (resolved in here and joined_host in here)


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


class HeadProbe:
    """Monitors the cluster's head on a separate thread, because calls may block."""

    def __init__(self) -> None:
        self._asked_s: float | None = None  # time of the first request without response
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="genlm-ray-head", daemon=True)
        self.thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the head has not answered for too long, or Ray was shut down."""
        asked_s = self._asked_s  # the program may be suspended between requests
        is_silent = asked_s is not None and time.monotonic() - asked_s > HEAD_TIMEOUT_S
        return is_silent or not ray.is_initialized()

    def close(self) -> None:
        """Stop monitoring."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set() and ray.is_initialized():
            if self._asked_s is None:
                self._asked_s = time.monotonic()
            with contextlib.suppress(Exception):  # only silence counts as a failure
                ray.nodes()
                self._asked_s = None
            self._closed.wait(_PROBE_S)


def bundles_of(resources: Resources | None) -> list[dict[str, float]]:
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
    spec: ReplicaSpec, groups: Sequence[PlacementGroup], *, max_restarts: int
) -> list[Any]:
    """Start an actor in each reservation; detached ones of a served model."""
    cls = ray.remote(Replica)
    actors = []
    for index, group in enumerate(groups):
        own = dict(group.bundle_specs[0])
        options: dict[str, Any] = {
            "num_cpus": own.pop("CPU", 0.0),
            "num_gpus": own.pop("GPU", 0.0),
            "memory": own.pop("memory", None),
            "resources": own,
            "max_restarts": max_restarts,
            "max_concurrency": _MAX_CONCURRENCY,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, 0, placement_group_capture_child_tasks=True
            ),
        }
        if spec.name:
            options |= {
                "name": f"{spec.name}/{index}",
                "namespace": NAMESPACE,
                "lifetime": "detached",
            }
        actors.append(cls.options(**options).remote(spec))
    return actors


def _summed(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def _shown(amounts: Mapping[str, float], of: Mapping[str, float] | None = None) -> str:
    names = amounts if of is None else of
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names) or "nothing"
