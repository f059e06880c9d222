"""Served models: several programs at once, clear errors, `genlm serve`."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import ray
import torch
from typer.testing import CliRunner

import genlm
from genlm import AdapterError, ModelLoadError
from genlm.cli import app
from genlm.plugin import Query
from genlm.testing import TinyModel
from genlm_ray import cluster, replica, serving
from genlm_ray.conformance import RESOURCES
from genlm_ray.spec import ReplicaSpec, ServingLimits, compared_versions, versions
from genlm_ray.wire import ReplicaRequest, pack_queries

DRIVER = """
import asyncio, os, signal, sys
import genlm

def largest(rows):  # replicas do not have this module
    return rows.amax(1)

async def main():
    with genlm.load_model("chat", "ray", address=sys.argv[1]) as llm:
        tasks = [
            asyncio.create_task(llm.next_token_logprobs([i % 256, i // 256]))
            for i in range(600)
        ]
        print((await tasks[0]).tolist()[:3], flush=True)
        if len(sys.argv) > 2:  # with requests out
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert await llm.reduce([0, 0], largest) == tasks[0].result().max()

asyncio.run(main())
"""


@pytest.fixture
def by_value():
    """Makes replicas load this module's classes, which they cannot import."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def address(local_cluster):
    return ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def chat(address):
    command = [
        *("serve", "--name", "chat", "--backend", "reference", "--model", "demo"),
        *("--replicas", "2", "--resources", json.dumps(RESOURCES), "--address", address),
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    yield json.loads(result.stdout)
    serving.stop("chat")


def test_programs_attach_and_one_that_dies_leaves_nothing(chat, address, reference):
    assert [description["state"] for description in chat] == ["up", "up"]
    with genlm.load_model("chat", "ray", output_cache=genlm.OutputCache(0)) as llm:
        others = [
            subprocess.Popen(
                [sys.executable, "-c", DRIVER, address, *more],
                stdout=subprocess.PIPE, text=True,
            )
            for more in ([], ["killed"])
        ]  # fmt: skip
        expected = reference.next_token_logprobs_sync([0, 0]).tolist()[:3]
        prompts = [[i, 1, 2] for i in range(200)]
        rows = llm.batch_next_token_logprobs_sync(prompts)
        torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(prompts))
        for other in others:
            assert json.loads(other.communicate(timeout=240)[0]) == pytest.approx(expected)
        assert [other.returncode for other in others] == [0, -signal.SIGKILL]
        while sum(sum(item["drivers"].values()) for item in _replicas_of_chat(address)):
            time.sleep(0.05)
        descriptions = _replicas_of_chat(address)
        assert [item["replica"] for item in descriptions] == [0, 1]
        assert all(item["answered"] > 0 for item in descriptions)
        again = llm.batch_next_token_logprobs_sync(prompts)
        torch.testing.assert_close(again, rows)


def test_a_program_attaches_while_ray_restarts_a_replica(chat, address, reference):
    for item in _replicas_of_chat(address):
        os.kill(item["pid"], signal.SIGKILL)
    with genlm.load_model("chat", "ray") as llm:
        torch.testing.assert_close(
            llm.next_token_logprobs_sync([1, 2, 3]),
            reference.next_token_logprobs_sync([1, 2, 3]),
        )


def _replicas_of_chat(address):
    return [item for item in serving.served(address) if item["name"] == "chat"]


def test_a_client_detaches_from_shared_replicas_that_are_silent_and_restarts_nothing(
    chat, address, pids
):
    with genlm.load_model("chat", "ray", ping_timeout_s=1.0) as llm:
        before = pids(llm)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)

        async def main():
            request = asyncio.create_task(llm.next_token_logprobs([1, 2, 3]))
            figures = llm.statistics
            while not all(figures().engine[f"replica {i}: restarts"] for i in range(2)):
                await asyncio.sleep(0.05)
            for pid in before:
                os.kill(pid, signal.SIGCONT)
            return await request

        asyncio.run(asyncio.wait_for(main(), 120))
        while not all(link.session for link in llm.engine.driver.links):
            time.sleep(0.05)
        assert pids(llm) == before
    assert [item["pid"] for item in _replicas_of_chat(address)] == before


@pytest.mark.parametrize(
    "option", [{"step_timeout_s": 1.0}, {"max_restarts": 1}, {"place_timeout_s": 1.0}]
)
def test_a_client_does_not_set_when_a_shared_replica_is_restarted(chat, option):
    with pytest.raises(TypeError, match=f"{next(iter(option))}= for the served model 'chat'"):
        genlm.load_model("chat", "ray", **option)


@dataclass(frozen=True)
class Endless(genlm.Reduction):
    """A reduction that never returns."""

    @classmethod
    def compute(cls, rows, requests):
        threading.Event().wait()


def test_pings_are_answered_beside_the_long_polls_of_150_drivers(chat, by_value):
    actor = serving.actors_of("chat")[0]
    ray.get(actor.attach.remote("driver", 1, {}, []))
    endless = ReplicaRequest(pack_queries([Query(0, (1, 2), outputs=(Endless(),))]))
    # Calls start in any order, and a poll of a session without queries is answered at once.
    ray.get(actor.notify.remote(1, endless))
    polls = [actor.exchange.remote(1, ReplicaRequest()) for _ in range(150 * 8)]
    ray.get(actor.notify.remote(1, ReplicaRequest()), timeout=120)
    assert not ray.wait(polls, num_returns=1, timeout=0)[0]
    ray.get(actor.detach.remote(1))
    assert ray.get(polls) == [None] * len(polls)


class Hanging(replica.Replica):
    """A replica whose steps hang, with the GIL (`"PyDLL"`) or without it (`"CDLL"`)."""

    def __init__(self, spec, library):
        self.library = library
        super().__init__(spec)

    def _build(self):
        engine = super()._build()
        library = getattr(ctypes, self.library)(None)
        engine.step = lambda: library.sleep(10**6)
        return engine


def test_a_replica_whose_step_hangs_ends_its_own_process(address, by_value):
    spec = ReplicaSpec("reference", "demo", 60.0, step_timeout_s=1.0)
    actor = ray.remote(Hanging).options(num_cpus=0.1, max_concurrency=10)
    hanging = [actor.remote(spec, library) for library in ("CDLL", "PyDLL")]
    ray.get([each.attach.remote("driver", 1, {}, []) for each in hanging])
    queries = ReplicaRequest(pack_queries([Query(0, (1, 2))]))
    for each in hanging:
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(each.exchange.remote(1, queries), timeout=300)


class Crashing(replica.Replica):
    """A replica whose process ends while it loads the engine, when it is to describe it."""

    def _build(self):
        threading.Event().wait()

    async def _wait_until_loaded(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_replica_that_ends_while_it_is_loaded_is_an_error_and_not_restarted(
    address, by_value, monkeypatch
):
    monkeypatch.setattr(cluster, "ReplicaActor", ray.remote(Crashing))
    with pytest.raises(ModelLoadError, match="a replica could not start"):
        serving.serve("crash", "demo", "reference", resources=RESOURCES, load_timeout_s=120)
    assert cluster.reservations("crash") == []


@dataclass(frozen=True)
class Largest(genlm.Reduction):
    """User-defined reduction of the rows of a text."""

    then: str = ""

    @classmethod
    def compute(cls, rows, requests):
        if requests[0].then == "exit":
            raise SystemExit(3)
        if requests[0].then == "wait":
            threading.Event().wait()
        return rows.amax(-1).tolist()


@pytest.fixture(scope="module")
def scoring(address, tmp_path_factory):
    """A served model of hf with small limits, and the same model in this process."""
    path = str(TinyModel(tmp_path_factory.mktemp("scoring") / "tiny").path)
    options = {"device": "cpu", "dtype": "float32"}
    serving.serve(
        "scoring", path, "hf", engine_opts=options, resources=RESOURCES,
        limits=ServingLimits(reduction_s=1.0, pending_queries=16),
    )  # fmt: skip
    with genlm.load_model(path, "hf", **options) as hf:
        yield hf
    serving.stop("scoring")


@pytest.fixture
def clients(scoring):
    """Two programs that use the served model."""
    with genlm.load_model("scoring", "ray") as one, genlm.load_model("scoring", "ray") as other:
        yield one, other


def test_a_clients_endless_reduction_does_not_hold_up_another_client(
    clients, scoring, by_value
):
    one, other = clients

    async def main():
        endless = asyncio.create_task(one.reduce([1, 2], Endless()))
        prompts = [[3, i] for i in range(100)]  # more than may be pending
        rows = await other.batch_next_token_logprobs(prompts)
        expected = scoring.batch_next_token_logprobs_sync(prompts)
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)
        with pytest.raises(genlm.EvaluationError, match="has run for more than 1 s"):
            await endless
        assert torch.is_tensor(await one.next_token_logprobs([1, 2]))

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_clients_reduction_of_a_text_does_not_hold_up_another_client(
    clients, scoring, by_value
):
    one, other = clients
    text = [3 + i % 50 for i in range(60)]
    assert "score" in one.capabilities

    async def main():
        with pytest.raises(genlm.EvaluationError, match="SystemExit"):
            await one.reduce_text(text, Largest("exit"))
        torch.testing.assert_close(
            await one.reduce_text(text, Largest(), 5),
            await scoring.reduce_text(text, Largest(), 5),
        )
        endless = asyncio.create_task(one.reduce_text(text, Largest("wait")))
        for start in range(1, 60):  # some of them after it began
            await other.score(text, start)
        with pytest.raises(genlm.EvaluationError, match="has run for more than 1 s"):
            await endless
        assert torch.is_tensor(await one.next_token_logprobs([4, 5]))
        torch.testing.assert_close(
            await other.reduce_text(text, Largest()),
            await scoring.reduce_text(text, Largest()),
        )

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_silent_driver_loses_its_session_and_begins_another(chat, reference):
    with genlm.load_model("chat", "ray", output_cache=genlm.OutputCache(0)) as llm:
        llm.next_token_logprobs_sync([1, 2])
        engine = llm._scheduler.engine
        for link in engine.driver.links:  # as the replicas do after `driver_timeout_s`
            ray.get(link.actor.detach.remote(link.session))
        prompts = [[i, 7] for i in range(40)]
        torch.testing.assert_close(
            llm.batch_next_token_logprobs_sync(prompts),
            reference.batch_next_token_logprobs_sync(prompts),
        )


def test_names_that_exist_or_do_not_are_errors_that_say_what_to_do(chat, address):
    with pytest.raises(ModelLoadError, match="already serves"):
        serving.serve("chat", "demo", "reference", resources=RESOURCES)
    with pytest.raises(ModelLoadError, match=r"this cluster serves .*'chat'"):
        genlm.load_model("chap", "ray")
    with pytest.raises(TypeError, match="engine="):
        genlm.load_model("chat", "ray", replicas=3)
    result = CliRunner().invoke(app, ["serve", "--status", "--address", address])
    assert result.output.count("chat") >= 2


def test_replicas_that_do_not_fit_are_refused_and_leave_nothing(address):
    with pytest.raises(ModelLoadError, match="the cluster has 2 CPU"):
        genlm.load_model("demo", "ray", engine="reference", replicas=3)
    with pytest.raises(ModelLoadError, match="0 GPU"):
        serving.serve("big", "demo", "reference", resources={"num_gpus": 1})
    whole = {"engine": "reference", "replicas": 1, "resources": {"num_cpus": 2}}
    others = cluster.reserve_resources([{"CPU": 1.0}], 1, name="", timeout_s=60)
    with pytest.raises(ModelLoadError, match="other programs still use"):
        genlm.load_model("demo", "ray", place_timeout_s=0.5, **whole)
    cluster.remove(others)
    with pytest.raises(ModelLoadError, match="no text to train"):
        serving.serve("lost", "no/such/file", "reference", resources=RESOURCES)
    options = {"resources": RESOURCES, "engine_opts": {"ordr": 3}}
    with pytest.raises(ModelLoadError, match=r"'reference' takes no option 'ordr'.*'order'\?$"):
        serving.serve("lost", "demo", "reference", **options)
    assert "lost" not in {item["name"] for item in serving.served(address)}


@pytest.mark.parametrize("removal", ["end", "release"])
def test_a_name_can_be_used_again_at_once(address, monkeypatch, removal):
    """Ray ends actors and releases reservations in the background, here after 0.5 seconds."""
    owner, method = {"end": (serving, "kill"), "release": (cluster, "remove")}[removal]
    immediate = getattr(owner, method)

    def later(*arguments):
        threading.Timer(0.5, immediate, arguments).start()

    monkeypatch.setattr(owner, method, later)
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no text to train"):
            serving.serve("again", "no/such/file", "reference", resources=RESOURCES)
    for _ in range(2):
        serving.serve("again", "demo", "reference", resources=RESOURCES)
        assert serving.stop("again") == 1
    assert "again" not in {item["name"] for item in serving.served(address)}


def test_another_version_is_refused(chat, monkeypatch):
    for name in ("genlm-core", "torch", "numpy"):
        monkeypatch.setattr(
            serving,
            "compared_versions",
            lambda names, name=name: compared_versions(names) | {name: "0.1"},
        )
        with pytest.raises(ModelLoadError, match=rf"{name} \d+\.\S* there, 0\.1 here"):
            genlm.load_model("chat", "ray")


def test_a_driver_that_is_silent_is_forgotten(address):
    """The session of a program that dies is removed after `driver_timeout_s`."""
    serving.serve("brief", "demo", "reference", resources=RESOURCES, driver_timeout_s=1.0)
    try:
        [actor] = serving.actors_of("brief")
        ray.get(actor.attach.remote("driver", 1, {}, []))
        while ray.get(actor.describe.remote())["drivers"]:
            time.sleep(0.05)
        assert ray.get(actor.exchange.remote(1, ReplicaRequest())) is None
    finally:
        assert serving.stop("brief") == 1
    with pytest.raises(ModelLoadError, match="serves"):
        serving.stop("brief")


def test_replicas_that_cannot_be_started_leave_nothing(address):
    with pytest.raises(TypeError, match="lock"):
        serving.serve(
            "unsendable", "demo", "reference", resources=RESOURCES,
            engine_opts={"lock": threading.Lock()},
        )  # fmt: skip
    assert cluster.reservations("unsendable") == []


def test_replicas_that_end_after_they_were_listed_and_other_actors_are_no_models(
    address, monkeypatch
):
    listed = [
        {"namespace": cluster.NAMESPACE, "name": name}
        for name in ("ended/0", "ended/1", "other")
    ]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: listed)
    assert serving.served(address) == []
    for function in (serving.actors_of, serving.stop):
        with pytest.raises(ModelLoadError, match=r"no served model 'ended'.*serves none"):
            function("ended")


def test_the_status_waits_once_for_all_replicas_that_do_not_respond(chat, address, monkeypatch):
    pids = [item["pid"] for item in _replicas_of_chat(address)]
    monkeypatch.setattr(serving, "_DESCRIBE_TIMEOUT_S", 0.5)
    waits, wait = [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda *_, **more: waits.append(more) or wait(*_, **more))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        states = [item["state"] for item in _replicas_of_chat(address)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert states == ["no response in 0.5 s"] * 2
    assert len(waits) == 1


def test_what_is_left_of_a_served_model_is_ended(address):
    """Its replicas may have died or may not have been started."""
    cluster.reserve_resources([{"CPU": 0.1}], 2, name="left", timeout_s=60)
    with pytest.raises(ModelLoadError, match="serve --stop --name left"):
        serving.serve("left", "demo", "reference", resources=RESOURCES)
    assert serving.stop("left") == 2
    assert cluster.reservations("left") == []
    with pytest.raises(ModelLoadError, match="serves"):
        serving.stop("left")


def test_what_is_pickled_is_among_the_versions():
    """The versions include those of messages, tensors, arrays and the engine's plugin."""
    assert {"genlm-ray", "genlm-hf", "torch", "numpy"} <= versions("hf").keys()


def test_a_program_needs_the_version_of_the_engines_plugin_but_not_the_plugin(monkeypatch):
    remote = versions("reference") | {"genlm-hf": "0.1", "genlm-not-here": "1.0"}
    monkeypatch.setattr(serving, "_results", lambda *_: [{"versions": remote}])
    with pytest.raises(ModelLoadError, match=r"versions: genlm-hf 0\.1 there, \S+ here;"):
        serving.wait_until_loaded([], 60)


def test_what_an_engine_raises_for_one_driver_does_not_reach_others(tmp_path):
    """The engine raises when adapters are freed and when statistics are read."""
    (tmp_path / "text.txt").write_text("roses are red\n\nviolets are blue\n")

    async def main():
        spec = ReplicaSpec("reference", "demo", driver_timeout_s=0.2)
        served = replica.Replica(spec)
        engine = (await served._wait_until_loaded()).engine.engine

        def refuse(*_):
            raise RuntimeError("no")

        adapters = {"poet": str(tmp_path), "bard": str(tmp_path)}
        await served.attach("driver", 1, adapters, [])
        engine.remove_adapter = engine.statistics = refuse
        for session in (2, 3):  # one ends, and the next one ends too
            description = await served.attach("driver", session, {}, [])
            assert description["statistics"] == {}
            assert (await served.exchange(session, ReplicaRequest()))[1] == {}
            while served._sessions:
                await asyncio.sleep(0.02)
        assert await served.configure(3, {"poet": str(tmp_path)}, []) is False
        served._supervisor.cancel()
        served._shared.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_adapter_of_a_session_that_ends_meanwhile_is_freed(tmp_path):
    (tmp_path / "text.txt").write_text("roses are red\n\nviolets are blue\n")
    path = str(tmp_path)

    async def main():
        served = replica.Replica(ReplicaSpec("reference", "demo", 60.0))
        await served.attach("driver", 1, {}, [])
        call, begun = served._call_engine, asyncio.Event()

        async def slow(method, *arguments):
            begun.set()
            while 1 in served._sessions:
                await asyncio.sleep(0)
            return await call(method, *arguments)

        served._call_engine = slow
        added = asyncio.create_task(served.configure(1, {"poet": path}, []))
        await begun.wait()
        await served.attach("driver", 2, {"poet": path}, [])  # its name is free again
        assert await added is False
        assert served._sessions[2].adapters == {"poet"}
        served._supervisor.cancel()
        served._shared.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_session_does_not_end_while_it_loads_an_adapter(tmp_path):
    """The session does not time out meanwhile; it ends if the adapter cannot be loaded."""
    (tmp_path / "text.txt").write_text("roses are red\n\nviolets are blue\n")

    async def main():
        spec = ReplicaSpec("reference", "demo", driver_timeout_s=0.1)
        served = replica.Replica(spec)
        call = served._call_engine

        async def slow(method, *arguments):
            await asyncio.sleep(0.5)
            return await call(method, *arguments)

        served._call_engine = slow
        await served.attach("other", 1, {}, [])  # starts the supervisor
        adapters = {"poet": str(tmp_path)}
        await served.attach("driver", 2, adapters, [])
        assert served._sessions[2].adapters == {"poet"}
        with pytest.raises(AdapterError):
            await served.attach("another", 3, {"no": str(tmp_path / "no")}, [])
        while served._sessions:
            await asyncio.sleep(0.05)
        served._supervisor.cancel()
        served._shared.close()

    asyncio.run(asyncio.wait_for(main(), 60))
