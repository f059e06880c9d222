"""`RayEngine`: replicas of an engine on a Ray cluster, driven as one engine.

The engine's thread passes queries to the `Driver`, whose event loop assigns them to replicas
and receives their completions, and waits for these.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import ray
import ray.cloudpickle

from genlm.plugin import (
    Capability,
    Completion,
    ModelLoadError,
    UnknownAdapterError,
    Vocabulary,
)
from genlm_ray import cluster, serving
from genlm_ray.driver import COUNTED, Configuration, Driver
from genlm_ray.replica import ReplicaSpec
from genlm_ray.router import AnyQuery, Router

__all__ = ["RayEngine"]


class RayEngine:
    """Replicas of one model, loaded for this program or served to several.

    Args:
        model: Model id or path for the backend `engine`, or the name of a served model.
        engine: Backend of the replicas; None attaches to a served model.
        replicas: Number of replicas to load.
        engine_opts: Options of that backend.
        resources: Resources of one replica: `num_cpus`, `num_gpus`, `memory` in bytes, or
            custom resources of the cluster by name; by default one CPU. A list gives a replica
            several bundles, the first for its own process, for an engine that starts workers on
            Ray.
        address: Address of the cluster, as for `ray.init`; by default that of the cluster that
            this process has joined, else `RAY_ADDRESS`, else a cluster is started on this
            machine.
        max_restarts: Maximum number of restarts of each replica, 3 by default; -1 for no limit.
        ping_timeout_s: Time without an answer after which a replica is considered hung. A
            private one is restarted; from a served one this program detaches until it answers.
        step_timeout_s: Maximum duration of an engine step, after which a replica ends its
            process; 3600 by default.
        load_timeout_s: Maximum time for loading the replicas.
        place_timeout_s: Maximum time to wait for resources of the cluster that are in use; 60
            by default.
        max_in_flight: Maximum number of queries that a replica has at a time, at least 1.
            Further queries wait in this process, where another replica can take them.
        ray_opts: Further arguments of `ray.init`, used for the first connection of a process
            only.

    Raises:
        ValueError: `max_in_flight` is less than 1.
        TypeError: An option of loading, for a served model.
        ModelLoadError: There is no cluster, or this process has joined another one; resources
            are missing; or the model is not served or cannot be loaded.
    """

    option_homes: ClassVar = {"ray_": "ray_opts", "": "engine_opts"}

    samples_groups = 32  # several replicas share the continuations of one call

    make_router: Callable[[], Router] = Router

    # What `genlm serve` calls.
    join = staticmethod(cluster.join)
    leave = staticmethod(cluster.leave)
    serve = staticmethod(serving.serve)
    served = staticmethod(serving.served)
    stop = staticmethod(serving.stop)

    def __init__(
        self,
        model: str,
        *,
        engine: str | None = None,
        replicas: int | None = None,
        engine_opts: Mapping[str, Any] | None = None,
        resources: cluster.Resources | None = None,
        address: str | None = None,
        max_restarts: int | None = None,
        ping_timeout_s: float = 30.0,
        step_timeout_s: float | None = None,
        load_timeout_s: float = 1800.0,
        place_timeout_s: float | None = None,
        max_in_flight: int = 512,
        ray_opts: Mapping[str, Any] | None = None,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight}; it must be 1 or more")
        self._groups: list[Any] = []
        self._submitted: list[AnyQuery] = []
        self._finished: queue.SimpleQueue[list[Completion]] = queue.SimpleQueue()
        is_private = engine is not None
        cluster.connect(address, ray_opts, default="local" if is_private else "auto")
        loading = {
            "replicas": replicas,
            "engine_opts": engine_opts,
            "resources": resources,
            "max_restarts": max_restarts,
            "step_timeout_s": step_timeout_s,
            "place_timeout_s": place_timeout_s,
        }
        given = [option for option, value in loading.items() if value is not None]
        if engine is not None:
            spec = ReplicaSpec(
                engine,
                model,
                dict(engine_opts or {}),
                name="",
                replicas=2 if replicas is None else replicas,
                driver_timeout_s=4 * ping_timeout_s,
                step_timeout_s=3600.0 if step_timeout_s is None else step_timeout_s,
            )
            actors, self._groups = cluster.start_replicas(
                spec,
                resources,
                max_restarts=3 if max_restarts is None else max_restarts,
                place_timeout_s=60.0 if place_timeout_s is None else place_timeout_s,
            )
        elif given:
            raise TypeError(
                f"{', '.join(given)}= for the served model {model!r}, which is loaded already; "
                f"to load replicas of your own also pass engine="
            )
        else:
            actors = serving.actors_of(model)
        self.driver = Driver(
            actors,
            self.make_router(),
            self._finished.put,
            is_private=is_private,
            ping_timeout_s=ping_timeout_s,
            load_timeout_s=load_timeout_s,
            max_in_flight=max_in_flight,
        )
        try:
            serving.wait_until_loaded(actors, load_timeout_s)
            self._describe(self.driver.start())
        except BaseException:
            self.close()
            raise

    def _describe(self, description: dict[str, Any]) -> None:
        try:
            self.vocabulary: Vocabulary = ray.cloudpickle.loads(description["vocabulary"])
        except Exception as error:  # tokenizer modules may raise anything here
            raise ModelLoadError(
                f"the vocabulary of the replicas cannot be read here: {type(error).__name__}: "
                f"{error}; install the library of its tokenizer, in the version that they have"
            ) from error
        self.max_context: int | None = description["max_context"]
        self.capabilities = frozenset(map(Capability, description["capabilities"]))
        self.capability_hints = {Capability(k): v for k, v in description["hints"].items()}
        self.adapters: tuple[str, ...] = description["adapters"]

    # -- the protocol of engines ------------------------------------------------------

    def submit(self, query: AnyQuery) -> None:
        """Accept a query, which the next step passes to the driver.

        One replica computes the query of a population.

        Raises:
            EngineDiedError: No replica is left.
        """
        self.driver.raise_if_died()
        self._submitted.append(query)

    submit_group = submit

    def step(self) -> list[Completion]:
        """Pass on the submitted queries, and wait for completions or for `wake`.

        Raises:
            EngineDiedError: No replica is left.
        """
        self._pass_on()
        self.driver.raise_if_died()  # unanswered queries have nothing to wait for
        completions = self._finished.get()
        while not self._finished.empty():
            completions = completions + self._finished.get()
        self.driver.raise_if_died()
        return completions

    def _pass_on(self) -> None:
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self.driver.schedule(self.driver.submit, submitted)

    def wake(self) -> None:
        """Make a step that waits for replicas return; called from any thread."""
        self._finished.put([])

    def abort(self, query_id: int) -> None:
        """Drop a query, also in the replica that evaluates it."""
        self._pass_on()
        self.driver.schedule(self.driver.abort, query_id)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Have the replicas forget a context that the program has dropped."""
        self._pass_on()  # an extension of it may be among them
        self.driver.schedule(self.driver.release, adapter, key)

    def close(self) -> None:
        """End the private replicas; served ones keep running."""
        self.driver.close()
        if ray.is_initialized():
            cluster.remove(self._groups)
        self._groups = []

    def statistics(self) -> dict[str, int | float | str]:
        """Token counts of all replicas together, and the statistics of each by its number."""
        links = self.driver.links
        found: dict[str, int | float | str] = {"replicas": len(links)}
        for name in COUNTED:
            if any(name in each.counts for each in links):
                found[name] = sum(each.counts.get(name, 0) for each in links)
        found["tokens_recomputed"] = self.driver.router.tokens_recomputed
        for link in links:
            for name, value in link.statistics().items():
                found[f"replica {link.index}: {name}"] = value
        return found

    # -- adapters and prefixes --------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter in every replica; folders are those of the replicas' machines.

        Raises:
            AdapterError: A replica cannot load it; no replica then keeps it.
        """
        adapters, prefixes = self.driver.configuration
        self._configure({**adapters, name: path}, prefixes)

    def remove_adapter(self, name: str) -> None:
        """Free an adapter in every replica.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        adapters, prefixes = self.driver.configuration
        if name not in adapters:
            raise UnknownAdapterError(name, adapters)
        others = {each: path for each, path in adapters.items() if each != name}
        self._configure(others, [each for each in prefixes if each[1] != name])

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Have every replica compute and keep a prefix."""
        adapters, prefixes = self.driver.configuration
        self._configure(adapters, [*prefixes, (tuple(token_ids), adapter)])

    def clear_prefix_cache(self) -> None:
        """Free the prefixes of this program in every replica."""
        self._configure(self.driver.configuration.adapters, [])

    def _configure(self, adapters: Mapping[str, str], prefixes: list[Any]) -> None:
        configuration = Configuration(dict(adapters), prefixes)
        self.driver.run(self.driver.configure(configuration))
