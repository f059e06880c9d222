"""`RayEngine`: replicas of an engine on a Ray cluster, used as one engine.

The engine's thread passes queries to the `Driver` and waits for completions. The event loop of
the driver assigns the queries to replicas and receives their completions.
"""

from __future__ import annotations

import functools
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from genlm.plugin import (
    Capability,
    Completion,
    Count,
    UnknownAdapterError,
    Vocabulary,
)
from genlm_ray import cluster, serving
from genlm_ray.divider import Divider
from genlm_ray.driver import Driver
from genlm_ray.link import Configuration, counts
from genlm_ray.router import Router
from genlm_ray.spec import ReplicaSpec, Resources, check_seconds
from genlm_ray.wire import AnyQuery


class RayEngine:
    """Replicas of a model, which are loaded for this program or served to several programs.

    Args:
        model: Model id or path for the backend `engine`, or the name of a served model.
        engine: Backend of the replicas; None attaches to a served model.
        replicas: Number of replicas to load.
        engine_opts: Options of that backend.
        resources: Resources of one replica: `num_cpus`, `num_gpus`, `memory` in bytes, or
            custom resources of the cluster by name; by default one CPU. For an engine that
            starts workers on Ray, a list of several bundles, the first for the replica's
            process.
        address: Address of the cluster, as for `ray.init`; by default that of the cluster that
            this process has joined, else `RAY_ADDRESS`, else that of a new cluster on this
            machine.
        max_restarts: Maximum number of restarts of each replica, 3 by default; -1 for no limit.
        ping_timeout_s: Time without a response after which a replica is considered hung. A
            private replica is restarted; from a served replica, this program detaches until it
            responds.
        step_timeout_s: Maximum duration of an engine step, after which a replica ends its
            process; 3600 by default.
        load_timeout_s: Maximum time for loading the replicas.
        place_timeout_s: Maximum time to wait for resources of the cluster that are in use; 60
            by default.
        max_in_flight: Maximum number of concurrent queries in a replica, at least 1. Further
            queries wait in this process and may be assigned to another replica.
        ray_opts: Further arguments of `ray.init`, used for the first connection of a process
            only.

    Raises:
        ValueError: `max_in_flight` is less than 1, all amounts of `resources` are 0, an amount
            is negative, or a timeout is infinite or not positive.
        TypeError: An option for loading replicas is set for a served model, or an option is of
            another type.
        ModelLoadError: There is no cluster, this process has joined another cluster, resources
            are missing, or the model is not served or cannot be loaded.
    """

    option_homes: ClassVar = {"ray_": "ray_opts", "": "engine_opts"}

    samples_groups = 32  # so that several replicas compute the continuations of a call

    make_router: Callable[[], Router] = Router

    # Functions that `genlm serve` calls.
    join = staticmethod(cluster.join)
    leaver = staticmethod(cluster.leaver)
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
        resources: Resources | None = None,
        address: str | None = None,
        max_restarts: int | None = None,
        ping_timeout_s: float = 30.0,
        step_timeout_s: float | None = None,
        load_timeout_s: float = 1800.0,
        place_timeout_s: float | None = None,
        max_in_flight: int = 512,
        ray_opts: Mapping[str, Any] | None = None,
    ) -> None:
        if not (isinstance(max_in_flight, (int, float)) and max_in_flight >= 1):  # or NaN
            raise ValueError(f"max_in_flight={max_in_flight!r}; expected a number, 1 or more")
        check_seconds(ping_timeout_s=ping_timeout_s, load_timeout_s=load_timeout_s)
        self._submitted: list[AnyQuery] = []
        self._finished: queue.SimpleQueue[list[Completion]] = queue.SimpleQueue()
        cluster.connect(address, ray_opts, default="auto" if engine is None else "local")
        loading: dict[str, Any] = {
            "replicas": replicas,
            "engine_opts": engine_opts,
            "resources": resources,
            "max_restarts": max_restarts,
            "step_timeout_s": step_timeout_s,
            "place_timeout_s": place_timeout_s,
        }
        loading = {option: value for option, value in loading.items() if value is not None}
        if engine is not None:
            spec = ReplicaSpec(
                engine, model, 4 * ping_timeout_s, load_timeout_s=load_timeout_s, **loading
            )
            actors, groups, _ = serving.load_replicas(spec)
        elif loading:
            raise TypeError(
                f"{', '.join(loading)}= for the served model {model!r}, which is "
                f"loaded already; to load private replicas, also pass engine="
            )
        else:
            actors, groups = serving.actors_of(model), []
            serving.wait_until_loaded(actors, load_timeout_s)
        self.driver = Driver(
            actors,
            groups,
            self.make_router(),
            self._finished.put,
            ping_timeout_s=ping_timeout_s,
            load_timeout_s=load_timeout_s,
            max_in_flight=max_in_flight,
        )
        self._divider = Divider(
            self.driver.sessions, functools.partial(self.driver.schedule, self.driver.abort)
        )
        try:
            self._describe(self.driver.run(self.driver.start()))
        except BaseException:
            self.close()
            raise

    def _describe(self, description: dict[str, Any]) -> None:
        self.vocabulary: Vocabulary = description["vocabulary"]
        self.max_context: int | None = description["max_context"]
        self.capabilities: frozenset[Capability] = description["capabilities"] - {
            Capability.WEIGHTS
        }
        self.capability_hints: dict[Capability, str] = {
            **description["capability_hints"],
            Capability.WEIGHTS: "replicas load their weights from a folder: save the new ones, "
            "close this model and load the folder",
        }
        self.adapters: tuple[str, ...] = description["adapters"]

    # -- the protocol of engines ------------------------------------------------------

    def submit(self, query: AnyQuery) -> None:
        """Accept a query, which the next step passes to the driver."""
        self._submitted.append(query)

    submit_group = submit

    def step(self) -> list[Completion]:
        """Pass submitted queries to the driver, and wait for completions or for `wake`.

        Raises:
            EngineDiedError: All replicas have ended.
        """
        self._send_submitted()
        self.driver.raise_if_dead()  # otherwise it wakes the step
        completions = self._finished.get()
        while not self._finished.empty():
            completions = completions + self._finished.get()
        self.driver.raise_if_dead()
        return self._divider.join(completions)

    def _send_submitted(self) -> None:
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self.driver.schedule(self.driver.submit, self._divider.divide(submitted))

    def wake(self) -> None:
        """Make a waiting step return. May be called from any thread."""
        self._finished.put([])

    def abort(self, query_id: int) -> None:
        """Drop a query, also in its replica."""
        self._send_submitted()
        self._divider.abort(query_id)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Make the replicas release a context that the program has dropped."""
        self._send_submitted()  # an extension of the context may be among them
        self.driver.schedule(self.driver.release, adapter, key)

    def close(self) -> None:
        """End private replicas; served replicas keep running."""
        self.driver.close()

    def statistics(self) -> dict[str, int | float | str]:
        """Return the counts of all replicas, and the statistics of each by its index."""
        replicas = [link.statistics() for link in self.driver.links]
        statistics: dict[str, Any] = {"replicas": len(replicas)}
        totals: Counter[str] = Counter()
        for replica in replicas:
            totals.update(counts(replica))
        statistics |= {name: Count(total) for name, total in totals.items()}
        statistics["tokens_recomputed"] = Count(self.driver.router.tokens_recomputed)
        for index, replica in enumerate(replicas):
            statistics |= {f"replica {index}: {name}": replica[name] for name in replica}
        return statistics

    # -- adapters and prefixes --------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter in every replica; the folder is read on the replicas' machines.

        Raises:
            AdapterError: A replica cannot load the adapter; then no replica has it.
        """
        adapters, prefixes = self.driver.configuration
        self._configure({**adapters, name: path}, prefixes)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter in every replica.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        adapters, prefixes = self.driver.configuration
        if name not in adapters:
            raise UnknownAdapterError(name, adapters)
        self._configure(
            {other: path for other, path in adapters.items() if other != name},
            [(token_ids, adapter) for token_ids, adapter in prefixes if adapter != name],
        )

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute and cache a prefix in every replica."""
        adapters, prefixes = self.driver.configuration
        distinct = dict.fromkeys([*prefixes, (tuple(token_ids), adapter)])
        self._configure(adapters, list(distinct))

    def clear_prefix_cache(self) -> None:
        """Free the prefixes of this program in every replica."""
        self._configure(self.driver.configuration.adapters, [])

    def _configure(self, adapters: Mapping[str, str], prefixes: list[Any]) -> None:
        configuration = Configuration(dict(adapters), prefixes)
        self.driver.run(self.driver.configure(configuration))
