"""Served models: named replicas that outlive the program that started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from genlm.plugin import GenlmError, ModelLoadError
from genlm_ray import cluster
from genlm_ray.replica import ReplicaSpec, ServingLimits, version_of

__all__ = [
    "ServingLimits",
    "actors_of",
    "kill",
    "serve",
    "served",
    "stop",
    "wait_until_loaded",
]

_ANSWER_S = 10.0
"""Timeout for the description of a loaded replica."""


def serve(
    name: str,
    model: str,
    engine: str,
    *,
    replicas: int = 1,
    engine_opts: Mapping[str, Any] | None = None,
    resources: cluster.Resources | None = None,
    address: str | None = None,
    max_restarts: int = -1,
    limits: ServingLimits | None = None,
    driver_timeout_s: float = 60.0,
    step_timeout_s: float = 3600.0,
    load_timeout_s: float = 1800.0,
    place_timeout_s: float = 60.0,
    ray_opts: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Load replicas that outlive this program; return their descriptions.

    Args:
        name: Name for `load_model(name, backend="ray")`.
        model: Model id or path for the backend `engine`.
        engine: Backend of the replicas.
        replicas: Number of replicas.
        engine_opts: Options of that backend.
        resources: Resources of a replica, as for `RayEngine`.
        address: Cluster address; by default that of the joined cluster, or
            `RAY_ADDRESS`.
        max_restarts: Maximum number of restarts of each replica; -1 for no limit.
        limits: Resource limits of the programs that share a replica; by default
            `ServingLimits()`.
        driver_timeout_s: Silence after which the requests of a program are dropped.
        step_timeout_s: Longest step of its engine before a replica counts as hanging and ends
            its process.
        load_timeout_s: Timeout for loading the replicas.
        place_timeout_s: Maximum wait for resources of the cluster that are in use.
        ray_opts: Further arguments of `ray.init`; they count for the first connection of a
            process only.

    Raises:
        ModelLoadError: No cluster was named, the name exists, the cluster lacks the
            resources, or the model cannot be loaded; no replica remains.
    """
    _check_name(name)
    spec = ReplicaSpec(
        engine,
        model,
        dict(engine_opts or {}),
        name,
        replicas,
        driver_timeout_s,
        step_timeout_s,
        limits or ServingLimits(),
    )
    cluster.connect(address, ray_opts, default=None)
    if name in _served() or cluster.reservations(name):
        raise ModelLoadError(
            f"asked to serve {name!r}, which this cluster serves already, or whose replicas "
            f"have died; choose another name, or end it: genlm serve --stop --name {name}"
        )
    actors, groups = cluster.start_replicas(
        spec, resources, max_restarts=max_restarts, place_timeout_s=place_timeout_s
    )
    try:
        found = wait_until_loaded(actors, load_timeout_s)
        return [{**each, "state": "up", "replica": index} for index, each in enumerate(found)]
    except BaseException:
        for actor in actors:
            kill(actor)
        cluster.remove(groups)
        raise


def served(address: str | None = None) -> list[dict[str, Any]]:
    """Describe every replica that a cluster serves; `state` is `"up"` if it answered.

    Raises:
        ModelLoadError: No cluster was named.
    """
    cluster.join(address)
    found = []
    for name, indices in _served().items():
        for index, actor in enumerate(_actors(name, indices)):
            try:
                [description] = _ask_all([actor], "describe", _ANSWER_S)
            except ModelLoadError as error:
                description = {"name": name, "state": str(error)}
            found.append({"state": "up", **description, "replica": index})
    return found


def stop(name: str, address: str | None = None) -> int:
    """End all replicas of a served model; return their number.

    Replicas that have died are counted too: their resources were still reserved.

    Raises:
        ModelLoadError: The cluster serves no such model, or no cluster was named.
    """
    cluster.join(address)
    groups = cluster.reservations(name)
    actors = _actors(name, _served().get(name, [])) if groups else actors_of(name)
    for actor in actors:
        kill(actor)
    cluster.remove(groups)
    return max(len(actors), len(groups))


def actors_of(name: str) -> list[Any]:
    """Find the replicas of a served model.

    Raises:
        ModelLoadError: The cluster serves no such model.
    """
    served = _served()
    if name not in served:
        raise ModelLoadError(
            f"asked for the served model {name!r}; this cluster serves "
            f"{', '.join(map(repr, served)) or 'none'}. `genlm serve` serves one; to load a "
            f"model in replicas of your own pass engine=, such as engine='hf'"
        )
    return _actors(name, served[name])


def wait_until_loaded(actors: list[Any], timeout_s: float) -> list[dict[str, Any]]:
    """Wait until replicas have loaded their model; return their descriptions.

    Raises:
        ModelLoadError: A replica cannot be loaded, or not in time; or it has other versions of
            what it and this program must have in common.
    """
    for found in _ask_all(actors, "versions", timeout_s):
        own = {name: version_of(name) for name in found}
        differ = ", ".join(
            f"{name} {found[name]} there, {own[name]} here"
            for name in found
            # A program that uses a served model need not have the plugin of its engine.
            if own[name] is not None and own[name] != found[name]
        )
        if differ:
            raise ModelLoadError(
                f"the replicas and this program have different versions: {differ}; install "
                f"the same ones on every machine"
            )
    return _ask_all(actors, "describe", timeout_s)


def kill(actor: Any, *, restart: bool = False) -> None:
    """End the process of a replica; with `restart` Ray starts another one."""
    with contextlib.suppress(RayError):  # the actor or the cluster is dead already
        ray.kill(actor, no_restart=not restart)


def _ask_all(actors: list[Any], method: str, timeout_s: float) -> list[Any]:
    try:
        answers: list[Any] = ray.get(
            [getattr(actor, method).remote() for actor in actors], timeout=timeout_s
        )
    except RayTaskError as error:
        if isinstance(error.cause, GenlmError):
            raise error.cause from None
        raise ModelLoadError(f"a replica could not start: {error}") from error
    except GetTimeoutError as error:
        raise ModelLoadError(
            f"no answer of {len(actors)} replicas in {timeout_s:g} s; load_timeout_s= allows "
            f"more"
        ) from error
    except RayError as error:
        raise ModelLoadError(f"a replica could not start: {error}") from error
    return answers


def _served() -> dict[str, list[int]]:
    """The names of served models, and the indices of their replicas."""
    found: dict[str, list[int]] = {}
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == cluster.NAMESPACE:
            name, _, index = each["name"].rpartition("/")
            found.setdefault(name, []).append(int(index))
    return {name: sorted(found[name]) for name in sorted(found)}


def _actors(name: str, indices: Iterable[int]) -> list[Any]:
    return [ray.get_actor(f"{name}/{index}", cluster.NAMESPACE) for index in indices]


def _check_name(name: str) -> None:
    if not name or "/" in name:
        raise ValueError(f"name={name!r}: expected a name without '/'")
