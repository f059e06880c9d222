"""`Driver`: the replicas of a `RayEngine`, on a separate event loop.

One task per replica attaches it, pings it, and attaches it again after it was lost. The state
of replicas and of unanswered queries is changed only on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ObjectStoreFullError,
    OutOfDiskError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup

from genlm import EngineDiedError, EngineError
from genlm.plugin import (
    Completion,
    EvaluationError,
    GroupQuery,
    ModelLoadError,
    PackedCompletions,
    SampledGroup,
    TokenSequence,
    describe_error,
)
from genlm_ray import cluster, serving
from genlm_ray.link import Configuration, ReplicaLink
from genlm_ray.router import RoutedQuery, Router
from genlm_ray.wire import (
    TRANSPORT,
    AnyQuery,
    PlacedGeneration,
    pack_queries,
    place_sample,
)

logger = logging.getLogger("genlm.ray")

_PING_S = 1.0
"""Interval between pings of a replica. Pings also show the replica that its driver is alive."""

_MAX_CALLS = 8
"""Maximum number of unanswered messages to a replica."""


class Driver:
    """Sends queries to replicas and receives their completions.

    Args:
        actors: The actors of the replicas.
        groups: Reservations of private replicas, which are restarted when they hang; empty for
            served replicas.
        router: Assigns queries to replicas.
        on_finished: Function that receives completions on the event loop, and an empty list
            when all replicas have ended.
        ping_timeout_s: Time without a response after which a replica is considered lost.
        load_timeout_s: Maximum time for loading a replica.
        max_in_flight: Maximum number of concurrent queries in a replica.

    Attributes:
        links: The replicas.
        configuration: Adapters and prefixes that all replicas have.
        died: The error of later requests when all replicas have ended.
        is_head_lost: Whether the cluster does not respond, so that calls of Ray would block.
    """

    is_head_lost = False

    def __init__(
        self,
        actors: Sequence[Any],
        groups: Sequence[PlacementGroup],
        router: Router,
        on_finished: Callable[[list[Completion]], None],
        *,
        ping_timeout_s: float,
        load_timeout_s: float,
        max_in_flight: int,
    ) -> None:
        self.links = [ReplicaLink(index, actor) for index, actor in enumerate(actors)]
        self.router = router
        self.died: EngineDiedError | None = None
        self.configuration = Configuration({}, [])
        self._on_finished = on_finished
        self._groups = groups
        self._ping_timeout_s, self._load_timeout_s = ping_timeout_s, load_timeout_s
        self._max_in_flight = max_in_flight
        self._name = uuid.uuid4().hex[:8]
        self._up: dict[int, ReplicaLink] = {}  # by session
        self._tasks: list[asyncio.Task[None]] = []
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._has_changed = asyncio.Event()  # set when a replica is up, or all have ended
        self._thread = threading.Thread(target=self._serve, name="genlm-ray", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._runner:  # cancels the tasks at the end
            self._loop.run_forever()

    # -- any thread -------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def schedule(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the event loop, in the order of scheduling."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def sessions(self) -> frozenset[int]:
        """Return the sessions of the replicas that are up."""
        return frozenset(self._up)

    def close(self) -> None:
        """End private replicas and detach from served replicas, unless the cluster is lost."""
        if self._loop.is_closed():
            return
        for link in self.links:
            if self.is_head_lost or not ray.is_initialized():
                break
            if self._groups:
                serving.kill(link.actor)
            elif link.session:
                link.actor.detach.remote(link.session)
        if ray.is_initialized() and not self.is_head_lost:
            self.schedule(cluster.remove, self._groups)
        self.schedule(self._loop.stop)
        self._thread.join(cluster.LEAVE_TIMEOUT_S)  # a call of Ray may hang

    # -- queries ----------------------------------------------------------------------

    def submit(self, queries: Sequence[AnyQuery]) -> None:
        """Accept queries."""
        self.router.submit(queries)
        self._send()

    def abort(self, query_id: int) -> None:
        """Drop a query, also in its replica."""
        routed = self.router.finish(query_id)
        link = None if routed is None else self._up.get(routed.replica)
        if link is not None:
            link.dropped.append(query_id)
            self._send(link)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Make the replicas release a context."""
        context = self.router.release(adapter, key)
        if context is not None and context.sequence is not None:
            for session in context.replicas:
                if session in self._up:
                    self._up[session].released.append((adapter, context.sequence))

    def _send(self, aborting: ReplicaLink | None = None) -> None:
        """Send queries to the replicas that can accept them, and aborts to one of them."""
        free = [link for link in self._up.values() if link.calls < _MAX_CALLS]
        in_flight = self.router.in_flight
        taken = self.router.take(
            {
                link.session: min(self._max_in_flight, link.pending_queries)
                - in_flight[link.session]
                for link in free
            }
        )
        for link in free:
            routed = taken.get(link.session, [])
            if routed or link is aborting or (not link.calls and in_flight[link.session]):
                self._exchange(link, routed)

    def _exchange(self, link: ReplicaLink, routed: list[RoutedQuery]) -> None:
        """Send queries, or none, and receive completions."""
        session = link.session
        link.calls += 1
        try:
            request = link.pack_request(routed, self.router.turn)
            try:
                call = link.call("exchange", session, request)
            except (ObjectStoreFullError, OutOfDiskError) as error:  # Ray has retried
                self._send_separately(link, routed, error)
                routed = []
                request.queries, request.groups = pack_queries(()), []
                call = link.call("exchange", session, request)
        except Exception as error:  # noqa: BLE001 - Ray was shut down or refuses the call
            link.mark_lost(error)
            return
        call.add_done_callback(functools.partial(self._receive, link, session, routed))

    def _send_separately(
        self, link: ReplicaLink, routed: list[RoutedQuery], error: RayError
    ) -> None:
        """Send queries that Ray cannot store in one message; fail a single one."""
        if len(routed) > 1:
            for item in routed:
                self._exchange(link, [item])
            return
        refusal = EvaluationError(
            f"a query cannot be sent to a replica, because Ray's object store is full. "
            f"`ray memory` lists its objects. Delete some, or start Ray with a larger "
            f"object_store_memory. {describe_error(error)}"
        )
        self._finish(link, [Completion(item.query.query_id, error=refusal) for item in routed])

    def _receive(
        self,
        link: ReplicaLink,
        session: int,
        routed: list[RoutedQuery],
        call: asyncio.Future[tuple[PackedCompletions, dict[str, Any]] | None],
    ) -> None:
        if call.cancelled():
            return
        call.exception()  # otherwise asyncio logs it
        if session != link.session:
            return  # the queries were reassigned
        link.calls -= 1
        finished: list[Completion] = []
        try:
            response = call.result()
            if response is None:
                raise EngineError("the replica ended the session")
            packed, link.engine_statistics = response
            finished = TRANSPORT.unpack_completions(packed)
            in_flight = self.router.in_flight[session]
            if not (finished or link.calls) and in_flight:  # all messages were answered
                raise EngineError("the replica has lost queries of the session")
        except RayTaskError as error:  # only this message failed
            cause = EvaluationError(f"a replica refused a batch: {error.cause}")
            finished = [Completion(item.query.query_id, error=cause) for item in routed]
        except Exception as error:  # noqa: BLE001 - the queries are sent again
            link.mark_lost(error)
        self._finish(link, finished)
        self._send()

    def _finish(self, link: ReplicaLink, completions: Sequence[Completion]) -> None:
        """Pass on the completions of queries that no other replica has."""
        finished = [self._complete(completion, link) for completion in completions]
        self._on_finished([completion for completion in finished if completion is not None])

    def _complete(self, completion: Completion, link: ReplicaLink) -> Completion | None:
        """Remove a query and return its completion, None if it was aborted or reassigned."""
        query_id, result = completion.query_id, completion.result
        routed = self.router.finish(query_id, link.session)
        if routed is None:
            link.dropped += (query_id, ~query_id)  # generations of an aborted query
            return None
        group = routed.query
        if isinstance(group, GroupQuery):
            # Its deletion drops what failed or was sent twice.
            state = PlacedGeneration(link.session, query_id, link.dropped)
            if group.generation.state is None and completion.error is None:
                group.generation.keep(state)
            if isinstance(result, SampledGroup):
                sampled = PlacedGeneration(link.session, ~query_id, link.dropped)
                return completion._replace(result=place_sample(group, result, sampled))
        return completion

    # -- adapters and prefixes --------------------------------------------------------

    async def configure(self, configuration: Configuration) -> None:
        """Make all replicas load these adapters and prefixes, and free others.

        A lost replica loads them when it is attached again.

        Raises:
            Exception: The first error of a replica; the previous configuration is restored.
            EngineDiedError: No replica is left.
        """
        try:
            await self._configure_all(configuration)
        except Exception:
            with contextlib.suppress(Exception):
                await self._configure_all(self.configuration)
            raise
        self.configuration = configuration
        for token_ids, adapter in configuration.prefixes:
            self.router.computed_everywhere(adapter, TokenSequence.of(token_ids))

    async def _configure_all(self, configuration: Configuration) -> None:
        while True:
            self.raise_if_dead()
            live = [link for link in self._up.values() if not link.lost.done()]
            stale = [link for link in live if link.configuration is not configuration]
            if live and not stale:
                return
            if not live:
                self._has_changed.clear()
                await self._has_changed.wait()
                continue
            calls = [self._configure(link, configuration) for link in stale]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                if error is not None:
                    raise error

    async def _configure(self, link: ReplicaLink, configuration: Configuration) -> None:
        """Configure a replica and raise the engine's error; stop if the replica is lost."""
        call = asyncio.ensure_future(link.call("configure", link.session, *configuration))
        await asyncio.wait([call, link.lost], return_when=asyncio.FIRST_COMPLETED)
        if link.lost.done():
            call.cancel()
        elif isinstance(error := call.exception(), RayTaskError):
            raise error.cause
        elif error is not None or call.result() is False:
            link.mark_lost(error or EngineError("the replica ended the session"))
        else:
            link.configuration = configuration

    # -- replicas ---------------------------------------------------------------------

    def raise_if_dead(self) -> None:
        """Raise a new `EngineDiedError` if all replicas have ended."""
        if self.died is not None:
            raise EngineDiedError(*self.died.args) from self.died.__cause__

    async def start(self) -> dict[str, Any]:
        """Attach the loaded replicas and return the description of one of them.

        Raises:
            GenlmError: A replica refuses this program, or has ended, or does not respond.
        """
        descriptions = await asyncio.gather(*map(self._attach, self.links))
        self._tasks = [asyncio.create_task(self._keep_attached(link)) for link in self.links]
        self._tasks.append(asyncio.create_task(self._watch_head()))
        return descriptions[0]

    async def _attach(self, link: ReplicaLink) -> dict[str, Any]:
        """Begin a session with the current configuration when the replica is up.

        A configuration that the replicas are loading is current when all have loaded it.
        """
        try:
            async with asyncio.timeout(self._load_timeout_s):
                while True:
                    session, configuration = uuid.uuid4().int, self.configuration
                    description: dict[str, Any] = await link.call(
                        "attach", self._name, session, *configuration
                    )
                    if configuration is self.configuration:
                        break
        except RayTaskError as error:
            raise error.cause from None
        except TimeoutError as error:
            raise ModelLoadError(
                f"a replica did not accept this program within {self._load_timeout_s:g} s; "
                f"increase load_timeout_s="
            ) from error
        except RayError as error:
            raise ModelLoadError(
                f"a replica has ended and is not restarted: {describe_error(error)}"
            ) from error
        link.begin(session, configuration, description)
        self._up[session] = link
        self.router.add(session)
        self._has_changed.set()
        self._send()
        return description

    async def _keep_attached(self, link: ReplicaLink) -> None:
        """Attach a replica again each time it is lost, until it cannot be restarted."""
        try:
            while True:
                self._handle_loss(link, await self._until_lost(link))
                await self._attach(link)
        except Exception as error:  # noqa: BLE001 - Ray cannot restart it
            self._mark_dead(link, error)

    async def _until_lost(self, link: ReplicaLink) -> BaseException:
        """Ping a replica until its session is lost; return the reason."""
        while not link.lost.done():
            ping = asyncio.ensure_future(
                link.call("notify", link.session, link.pack_request([], self.router.turn))
            )
            await asyncio.wait(
                [ping, link.lost],
                timeout=self._ping_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not ping.done():
                ping.cancel()
                silence_s = self._ping_timeout_s
                link.mark_lost(TimeoutError(f"no answer to a ping for {silence_s:g} s"))
            elif (error := ping.exception()) is not None:
                link.mark_lost(error)
            else:
                await asyncio.wait([link.lost], timeout=_PING_S)
        return link.lost.result()

    def _handle_loss(self, link: ReplicaLink, error: BaseException) -> None:
        """Reassign the queries of a lost replica.

        A private replica that hangs is restarted. A served replica supervises itself, because
        other programs use it.
        """
        logger.warning("lost replica %d: %s", link.index, describe_error(error))
        del self._up[link.session]
        self.router.reassign_from(link.session)
        if isinstance(error, TimeoutError) and self._groups:
            serving.kill(link.actor, restart=True)
        else:  # it may still compute queries that were reassigned
            with contextlib.suppress(Exception):
                call = link.call("detach", link.session)
                call.add_done_callback(lambda call: call.cancelled() or call.exception())
        link.end()
        self._send()

    def _mark_dead(self, link: ReplicaLink, error: BaseException) -> None:
        """Mark a replica that cannot be restarted as dead."""
        link.is_dead = True
        if link.session:
            link.mark_lost(error)  # a configuration may wait for the replica
            self._handle_loss(link, error)
        if not all(link.is_dead for link in self.links) or self.died is not None:
            return
        self.died = EngineDiedError(
            f"all {len(self.links)} replicas have ended; the last one: {describe_error(error)}"
        )
        self.died.__cause__ = error
        self._has_changed.set()
        self._on_finished([])

    async def _watch_head(self) -> None:
        """Mark all replicas as dead when the cluster is lost."""
        await cluster.until_head_is_lost()
        self.is_head_lost = True
        for task in self._tasks[:-1]:
            task.cancel()
        for link in self.links:
            error = ConnectionError("the head of the Ray cluster does not answer")
            self._mark_dead(link, error)
