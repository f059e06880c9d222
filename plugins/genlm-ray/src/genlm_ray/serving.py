"""Served models: named replicas that outlive the program that started them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from genlm.plugin import GenlmError, ModelLoadError
from genlm_ray import cluster
from genlm_ray.spec import ReplicaSpec, ServingLimits, compared_versions

_DESCRIBE_TIMEOUT_S = 10.0
"""Timeout for the descriptions of loaded replicas."""

_REMOVE_TIMEOUT_S = 10.0
"""Maximum time until the head of the cluster has removed a served model."""


def serve(
    name: str,
    model: str,
    engine: str,
    *,
    address: str | None = None,
    ray_opts: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Load replicas that outlive this program, and return their descriptions.

    Args:
        name: Name of the model for `load_model(name, backend="ray")`.
        model: Model id or path for the backend `engine`.
        engine: Backend of the replicas.
        address: Address of the cluster; by default that of the joined cluster, or
            `RAY_ADDRESS`.
        ray_opts: Further arguments of `ray.init`, used for the first connection of a process
            only.
        **options: Further attributes of `ReplicaSpec`. By default there is one replica, which
            may be restarted any number of times, with the limits `ServingLimits()`.

    Raises:
        ModelLoadError: No cluster was named, the name exists, the cluster lacks the
            resources, or the model cannot be loaded; no replica remains.
    """
    if not name or "/" in name:
        raise ValueError(f"name={name!r}: expected a name without '/'")
    cluster.connect(address, ray_opts, default=None)
    if _is_taken(name):
        raise ModelLoadError(
            f"this cluster already serves {name!r}, or its replicas have died and are not "
            f"removed; choose another name, or end it with the same --local or --address: "
            f"genlm serve --stop --name {name}"
        )
    defaults: dict[str, Any] = {"replicas": 1, "max_restarts": -1, "limits": ServingLimits()}
    spec = ReplicaSpec(engine, model, name=name, **(defaults | options))
    _, _, descriptions = load_replicas(spec)
    return [
        {**description, "state": "up", "replica": index}
        for index, description in enumerate(descriptions)
    ]


def load_replicas(
    spec: ReplicaSpec,
) -> tuple[list[Any], list[PlacementGroup], list[dict[str, Any]]]:
    """Load private replicas, or those of a served model, or raise and leave none.

    Returns:
        The actors, their reservations and their descriptions.
    """
    bundles, timeout_s = cluster.bundles_of(spec.resources), spec.place_timeout_s
    groups = cluster.reserve_resources(
        bundles, spec.replicas, name=spec.name, timeout_s=timeout_s
    )
    actors: list[Any] = []
    try:
        for index, group in enumerate(groups):
            actors.append(cluster.start_replica(spec, index, group))
        return actors, groups, wait_until_loaded(actors, spec.load_timeout_s, restarts=0)
    except BaseException:
        _remove(spec.name, actors, groups)
        raise


def served(address: str | None = None) -> list[dict[str, Any]]:
    """Describe every replica that a cluster serves; `state` is `"up"` if the replica responded.

    Raises:
        ModelLoadError: No cluster was named.
    """
    cluster.join(address)
    calls = [
        (name, index, actor.describe.remote())
        for name, actors in _served_actors().items()
        for index, actor in actors.items()
    ]
    pending = [call for _, _, call in calls]
    if pending:
        _, pending = ray.wait(pending, num_returns=len(calls), timeout=_DESCRIBE_TIMEOUT_S)
    descriptions = []
    for name, index, call in calls:
        description = {"name": name, "state": f"no response in {_DESCRIBE_TIMEOUT_S:g} s"}
        if call not in pending:
            try:
                [description] = _results([call])
            except ModelLoadError as error:
                description["state"] = str(error)
        descriptions.append({"state": "up", **description, "replica": index})
    return descriptions


def stop(name: str, address: str | None = None) -> int:
    """End all replicas of a served model and return their number.

    Dead replicas are counted too, because their resources are still reserved.

    Raises:
        ModelLoadError: The cluster serves no such model, or no cluster was named.
    """
    cluster.join(address)
    groups = cluster.reservations(name)
    actors = list(_served_actors().get(name, {}).values()) if groups else actors_of(name)
    _remove(name, actors, groups)
    return max(len(actors), len(groups))


def actors_of(name: str) -> list[Any]:
    """Return the actors of a served model.

    Raises:
        ModelLoadError: The cluster serves no such model.
    """
    served = _served_actors()
    if name not in served:
        names = ", ".join(map(repr, served)) or "none"
        raise ModelLoadError(
            f"no served model {name!r}; this cluster serves {names}. "
            f"`genlm serve` serves a model; to load a model in private replicas, pass engine=, "
            f"such as engine='hf'"
        )
    return list(served[name].values())


def wait_until_loaded(
    actors: list[Any], timeout_s: float, *, restarts: int = -1
) -> list[dict[str, Any]]:
    """Wait until replicas have loaded their model, and return their descriptions.

    Args:
        actors: The replicas.
        timeout_s: Maximum time.
        restarts: Maximum number of restarts during the call; -1 for no limit.

    Raises:
        ModelLoadError: A replica cannot be loaded, or not in time, or it has other versions of
            distributions than this program.
    """
    calls = [actor.describe.options(max_task_retries=restarts).remote() for actor in actors]
    descriptions = _results(calls, timeout_s)
    for description in descriptions:
        remote = description["versions"]
        differences = ", ".join(
            f"{name} {remote[name]} there, {version} here"
            # A program that uses a served model need not have the plugin of its engine.
            for name, version in compared_versions(remote).items()
            if version != remote[name]
        )
        if differences:
            raise ModelLoadError(
                f"the replicas and this program have different versions: {differences}; "
                f"install the same versions on every machine"
            )
    return descriptions


def kill(actor: Any, *, restart: bool = False) -> None:
    """End the process of a replica; with `restart`, Ray starts a new process."""
    with contextlib.suppress(RayError):  # the actor or the cluster has ended
        ray.kill(actor, no_restart=not restart)


def _results(calls: list[Any], timeout_s: float | None = None) -> list[Any]:
    try:
        results: list[Any] = ray.get(calls, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, GenlmError):
            raise error.cause from None
        raise ModelLoadError(f"a replica could not start: {error}") from error
    except GetTimeoutError as error:
        raise ModelLoadError(
            f"{len(calls)} replicas did not respond within {timeout_s:g} s; increase "
            f"load_timeout_s="
        ) from error
    except RayError as error:
        raise ModelLoadError(f"a replica could not start: {error}") from error
    return results


def _remove(name: str, actors: Sequence[Any], groups: Sequence[PlacementGroup]) -> None:
    """End replicas and release their reservations.

    Ray does both in the background. This waits for them, because the name of a served model
    could not be used again before.
    """
    for actor in actors:
        kill(actor)
    cluster.remove(groups)
    deadline_s = time.monotonic() + _REMOVE_TIMEOUT_S
    with contextlib.suppress(RayError):  # the cluster has ended
        while name and _is_taken(name) and time.monotonic() < deadline_s:
            time.sleep(0.01)


def _is_taken(name: str) -> bool:
    return name in _served_actors() or bool(cluster.reservations(name))


def _served_actors() -> dict[str, dict[int, Any]]:
    """Return the actors of the served models, by name and index of the replica."""
    actors: dict[str, dict[int, Any]] = {}
    for listed in ray.util.list_named_actors(all_namespaces=True):
        name, _, index = listed["name"].rpartition("/")
        if listed["namespace"] == cluster.NAMESPACE and index.isdecimal():
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                actor = ray.get_actor(listed["name"], cluster.NAMESPACE)
                actors.setdefault(name, {})[int(index)] = actor
    return {name: dict(sorted(actors[name].items())) for name in sorted(actors)}
