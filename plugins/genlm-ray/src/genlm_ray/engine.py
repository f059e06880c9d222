"""`RayEngine`: replicas of an engine on a Ray cluster, driven as one engine.

The engine's thread assigns queries to replicas (`router`), sends them and waits for events:
replies, replicas that were lost or came back, or `wake` of the scheduler, which has new
queries. A second thread pings replicas and attaches those that were started again. All changes
of the replicas' state happen on the engine's thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import ray
import ray.cloudpickle
from ray.exceptions import RayTaskError

from genlm import EngineDiedError, EngineError
from genlm.plugin import (
    Capability,
    Completion,
    EvaluationError,
    GroupQuery,
    ModelLoadError,
    Query,
    TokenSequence,
    UnknownAdapterError,
    Vocabulary,
)
from genlm_ray import cluster, serving
from genlm_ray.link import Attached, Dead, Event, Events, Lost, ReplicaLink, Reply, Wake
from genlm_ray.populations import Populations
from genlm_ray.replica import ReplicaSpec, new_session
from genlm_ray.router import Context, Router
from genlm_ray.wire import TRANSPORT

__all__ = ["RayEngine"]

logger = logging.getLogger("genlm.ray")

_PING_S = 1.0
"""Time between two pings of a replica, which also show it that its driver is alive."""

_RETRY_S = 0.2
"""Time between two attempts to reach a replica that Ray is starting again."""

_COUNTED = ("tokens_evaluated", "tokens_computed", "tokens_drawn")


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
        max_rows_per_call: Maximum number of queries in a message to a replica, at least 1.
            Further queries wait in this process, where another replica can take them.
        ray_opts: Further arguments of `ray.init`, used for the first connection of a process
            only.

    Raises:
        ValueError: `max_rows_per_call` is less than 1.
        TypeError: An option of loading, for a served model.
        ModelLoadError: There is no cluster, or this process has joined another one; resources
            are missing; or the model is not served or cannot be loaded.
    """

    option_homes: ClassVar = {"ray_": "ray_opts", "": "engine_opts"}

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
        max_rows_per_call: int = 256,
        ray_opts: Mapping[str, Any] | None = None,
    ) -> None:
        if max_rows_per_call < 1:
            raise ValueError(f"max_rows_per_call={max_rows_per_call}; it must be 1 or more")
        self._groups: list[Any] = []
        self._events: Events = Events()
        self._ping_timeout_s = ping_timeout_s
        self._load_timeout_s = load_timeout_s
        self._max_rows = max_rows_per_call
        self._submitted: list[Query] = []
        self._ready: list[Completion] = []
        self._by_number: dict[int, ReplicaLink] = {}
        self._links: list[ReplicaLink] = []
        self._adapters: dict[str, str] = {}
        self._prefixes: list[tuple[tuple[int, ...], str | None]] = []
        self._router = self.make_router()
        self._populations = Populations(self._router)
        self._numbers = itertools.count()
        self._died: EngineDiedError | None = None
        self._closed = threading.Event()
        self._wake_monitor = threading.Event()
        self._is_private = engine is not None
        cluster.connect(address, ray_opts or {}, may_start=self._is_private)
        if engine is None:
            serving.refuse_loading_options(
                model,
                replicas=replicas,
                engine_opts=engine_opts,
                resources=resources,
                max_restarts=max_restarts,
                step_timeout_s=step_timeout_s,
                place_timeout_s=place_timeout_s,
            )
            actors = serving.actors_of(model)
        else:
            count = 2 if replicas is None else replicas
            options = dict(engine_opts or {})
            step_s = 3600.0 if step_timeout_s is None else step_timeout_s
            spec = ReplicaSpec(engine, model, options, "", count, 4 * ping_timeout_s, step_s)
            bundles = cluster.bundles_of(resources)
            restarts = 3 if max_restarts is None else max_restarts
            place_s = 60.0 if place_timeout_s is None else place_timeout_s
            actors = self._load(spec, bundles, restarts, place_s)
        driver = new_session()[:8]
        self._links = [
            ReplicaLink(index, actor, driver, self._events)
            for index, actor in enumerate(actors)
        ]
        self._monitor = threading.Thread(target=self._watch, name="genlm-ray", daemon=True)
        try:
            self._attach_all(model)
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        spec: ReplicaSpec,
        bundles: list[dict[str, float]],
        max_restarts: int,
        place_timeout_s: float,
    ) -> list[Any]:
        serving.check_spec(spec)
        self._groups = cluster.reserve_resources(
            bundles, spec.replicas, name="", timeout_s=place_timeout_s
        )
        return cluster.start_replicas(spec, self._groups, max_restarts=max_restarts)

    def _attach_all(self, model: str) -> None:
        serving.check_versions([link.actor for link in self._links], self._load_timeout_s)
        for link in self._links:
            link.attach({}, [])
        self._monitor.start()
        until_s = time.monotonic() + self._load_timeout_s
        waiting = set(self._links)
        while waiting:
            try:
                event = self._events.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise ModelLoadError(
                    f"asked for {len(self._links)} replicas of {model!r}; {len(waiting)} of "
                    f"them have not loaded it in {self._load_timeout_s:g} s; "
                    f"load_timeout_s= allows more"
                ) from None
            if isinstance(event, Dead):
                error = _cause(event.error)
                if isinstance(error, ModelLoadError) or not isinstance(error, Exception):
                    raise error
                raise ModelLoadError(
                    f"a replica of {model!r} could not be loaded: {type(error).__name__}: "
                    f"{error}"
                ) from error
            self._handle(event)
            if isinstance(event, Attached):
                waiting.discard(event.link)
                self._describe(event.description)

    def _describe(self, description: dict[str, Any]) -> None:
        if hasattr(self, "vocabulary"):
            return
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
        # A message of rows at a time keeps batches whole; engines with continuous batching
        # take more while they work.
        self._most_calls = 8 if Capability.SAMPLE in self.capabilities else 2

    # -- the protocol of engines ------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Accept a query, which the next step assigns to a replica.

        Raises:
            EngineDiedError: No replica is left.
        """
        self._raise_if_died()
        self._submitted.append(query)

    def submit_group(self, group: GroupQuery) -> None:
        """Accept the query of a population, which one replica computes.

        Raises:
            EngineDiedError: No replica is left.
        """
        self._raise_if_died()
        self._populations.submit(group)

    def step(self) -> list[Completion]:
        """Send the submitted queries, and wait for answers or for `wake`.

        Raises:
            EngineDiedError: No replica is left.
        """
        self._handle_all()
        self._raise_if_died()  # unanswered queries have no event to wait for
        self._send()
        if not self._ready and (len(self._router) or len(self._populations)):
            self._handle(self._events.get())
            self._handle_all()
            self._raise_if_died()
            self._send()
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> None:
        """Make a step that waits for replicas return; called from any thread."""
        self._events.put(Wake())

    def abort(self, query_id: int) -> None:
        """Drop a query, also in the replica that evaluates it."""
        before = len(self._submitted)
        if before:
            self._submitted = [one for one in self._submitted if one.query_id != query_id]
        if len(self._submitted) < before:
            return
        number = self._router.sent_to(query_id)
        if number is None:
            number = self._populations.sent_to(query_id)
        if self._finished(query_id) and number is not None:
            self._by_number[number].abort(query_id)
            self._wake_monitor.set()

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Have the replicas forget a context that the program has dropped."""
        self._router.release(adapter, key)
        self._forget()
        self._wake_monitor.set()

    def close(self) -> None:
        """End the private replicas; served ones keep running."""
        self._closed.set()
        self._wake_monitor.set()
        if not ray.is_initialized():
            return
        for link in self._links:
            if self._is_private:
                serving.kill(link.actor)
            elif link.session is not None:
                link.detach()
        cluster.remove(self._groups)
        self._groups = []

    def statistics(self) -> dict[str, int | float | str]:
        """Token counts of all replicas together, and the statistics of each by its number."""
        found: dict[str, int | float | str] = {"replicas": len(self._links)}
        for name in _COUNTED:
            counts = [
                count for each in self._links if (count := each.counted(name)) is not None
            ]
            if counts:
                found[name] = sum(counts)
        found["tokens_recomputed"] = self._router.tokens_recomputed
        for link in self._links:
            for name, value in link.statistics().items():
                found[f"replica {link.index}: {name}"] = value
        return found

    # -- adapters and prefixes --------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter in every replica; folders are those of the replicas' machines.

        Raises:
            AdapterError: A replica cannot load it; no replica then keeps it.
        """
        try:
            self._broadcast("add_adapter", name, path)
        except BaseException:
            for link in self._by_number.values():  # those that loaded it free it again
                link.start("remove_adapter", name)
            raise
        self._adapters[name] = path

    def remove_adapter(self, name: str) -> None:
        """Free an adapter in every replica.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        if name not in self._adapters:
            raise UnknownAdapterError(name, self._adapters)
        del self._adapters[name]
        self._prefixes = [each for each in self._prefixes if each[1] != name]
        self._broadcast("remove_adapter", name)

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Have every replica compute and keep a prefix."""
        prefix = (tuple(token_ids), adapter)
        self._broadcast("cache_prefix", *prefix)
        self._prefixes.append(prefix)
        self._router.computed_everywhere(adapter, TokenSequence.of(token_ids))

    def clear_prefix_cache(self) -> None:
        """Free the prefixes of this program in every replica."""
        self._prefixes.clear()
        self._broadcast("clear_prefix_cache")

    def _broadcast(self, method: str, *arguments: Any) -> None:
        """Call a method of every replica, also of those that return meanwhile, and wait.

        A replica that is lost catches up when it is attached again, from the recorded adapters
        and prefixes.

        Raises:
            Exception: The first error of a replica.
            EngineDiedError: No replica is left.
        """
        errors: list[BaseException] = []
        done: set[int] = set()
        while not done or self._by_number.keys() - done:
            self._handle_until(lambda: bool(self._by_number))
            links = {n: link for n, link in self._by_number.items() if n not in done}
            calls = {n: link.start(method, *arguments) for n, link in links.items()}
            for number, call in calls.items():
                self._handle_until(functools.partial(self._is_over, number, call))
                if number not in self._by_number:
                    continue
                error = call.exception()
                if isinstance(error, RayTaskError):
                    errors.append(_cause(error))
                elif error is not None or call.result() is False:
                    self._lose(links[number], error or _session_ended())
                    continue
                done.add(number)
        if errors:
            raise errors[0]

    def _is_over(self, number: int, call: concurrent.futures.Future[Any]) -> bool:
        return call.done() or number not in self._by_number

    def _handle_until(self, is_over: Callable[[], bool]) -> None:
        """Handle events until a condition holds that they bring about.

        Raises:
            EngineDiedError: No replica is left.
        """
        self._handle_all()
        while not is_over():
            self._raise_if_died()
            self._handle(self._events.get())

    def _raise_if_died(self) -> None:
        if self._died is not None:  # a new error for each: raising extends the traceback
            raise EngineDiedError(*self._died.args) from self._died.__cause__

    # -- events -----------------------------------------------------------------------

    def _handle_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._events.get_nowait())

    def _handle(self, event: Event) -> None:
        if isinstance(event, Reply):
            self._receive(event)
        elif isinstance(event, Lost):
            if event.session == event.link.session:
                self._lose(event.link, event.error)
        elif isinstance(event, Attached):
            self._begin(event)
        elif isinstance(event, Dead):
            self._mark_dead(event.link, event.error)

    def _receive(self, reply: Reply) -> None:
        link, number = reply.link, reply.link.number
        if reply.session != link.session or number is None:
            return  # of an abandoned session; other replicas have its queries
        link.calls -= 1
        if isinstance(reply.error, RayTaskError):  # the replica lives, this message failed
            for each in reply.routed:
                each.context.sent.discard(number)
                if self._router.finished(each.query.query_id, number):
                    self._refuse(each.query.query_id, reply.error)
            for query_id in reply.group_ids:
                if self._populations.refused(query_id, number):
                    self._refuse(query_id, reply.error)
        elif reply.error is not None:
            self._lose(link, reply.error)
        elif reply.response is None:
            self._lose(link, _session_ended())
        else:
            link.store(reply.response.statistics)
            finished = TRANSPORT.unpack_completions(reply.response.packed)
            self._ready += [each for each in finished if self._finished(each.query_id, number)]
            # It had accepted all messages, and all other replies have arrived.
            is_last = reply.message == link.last_message and not link.calls
            if is_last and not finished and self._in_flight(number):
                self._lose(link, EngineError("the replica has lost queries of the session"))

    def _refuse(self, query_id: int, error: BaseException) -> None:
        cause = EvaluationError(f"a replica refused a batch: {_cause(error)}")
        self._ready.append(Completion(query_id, error=cause))

    def _finished(self, query_id: int, number: int | None = None) -> bool:
        """Forget a query or group; return whether that replica was computing it."""
        return self._router.finished(query_id, number) or self._populations.finished(
            query_id, number
        )

    def _in_flight(self, number: int) -> int:
        return self._router.in_flight(number) + self._populations.in_flight(number)

    def _begin(self, event: Attached) -> None:
        link = event.link
        loaded, wanted = (event.adapters, event.prefixes), (self._adapters, self._prefixes)
        if not link.is_dead and link.session is None and loaded == wanted:
            number = next(self._numbers)
            link.begin(event.session, number, event.description)
            self._by_number[number] = link
            self._router.add(number)
        # Else the monitor attaches it again, with the current adapters and prefixes.
        link.attached = link.attach_since_s = None

    def _lose(self, link: ReplicaLink, error: BaseException) -> None:
        """Assign the queries of a replica to the others, and attach it again when it answers.

        A private replica that hangs is restarted. A served one supervises itself, because other
        programs use it.
        """
        number = link.number
        if number is None:
            return
        logger.warning("lost replica %d: %s", link.index, _shown(error))
        del self._by_number[number]
        self._router.reassign_from(number)
        self._populations.reassign_from(number)
        if isinstance(error, TimeoutError) and self._is_private:
            serving.kill(link.actor, restart=True)
        else:  # it may still compute queries that others now have
            link.detach()
        link.end(error)
        self._wake_monitor.set()

    def _mark_dead(self, link: ReplicaLink, error: BaseException) -> None:
        """Give up a replica that cannot return."""
        if link.is_dead:
            return
        self._lose(link, error)
        link.is_dead = True
        if not all(each.is_dead for each in self._links):
            return
        cause = _cause(error)
        self._died = EngineDiedError(
            f"all {len(self._links)} replicas have ended; the last one: {_shown(cause)}"
        )
        self._died.__cause__ = link.lost_by or cause

    # -- sending ----------------------------------------------------------------------

    def _send(self) -> None:
        """Assign the submitted queries, and send each replica what it has room for."""
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self._router.assign(submitted)
            self._forget()
        free = {n: link for n, link in self._by_number.items() if link.calls < self._most_calls}
        groups = self._populations.take({n: link.dropped for n, link in free.items()})
        for number, link in free.items():
            own = groups.get(number, [])
            while link.calls < self._most_calls:
                room = link.pending_queries - self._in_flight(number)
                most = min(self._max_rows, room)
                routed = self._router.take(number, most) if most > 0 else []
                if not (routed or own or (not link.calls and self._in_flight(number))):
                    break
                link.send_queries(routed, own)
                own = []
                for each in routed:
                    if each.context.is_dropped:  # while it waited
                        self._forget_context(each.context)

    def _forget(self) -> None:
        """Tell replicas which sequences will not be referenced again."""
        for context in self._router.dropped():
            self._forget_context(context)

    def _forget_context(self, context: Context) -> None:
        for number in self._router.forget(context):
            self._by_number[number].forget(context.number)

    # -- the monitor's thread ---------------------------------------------------------

    def _watch(self) -> None:
        """Ping replicas; attach those that were started again.

        When the cluster is lost, all replicas are given up.
        """
        head = cluster.HeadProbe()
        try:
            while not self._closed.is_set():
                if head.is_lost:
                    error = ConnectionError("the head of the Ray cluster does not answer")
                    for link in self._links:
                        self._events.put(Dead(link, error))
                    return
                starting = any(
                    each.session is None and not each.is_dead for each in self._links
                )
                self._wake_monitor.wait(_RETRY_S if starting else _PING_S)
                self._wake_monitor.clear()
                for link in self._links:
                    link.send_oneway()
                    if not link.is_dead and not self._closed.is_set():
                        self._check_link(link)
        finally:
            head.close()

    def _check_link(self, link: ReplicaLink) -> None:
        now_s = time.monotonic()
        attached = link.attached  # read first: `_begin` sets the session before it clears this
        session = link.session or attached
        if session is None:
            if link.attach_since_s is None:
                link.attach(dict(self._adapters), list(self._prefixes))
            elif now_s - link.attach_since_s > self._load_timeout_s:
                late = TimeoutError(f"not loaded again in {self._load_timeout_s:g} s")
                self._events.put(Dead(link, late))
        elif link.ping_since_s is None:
            if now_s - link.pinged_s >= _PING_S:
                link.ping(session)
        elif now_s - link.ping_since_s > self._ping_timeout_s:
            link.ping_since_s = None
            late = TimeoutError(f"no answer to a ping for {self._ping_timeout_s:g} s")
            self._events.put(Lost(link, session, late))


def _session_ended() -> EngineError:
    return EngineError("the replica ended the session")


def _cause(error: BaseException) -> BaseException:
    """The error that a replica raised, without Ray's wrapper."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, BaseException) else error
    return error


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
