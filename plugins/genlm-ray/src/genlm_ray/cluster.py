"""The Ray cluster of this process: connection, resources, and the actors of replicas."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genlm.plugin import ModelLoadError, call_on_thread, describe_error, options_mapping
from genlm_ray.replica import Replica
from genlm_ray.spec import ReplicaSpec, Resources

NAMESPACE = "genlm"
"""Ray's namespace of served replicas."""

_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}

HEAD_TIMEOUT_S = 20.0
"""Time without a response after which the cluster's head is considered lost. Ray waits 60
seconds, and then ends the process of every driver."""

LEAVE_TIMEOUT_S = 10.0
"""Timeout for leaving a cluster."""

_PROBE_S = 2.0

_JOIN_TIMEOUT_S = 10.0
"""Time in which the head of a cluster must respond when this process joins it. Ray itself tries
for several minutes."""

_ATTEMPTS = 3
"""Maximum number of attempts to start a cluster on this machine. Ray's processes must connect
within 30 seconds, which can be too short on an overloaded machine."""

_MAX_CONCURRENCY = 4096
"""Maximum number of concurrent calls of a replica: up to 8 long polls per driver, and pings,
which must not wait for polls."""

ReplicaActor: Any = ray.remote(Replica)
"""Ray's class of replicas; Ray never frees such a class."""

_lock = threading.Lock()

_is_forked = threading.Event()
"""Set in a process that was forked from one that had joined a cluster."""


def _after_fork() -> None:
    if ray.is_initialized():
        _is_forked.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

logger = logging.getLogger("genlm.ray")


def connect(
    address: str | None, options: Mapping[str, Any] | None = None, *, default: str | None
) -> str:
    """Join a cluster, or start a cluster on this machine that ends with this process.

    Args:
        address: Address of the cluster as for `ray.init`; by default that of the cluster that
            this process has joined, else `RAY_ADDRESS`.
        options: Further arguments of `ray.init`, used only for the first connection of a
            process.
        default: Default address: `"local"` starts a cluster, `"auto"` is the cluster that runs
            on this machine, None raises an error.

    Returns:
        The address of the cluster.

    Raises:
        ModelLoadError: There is no cluster, no cluster was named, the cluster has another
            version of Ray or Python, refuses the token or does not respond, this process has
            joined another cluster, or it was forked from a process that had joined one.
    """
    if _is_forked.is_set():  # all calls of Ray would hang
        raise ModelLoadError(
            "this process was forked from one that had joined a Ray cluster, and Ray's threads "
            "stayed there; use a cluster in spawned processes, such as those of "
            "multiprocessing.get_context('spawn')"
        )
    with _lock:
        if not ray.is_initialized():
            _connect(address, options_mapping("ray_opts", options), default)
        joined: str = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local") and not _is_same(address, joined):
            raise ModelLoadError(
                f"cannot join the Ray cluster at {address!r}: this process has joined the one "
                f"at {joined!r}, and can join one at a time; ray.shutdown() leaves it"
            )
        return joined


def _connect(address: str | None, options: Mapping[str, Any], default: str | None) -> None:
    target = address or os.environ.get("RAY_ADDRESS") or default
    if target is None:
        raise ModelLoadError(
            "no Ray cluster was named: pass its address as host:port, set RAY_ADDRESS, or pass "
            "--local to `genlm serve` for the cluster that runs on this machine. `ray start "
            "--head` starts a cluster"
        )
    starts = target == "local"
    # Without an address, Ray joins the latest cluster of this machine.
    arguments: dict[str, Any] = {"address": target, "log_to_driver": False}
    if starts:
        arguments["include_dashboard"] = False
    arguments |= options
    if not starts:
        _check_head(target)
    for remaining in range(_ATTEMPTS - 1 if starts else 0, -1, -1):
        try:
            with _keep_sigterm_handler():
                # When the thread that started Ray's processes ends, Linux ends them.
                call_on_thread(lambda: ray.init(**arguments), threading.Event().wait).result()
            return
        except Exception as error:
            is_refused = isinstance(error, (TypeError, ValueError))  # an argument
            if remaining and not is_refused:
                logger.warning("starting a Ray cluster failed, trying again: %s", error)
                continue
            action = "start a Ray cluster" if starts else f"join the Ray cluster at {target!r}"
            # The text of the cause of a `ConnectionError` ends with the first error.
            reason = describe_error(error.__cause__ or error).splitlines()[-1].rstrip(".")
            raise ModelLoadError(
                f"cannot {action}: {reason}. `ray start --head` starts "
                f"a cluster on this machine; address='host:port' joins another one"
            ) from error


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which `ray.init` replaces.

    Ray's handler calls the one before, but aborts the process three seconds later. Python sets
    handlers on the main thread only.
    """
    if sys.platform == "win32":
        yield
        return
    sigaction = ctypes.CDLL(None).sigaction
    handler = ctypes.create_string_buffer(1024)  # a `struct sigaction`, which is smaller
    sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        sigaction(signal.SIGTERM, handler, None)


def _check_head(target: str) -> None:
    """Raise an error if no head of a cluster responds, because `ray.init` would hang."""
    if target.startswith("ray://"):  # Ray's client has a timeout
        return
    try:
        # `GcsClient` ends the process if the token is missing, and retries for 10 s without.
        if target == "auto":
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        address = canonicalize_bootstrap_address(target)
    except Exception:  # noqa: BLE001 - `ray.init` raises it too
        return
    response = call_on_thread(lambda: GcsClient(address=address))
    if not concurrent.futures.wait([response], _JOIN_TIMEOUT_S).done:
        where = "" if address == target else f" ({address})"
        raise ModelLoadError(
            f"cannot join the Ray cluster at {target!r}{where}: no cluster responds there, for "
            f"{_JOIN_TIMEOUT_S:g} s. Pass the address of a running cluster; on its head, "
            f"`ray start --head` starts one and prints the address"
        )


def join(address: str | None = None, *, is_local: bool = False) -> str:
    """Join the named cluster, never another cluster that is running; return its address.

    Args:
        address: Address of the cluster; see `connect`.
        is_local: Whether to join this machine's cluster and ignore `RAY_ADDRESS`.

    Raises:
        ModelLoadError: No cluster was named, or `connect` fails.
    """
    if not is_local:
        return connect(address, default=None)
    was_joined, named = ray.is_initialized(), os.environ.pop("RAY_ADDRESS", None)
    try:
        joined = connect("auto", default=None)
    finally:
        if named is not None:
            os.environ["RAY_ADDRESS"] = named
    if joined.rpartition(":")[0] not in _local_hosts():
        if not was_joined:
            leaver()()
        raise ModelLoadError(
            f"no Ray cluster has its head on this machine, which is a node of the one at "
            f"{joined!r}; pass this address to use it"
        )
    return joined


def leaver() -> Callable[[], bool]:
    """Return a function that leaves the cluster of this process.

    An exit handler may call it: its thread is started here, because Python 3.12 cannot start
    threads while the interpreter exits.

    Returns:
        Function that returns False if the cluster does not respond; this process then cannot
        end normally.
    """
    leaves = threading.Event()
    left = call_on_thread(lambda: leaves.wait() and ray.shutdown())

    def leave() -> bool:
        leaves.set()
        return bool(concurrent.futures.wait([left], LEAVE_TIMEOUT_S).done)

    return leave


def _local_hosts() -> set[str]:
    return {"127.0.0.1", "::1", ray.util.get_node_ip_address()}


def _is_same(address: str, joined: str) -> bool:
    """Whether an address is that of the joined cluster."""
    host, _, port = address.rpartition(":")
    joined_host, _, joined_port = joined.rpartition(":")
    if address == joined or port != joined_port:
        return address == joined
    try:
        resolved = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    joined_host, local = joined_host.strip("[]"), _local_hosts()
    return joined_host in resolved or (joined_host in local and not resolved.isdisjoint(local))


async def until_head_is_lost() -> None:
    """Return when the cluster's head has not responded for too long, or Ray was shut down.

    Only the time of a request counts, because this process may be paused between requests.
    """
    while ray.is_initialized():
        response = asyncio.wrap_future(call_on_thread(ray.nodes))
        done, _ = await asyncio.wait([response], timeout=HEAD_TIMEOUT_S)
        if not done:
            return
        response.exception()  # otherwise asyncio logs it
        await asyncio.sleep(_PROBE_S)


def reserve_resources(
    bundles: list[dict[str, float]], count: int, *, name: str, timeout_s: float
) -> list[PlacementGroup]:
    """Reserve the bundles of all replicas or of none.

    The reservations of a served model, which has a name, outlive this process.

    Raises:
        ModelLoadError: The cluster does not have enough resources, or they are in use.
    """
    amounts: dict[str, float] = {}
    for bundle in bundles:
        for key, amount in bundle.items():
            amounts[key] = amounts.get(key, 0.0) + amount
    needed = {key: count * amount for key, amount in amounts.items()}
    total = ray.cluster_resources()
    lacking = {key: amount for key, amount in needed.items() if total.get(key, 0.0) < amount}
    request = f"{count} replicas need {_format_amounts(amounts)} each"
    if lacking:
        raise ModelLoadError(
            f"{request}, in total {_format_amounts(needed)}; the "
            f"cluster has {_format_amounts(total, lacking)}. Load fewer replicas, reduce "
            f"resources=, or add nodes"
        )
    lifetime = "detached" if name else None
    groups: list[PlacementGroup] = []
    try:
        for i in range(count):
            label = f"{NAMESPACE}/{name}/{i}" if name else ""
            groups.append(placement_group(bundles, "PACK", name=label, lifetime=lifetime))
        deadline_s = time.monotonic() + timeout_s
        if not all(group.wait(max(0.0, deadline_s - time.monotonic())) for group in groups):
            free = ray.available_resources()
            raise ModelLoadError(
                f"{request}; after {timeout_s:g} s other programs "
                f"still use the resources: of {_format_amounts(total, needed)}, "
                f"{_format_amounts(free, needed)} is free"
            )
    except BaseException:  # including KeyboardInterrupt
        remove(groups)
        raise
    return groups


def remove(groups: Sequence[PlacementGroup]) -> None:
    """Release reservations."""
    for group in groups:
        remove_placement_group(group)


def reservations(name: str) -> list[PlacementGroup]:
    """Return the reservations of a served model."""
    return [
        PlacementGroup(ray.PlacementGroupID.from_hex(identifier))
        for identifier, group in ray.util.placement_group_table().items()
        if group["name"].startswith(f"{NAMESPACE}/{name}/") and group["state"] != "REMOVED"
    ]


def start_replica(spec: ReplicaSpec, index: int, group: PlacementGroup) -> Any:
    """Start the actor of a replica in its reservation, detached for a served model.

    Raises:
        Exception: Ray cannot start it: an option cannot be pickled, or another program took
            the name.
    """
    bundle = bundles_of(spec.resources)[0]
    options: dict[str, Any] = {
        "num_cpus": bundle.pop("CPU", 0.0),
        "num_gpus": bundle.pop("GPU", 0.0),
        "memory": bundle.pop("memory", None),
        "resources": bundle,
        "max_restarts": spec.max_restarts,
        "max_concurrency": _MAX_CONCURRENCY,
        "enable_task_events": False,  # the head would store 100,000 calls
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, 0, placement_group_capture_child_tasks=True
        ),
    }
    if spec.name:
        name = f"{spec.name}/{index}"
        options |= {"namespace": NAMESPACE, "lifetime": "detached", "name": name}
    return ReplicaActor.options(**options).remote(spec)


def bundles_of(resources: Resources | None) -> list[dict[str, float]]:
    """Translate a replica's resources to bundles with Ray's names, the first for the actor.

    Raises:
        TypeError: `resources` are not mappings from names to numbers.
        ValueError: An amount is negative or NaN, or all amounts of a bundle are 0.
    """
    if resources is None:
        return [{"CPU": 1.0}]
    bundles = []
    try:
        for amounts in [resources] if isinstance(resources, Mapping) else resources:
            bundle = {
                _RAY_NAMES.get(name, name): float(amount) for name, amount in amounts.items()
            }
            bundles.append({name: amount for name, amount in bundle.items() if amount})
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"resources={resources!r}: expected amounts by name, such as {{'num_cpus': 1}}, or "
            f"a list of these"
        ) from None
    all_amounts = [amount for bundle in bundles for amount in bundle.values()]
    # Ray reserves no empty bundles.
    if not (bundles and all(bundles) and all(amount > 0 for amount in all_amounts)):
        raise ValueError(
            f"resources={resources!r}: expected amounts such as num_cpus=1, at least one of "
            f"them above 0"
        )
    return bundles


def _format_amounts(amounts: Mapping[str, float], names: Iterable[str] | None = None) -> str:
    names = amounts if names is None else names
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names) or "nothing"
