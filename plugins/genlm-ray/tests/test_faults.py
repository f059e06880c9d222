"""Replicas that die or hang: every request is completed exactly once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import pickle
import queue
import signal
import threading
import time
import types
from dataclasses import dataclass

import pytest
import ray
import torch

import genlm
from genlm import AdapterError, EngineDiedError, ModelLoadError
from genlm_ray import cluster, replica, serving
from genlm_ray.engine import RayEngine
from genlm_ray.link import ReplicaLink
from genlm_ray.replica import Replica
from genlm_ray.wire import TRANSPORT, ReplicaRequest, pack_queries

PROMPTS = [[first, second, 32] for first in range(20) for second in range(15)]


@pytest.fixture
def poet(tmp_path):
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "text.txt").write_text("roses are red\n\nviolets are blue\n")
    return str(folder)


async def _until_pending(llm, count):
    while llm.statistics().pending < count:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


def _interrupt(llm, prompts, act):
    """Request rows while the replicas' processes are stopped, call `act`, return the rows."""

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs(ids)) for ids in prompts]
        await _until_pending(llm, len(prompts))
        act()
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    return torch.stack(asyncio.run(main()))


def test_what_a_killed_replica_had_is_asked_again(pair, pids, reference, poet, tmp_path):
    llm = pair
    llm.load_lora(poet, "poet")
    before, earlier = pids(llm), llm.statistics()
    for pid in before:  # otherwise all requests complete before a replica is killed
        os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        os.kill(before[0], signal.SIGKILL)
        os.kill(before[1], signal.SIGCONT)

    rows = _interrupt(llm, PROMPTS, kill)
    torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(PROMPTS))
    counted = llm.statistics()
    assert counted.answered - earlier.answered == len(PROMPTS)
    assert counted.failed == earlier.failed
    # The new replica has the adapter: it is used once the other one has been killed.
    while llm.statistics().engine["replica 0: state"] != "up":
        llm.next_token_logprobs_sync([1, 2])  # the engine's thread checks it between steps
        time.sleep(0.05)
    assert pids(llm)[0] != before[0]
    os.kill(before[1], signal.SIGKILL)
    reference.load_lora(poet, "poet")
    for ids in PROMPTS[:3]:
        torch.testing.assert_close(
            llm.next_token_logprobs_sync(ids, lora_name="poet"),
            reference.next_token_logprobs_sync(ids, lora_name="poet"),
        )
    with pytest.raises(AdapterError):
        llm.load_lora(str(tmp_path / "nothing"), "nobody")
    torch.testing.assert_close(  # the other adapters are unchanged
        llm.next_token_logprobs_sync(PROMPTS[0], lora_name="poet"),
        reference.next_token_logprobs_sync(PROMPTS[0], lora_name="poet"),
    )
    llm.unload_lora("poet")
    reference.unload_lora("poet")


class Actor:
    """The methods of an actor that a link uses, for a replica in this process.

    Attributes:
        calls: Called methods and their arguments.
        held: Methods that do not respond until the actor is restarted.
    """

    def __init__(self, spec) -> None:
        self.spec, self.calls, self.held = spec, [], set()
        self.lock, self.has_ended = threading.Lock(), False
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, daemon=True).start()
        self.restart()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(asyncio.sleep(0))  # starts the last calls
        self.loop.close()

    def end(self) -> None:
        """Stop the loop; later calls never complete."""
        with self.lock:
            self.has_ended = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def restart(self) -> None:
        self.held = set()
        self.replica = Replica(self.spec)

    def run(self, coroutine):
        with self.lock:
            if not self.has_ended:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        return concurrent.futures.Future()

    def __getattr__(self, method):
        def remote(*arguments):
            self.calls.append((method, arguments))
            answer = self.run(self._answer(method, arguments))
            return types.SimpleNamespace(future=lambda: answer)

        return types.SimpleNamespace(remote=remote)

    async def _answer(self, method, arguments):
        if method in self.held:
            await asyncio.Event().wait()
        try:
            return await getattr(self.replica, method)(*arguments)
        except Exception as error:
            raise ray.exceptions.RayTaskError(
                method, "", error
            ).as_instanceof_cause() from error


@pytest.fixture
def in_process(monkeypatch, load):
    """Function that loads replicas in this process and returns model, engine and actors."""
    actors = []

    def started(spec, *_):
        actors.append(Actor(spec))
        return actors[-1]

    def kill(actor, *, restart=False):
        actor.replica._shared.close()
        if restart:
            actor.restart()
        else:
            actor.end()

    monkeypatch.setattr(cluster, "reserve_resources", lambda _, count, **__: range(count))
    monkeypatch.setattr(cluster, "remove", lambda _: None)
    monkeypatch.setattr(cluster, "start_replica", started)
    monkeypatch.setattr(serving, "wait_until_loaded", lambda *_, **__: None)
    monkeypatch.setattr(serving, "kill", kill)
    monkeypatch.setattr(replica, "_exit", lambda _: None)

    def load_in_process(**options):
        llm = load(**options)
        return llm, llm._scheduler.engine, actors

    return load_in_process


def _ended(function, *arguments):
    """Call a function on a thread, with a timeout; return its result or exception."""
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - returned
            ended.put(error)

    threading.Thread(target=run, daemon=True).start()
    return ended.get(timeout=60)


@dataclass(frozen=True)
class Locked(genlm.Reduction):
    what: object

    @classmethod
    def compute(cls, rows, requests):
        return [0.0] * len(requests)


def test_a_reduction_that_cannot_be_sent_costs_no_other_request(in_process):
    llm, engine, _ = in_process(replicas=1)
    locked = Locked(threading.Lock())

    async def request(i):
        requests = llm.next_token_logprobs([i, 1]), llm.reduce([i, 2], locked)
        row, error = await asyncio.gather(*requests, return_exceptions=True)
        assert torch.is_tensor(row)
        assert isinstance(error, genlm.EvaluationError)
        assert "Locked" in str(error)
        assert torch.is_tensor(await llm.next_token_logprobs([i, 1, 5]))

    for i in range(10):  # more than the maximum number of unanswered messages
        asyncio.run(asyncio.wait_for(request(i), 60))
    assert engine.driver.links[0].calls == 0


@pytest.mark.parametrize("what", ["ObjectStoreFullError", "OutOfDiskError"])
def test_a_query_for_which_the_object_store_is_full_costs_no_other_request(
    in_process, reference, monkeypatch, what
):
    llm, engine, _ = in_process(replicas=1)
    call, refused = ReplicaLink.call, []

    def call_with_room_for_short_queries(link, method, *arguments):
        queries = arguments[1].queries if method == "exchange" else pack_queries([])
        if len(pickle.dumps(queries)) > 20_000:
            refused.append(len(queries.query_ids))
            raise getattr(ray.exceptions, what)("full")
        return call(link, method, *arguments)

    monkeypatch.setattr(ReplicaLink, "call", call_with_room_for_short_queries)

    async def request():
        texts = [1, 2], [3] * 10_000, [4, 5]
        requests = map(llm.next_token_logprobs, texts)
        return await asyncio.gather(*requests, return_exceptions=True)

    first, error, last = asyncio.run(asyncio.wait_for(request(), 60))
    torch.testing.assert_close(first, reference.next_token_logprobs_sync([1, 2]))
    torch.testing.assert_close(last, reference.next_token_logprobs_sync([4, 5]))
    assert isinstance(error, genlm.EvaluationError)
    assert "object store is full. `ray memory` lists its objects" in str(error)
    assert f"{what}: full" in str(error)
    assert refused == [3, 1]
    assert torch.is_tensor(llm.next_token_logprobs_sync([6, 7]))
    assert engine.statistics()["replica 0: restarts"] == engine.driver.links[0].calls == 0


def test_replicas_that_end_while_nothing_is_asked_end_the_next_request(in_process):
    llm, engine, _ = in_process(replicas=1)
    llm.next_token_logprobs_sync([1, 2])
    driver = engine.driver
    driver.schedule(driver._mark_dead, driver.links[0], ConnectionError("gone"))
    error = _ended(llm.next_token_logprobs_sync, [1, 3])
    assert isinstance(error, EngineDiedError)
    errors = []
    for _ in range(2):  # each caller gets a new error
        with pytest.raises(EngineDiedError, match="replicas have ended") as raised:
            engine.step()
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert isinstance(errors[1].__cause__, ConnectionError)


def test_a_model_of_a_lost_cluster_is_closed_without_calls_of_ray(in_process, monkeypatch):
    """The calls would block until Ray ends this process."""
    calls, lost = [], threading.Event()

    async def until_head_is_lost():
        await asyncio.to_thread(lost.wait)

    monkeypatch.setattr(cluster, "until_head_is_lost", until_head_is_lost)
    llm, engine, actors = in_process(replicas=1)
    kill = serving.kill
    monkeypatch.setattr(serving, "kill", calls.append)
    monkeypatch.setattr(cluster, "remove", calls.append)
    lost.set()
    while engine.driver.died is None:
        time.sleep(0.01)
    assert isinstance(_ended(llm.next_token_logprobs_sync, [1, 2]), EngineDiedError)
    llm.close()
    assert calls == []
    for actor in actors:
        kill(actor)


def test_loading_an_adapter_ends_with_the_cluster(in_process, monkeypatch, poet):
    lost = threading.Event()

    async def until_head_is_lost():
        await asyncio.to_thread(lost.wait)

    monkeypatch.setattr(cluster, "until_head_is_lost", until_head_is_lost)
    llm, _, [actor] = in_process(replicas=1)
    actor.held.add("configure")
    add_adapter = llm.engine.add_adapter

    def add_to_lost_cluster(*arguments):
        lost.set()
        add_adapter(*arguments)

    monkeypatch.setattr(llm.engine, "add_adapter", add_to_lost_cluster)
    assert isinstance(_ended(llm.load_lora, poet, "poet"), EngineDiedError)


def test_closing_does_not_wait_for_a_head_that_is_not_yet_known_to_be_lost(
    in_process, monkeypatch
):
    answers = threading.Event()
    monkeypatch.setattr(cluster, "LEAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cluster, "remove", lambda _: answers.wait())
    llm, engine, _ = in_process(replicas=1)
    assert _ended(llm.close) is None
    answers.set()
    engine.driver._thread.join(60)


def _hang(driver, monkeypatch, hang):
    """Make the first replica hang, and reduce the timeout of pings until it is lost.

    With the timeout of the whole test, a replica that waits for a core would be lost too.
    """
    [first, *_] = driver.links
    handle_loss, timeout_s = driver._handle_loss, driver._ping_timeout_s

    def handle(link, error):
        if link is first:
            driver._ping_timeout_s = timeout_s
        handle_loss(link, error)

    monkeypatch.setattr(driver, "_handle_loss", handle)
    hang()
    driver._ping_timeout_s = 0.5


@pytest.mark.parametrize("what", ["it hangs", "its session has ended"])
def test_an_adapter_is_added_although_a_replica_is_lost(
    in_process, poet, reference, monkeypatch, what
):
    llm, engine, [actor] = in_process(replicas=1)
    if what == "it hangs":
        _hang(engine.driver, monkeypatch, lambda: actor.held.update(["configure", "notify"]))
    else:
        actor.run(actor.replica.detach(engine.driver.links[0].session)).result(60)
    assert _ended(llm.load_lora, poet, "poet") is None
    reference.load_lora(poet, what)
    torch.testing.assert_close(
        llm.next_token_logprobs_sync([1, 2], lora_name="poet"),
        reference.next_token_logprobs_sync([1, 2], lora_name=what),
    )
    assert engine.statistics()["replica 0: restarts"] == 1


def test_prefixes_that_change_while_a_replica_returns_are_loaded_there(in_process):
    llm, engine, actors = in_process(replicas=2)
    link = engine.driver.links[0]
    may_attach = threading.Event()
    begin = Replica.attach

    async def attach(self, driver, session, adapters, prefixes):
        seen.append(prefixes)
        if len(seen) == 1:
            assert await asyncio.to_thread(may_attach.wait, 60)
        return await begin(self, driver, session, adapters, prefixes)

    async def configure(session, adapters, prefixes):
        return True

    seen = []
    actors[0].replica.attach = types.MethodType(attach, actors[0].replica)
    for actor in actors:  # the engine has no prefixes
        actor.replica.configure = configure
    engine.driver.schedule(link.mark_lost, ConnectionError("gone"))
    while not seen:
        time.sleep(0.01)
    for _ in range(2):  # the other has it
        llm._scheduler.run(lambda engine: engine.cache_prefix([1, 2, 3], None))
    may_attach.set()
    while not link.session:
        time.sleep(0.01)
    assert seen == [[], [((1, 2, 3), None)]]


def test_an_adapter_that_cannot_be_loaded_ends_no_replica_that_returns_meanwhile(
    in_process, monkeypatch, tmp_path, reference
):
    """A replica that returns has the adapters that the others have loaded."""
    llm, engine, actors = in_process(replicas=2)
    [link, _] = engine.driver.links
    returns, has_begun, may_fail = (threading.Event() for _ in range(3))
    attach, configure = (
        getattr(actor.replica, name)
        for actor, name in zip(actors, ("attach", "configure"), strict=True)
    )

    async def attach_later(*arguments):  # Ray starts it
        assert await asyncio.to_thread(returns.wait, 60)
        return await attach(*arguments)

    async def configure_slowly(*arguments):
        has_begun.set()
        assert await asyncio.to_thread(may_fail.wait, 60)
        return await configure(*arguments)

    actors[0].replica.attach = attach_later
    actors[1].replica.configure = configure_slowly
    engine.driver.schedule(link.mark_lost, ConnectionError("gone"))
    while link.session:
        time.sleep(0.01)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        loaded = pool.submit(llm.load_lora, str(tmp_path / "nothing"), "nobody")
        assert has_begun.wait(60)
        returns.set()
        while not link.session and not link.is_dead:
            time.sleep(0.01)
        may_fail.set()
        assert isinstance(loaded.exception(60), AdapterError)
    assert not link.is_dead
    rows = llm.batch_next_token_logprobs_sync(PROMPTS)
    torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(PROMPTS))


def test_what_a_replica_raises_when_it_returns_is_in_the_error(in_process):
    llm, engine, [actor] = in_process(replicas=1)
    [link] = engine.driver.links

    async def attach(*_):
        raise TimeoutError("the hub did not respond")

    actor.replica.attach = attach
    engine.driver.schedule(link.mark_lost, ConnectionError("gone"))
    error = _ended(llm.next_token_logprobs_sync, [1, 2])
    assert isinstance(error, EngineDiedError)
    assert "the hub did not respond" in str(error)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (True, "a replica has ended and is not restarted: ActorDiedError"),
        (False, "a replica did not accept this program within 0.5 s"),
    ],
)
def test_a_replica_that_ends_or_hangs_before_it_is_used_is_an_error(
    in_process, monkeypatch, ends, message
):
    async def attach(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(Replica, "attach", attach)
    if ends:

        async def answer(*_):
            raise ray.exceptions.ActorDiedError

        monkeypatch.setattr(Actor, "_answer", answer)
    options = {"engine": "reference", "replicas": 1, "load_timeout_s": 0.5}
    error = _ended(lambda: in_process(**options))
    assert isinstance(error, ModelLoadError)
    assert message in str(error)


def test_a_session_whose_replica_has_lost_queries_begins_again(in_process, reference):
    llm, engine, [actor] = in_process(replicas=1)
    [session] = actor.replica._sessions.values()
    accept = session.accept

    def lose(message):
        session.accept = accept

    session.accept = lose
    row = _ended(llm.next_token_logprobs_sync, [1, 2])
    torch.testing.assert_close(row, reference.next_token_logprobs_sync([1, 2]))
    assert engine.statistics()["replica 0: restarts"] == 1


def test_results_that_cannot_be_unpacked_are_computed_again(in_process, reference, monkeypatch):
    llm, engine, _ = in_process(replicas=1)
    failures = [MemoryError()]
    unpack = TRANSPORT.unpack_completions

    def unpack_later(packed):
        if failures:
            raise failures.pop()
        return unpack(packed)

    monkeypatch.setattr(TRANSPORT, "unpack_completions", unpack_later)
    row = _ended(llm.next_token_logprobs_sync, [1, 2])
    torch.testing.assert_close(row, reference.next_token_logprobs_sync([1, 2]))
    assert engine.statistics()["replica 0: restarts"] == 1


def test_aborts_and_drops_that_are_lost_cost_no_request(in_process, reference):
    llm, engine, [actor] = in_process(replicas=1)

    async def refuse(session, message):
        raise RuntimeError("lost")

    def abort():
        [link] = engine.driver.links
        link.dropped.append(10**6)
        engine.driver._send(link)

    actor.replica.exchange, exchange = refuse, actor.replica.exchange
    engine.driver.schedule(abort)
    while not any(method == "exchange" for method, _ in actor.calls):
        time.sleep(0.01)
    actor.replica.exchange = exchange
    row = _ended(llm.next_token_logprobs_sync, [1, 2])
    torch.testing.assert_close(row, reference.next_token_logprobs_sync([1, 2]))
    assert engine.statistics()["replica 0: restarts"] == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("max_in_flight", 0), ("max_in_flight", math.nan), ("ping_timeout_s", 0)],
        *[("max_in_flight", "3"), ("ping_timeout_s", "3")],
        *[("step_timeout_s", 0), ("load_timeout_s", -3), ("load_timeout_s", math.inf)],
    ],
)
def test_numbers_out_of_range_are_refused_before_replicas_start(option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        RayEngine("demo", engine="reference", **{option: value})


def test_a_message_that_fails_does_not_hold_up_the_next(pair, reference):
    for link in pair.engine.driver.links:
        broken = ReplicaRequest(pack_queries([])._replace(query_ids=[1]))
        with pytest.raises(ray.exceptions.RayTaskError):
            ray.get(link.actor.exchange.remote(link.session, broken), timeout=60)
    rows = _rows_in_time(pair, PROMPTS)
    torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(PROMPTS))


def test_a_replica_returns_while_nothing_is_asked(pair, pids, reference):
    link = pair.engine.driver.links[0]
    pair.batch_next_token_logprobs_sync(PROMPTS)
    figures = pair.statistics().engine
    both = [figures[f"replica {i}: tokens_computed"] for i in range(2)]
    assert figures["tokens_computed"] == sum(both)
    assert min(both) > 0
    first, restarts = link.session, link.restarts
    os.kill(pids(pair)[0], signal.SIGKILL)
    while link.session in {first, 0}:
        time.sleep(0.05)
    second = link.session
    # The tokens of the ended process count.
    assert pair.statistics().engine["tokens_computed"] == sum(both)
    torch.testing.assert_close(
        pair.batch_next_token_logprobs_sync(PROMPTS),
        reference.batch_next_token_logprobs_sync(PROMPTS),
    )
    assert link.session == second
    assert link.restarts == restarts + 1


def test_a_replica_that_hangs_is_replaced(pair, pids, reference, monkeypatch):
    link, before = pair.engine.driver.links[0], pids(pair)
    restarts = link.restarts
    _hang(pair.engine.driver, monkeypatch, lambda: os.kill(before[0], signal.SIGSTOP))
    rows = _rows_in_time(pair, PROMPTS)
    torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(PROMPTS))
    while pair.statistics().engine["replica 0: state"] != "up":
        pair.next_token_logprobs_sync([1, 2])
        time.sleep(0.05)
    assert pids(pair)[0] != before[0]
    assert link.restarts == restarts + 1


def _rows_in_time(llm, prompts):
    async def main():
        return await asyncio.wait_for(llm.batch_next_token_logprobs(prompts), 120)

    return asyncio.run(main())


def test_when_no_replica_can_return_every_request_gets_the_cause(load, pids):
    llm = load(replicas=2, max_restarts=0)
    before = pids(llm)
    for pid in before:
        os.kill(pid, signal.SIGSTOP)

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs(ids)) for ids in PROMPTS[:9]]
        await _until_pending(llm, 9)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)

    errors = asyncio.run(main())
    assert {type(error) for error in errors} == {EngineDiedError}
    assert all("all 2 replicas have ended" in str(error) for error in errors)
    assert all(error.__cause__ is not None for error in errors)
    with pytest.raises(EngineDiedError, match="all 2 replicas"):
        llm.next_token_logprobs_sync([1, 2, 3])
    llm.close()
