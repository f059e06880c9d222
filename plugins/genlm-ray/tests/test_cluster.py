"""Starting and joining a cluster, failures of Ray, and the loss of the head."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
import ray
from typer.testing import CliRunner

import genlm
from genlm import ModelLoadError
from genlm.cli import app
from genlm_ray import cluster, serving
from genlm_ray.conformance import RESOURCES
from genlm_ray.replica import Replica
from genlm_ray.spec import ReplicaSpec

pytestmark = pytest.mark.usefixtures("local_cluster")

PROGRAM = """
import subprocess

import psutil
import ray._private.node
import genlm
from genlm_ray import cluster
from genlm_ray.conformance import CLUSTER, RESOURCES

services = ray._private.services
find_node, start_dashboard = services.get_node, services.start_api_server
start_gcs = services.start_gcs_server
started = []
popen = subprocess.Popen.__init__


def spied(self, *arguments, **options):
    started.append(self)
    popen(self, *arguments, **options)


def gcs(*arguments, **options):
    # Ray's first process; only the last attempt that fails starts others.
    global failures
    if failures > 1:
        failures -= 1
        raise OSError("the first process has ended")
    return start_gcs(*arguments, **options)


def failing(*arguments):
    # Ray calls this when its processes run; it raises when they do not find each other.
    global failures
    if failures:
        failures -= 1
        raise OSError("the node timed out")
    return find_node(*arguments)


def dashboard(*arguments, **options):
    # Ray waits for the dashboard, which a cluster that does not start does not need.
    return (None, None) if failures else start_dashboard(*arguments, **options)


subprocess.Popen.__init__ = spied
services.get_node, services.start_api_server = failing, dashboard
services.start_gcs_server = gcs
for failures in (3, 1):
    print(f"{failures} failures:", end=" ")
    try:
        cluster.connect(None, CLUSTER, default="local")
    except cluster.ModelLoadError as error:
        print("raised", error, end=" ")
    if not ray.is_initialized():
        for process in started:
            process.wait(60)  # Linux ends them
        print("ended", len(started), end=" ")
    print("joined", ray.is_initialized(), flush=True)

llm = genlm.load_model("demo", "ray", engine="reference", replicas=1, resources=RESOURCES)
cluster.HEAD_TIMEOUT_S = 3.0
processes = psutil.Process().children(recursive=True)
processes.sort(key=lambda process: not {"gcs_server", "raylet"} & {process.name()})
for process in processes:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
try:
    llm.next_token_logprobs_sync([1, 2, 3])
except genlm.EngineDiedError as error:
    print("lost:", type(error).__name__, flush=True)
"""


@pytest.fixture(scope="module")
def program():
    """Output of a program whose cluster does not start, starts, and is killed."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_after_three_failures_the_error_says_so_and_no_process_is_left(program):
    [outcome] = re.findall("3 failures: .*", program)
    assert "cannot start a Ray cluster: OSError: the node timed out" in outcome
    assert re.search("ended [1-9]", outcome)
    assert "joined False" in outcome


def test_a_cluster_that_did_not_start_is_started_again(program):
    [outcome] = re.findall("1 failures: .*", program)
    assert "raised" not in outcome
    assert "joined True" in outcome


def test_losing_the_cluster_ends_every_request(program):
    assert "lost: EngineDiedError" in program


def test_a_process_joins_one_cluster_at_a_time():
    joined = ray.get_runtime_context().gcs_address
    port = joined.rpartition(":")[2]
    for same in (None, "auto", joined):
        cluster.connect(same, default=None)
    for other in (f"203.0.113.1:{port}", joined.replace(port, "1"), "ray://203.0.113.1:10001"):
        with pytest.raises(ModelLoadError, match=f"has joined the one at '{joined}'"):
            cluster.connect(other, default=None)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_the_address_of_this_machine_may_have_another_name(monkeypatch, host):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "203.0.113.5")
    assert cluster._is_same(f"{host}:6379", "203.0.113.5:6379")
    assert cluster._is_same(f"{host}:6379", "[::1]:6379")
    assert not cluster._is_same(f"{host}:6379", "203.0.113.6:6379")


@pytest.fixture
def head(monkeypatch):
    """A head that responds while `responds` is set."""
    head = types.SimpleNamespace(requests=threading.Semaphore(0), responds=threading.Event())
    head.responds.set()

    def nodes():
        responds = head.responds.is_set()
        head.requests.release()
        assert responds or head.responds.wait(60)

    monkeypatch.setattr(ray, "nodes", nodes)
    return head


async def _next_request(head):
    assert await asyncio.to_thread(head.requests.acquire, timeout=60)


def test_a_program_that_was_paused_does_not_take_its_cluster_for_lost(head, monkeypatch):
    async def main():
        loop, sleep = asyncio.get_running_loop(), asyncio.sleep
        clock, paused_s = loop.time, [0.0]
        loop.time = lambda: clock() + paused_s[0]

        async def paused(_):
            paused_s[0] += 1000
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", paused)
        lost = asyncio.create_task(cluster.until_head_is_lost())
        for _ in range(3):
            await _next_request(head)
        assert not lost.done()
        lost.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("iterations", range(3))
def test_the_supervision_of_the_head_ends_when_it_is_cancelled(iterations, monkeypatch):
    class Immediate(threading.Thread):
        def start(self):
            self.run()

    async def never_cancelled(_):
        raise AssertionError("the cancellation had no effect")

    def cancel(task, iterations):
        if iterations:
            asyncio.get_running_loop().call_soon(cancel, task, iterations - 1)
        else:
            task.cancel()

    async def main():
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "nodes", list)
        monkeypatch.setattr(cluster, "threading", types.SimpleNamespace(Thread=Immediate))
        monkeypatch.setattr(asyncio, "sleep", never_cancelled)
        task = asyncio.create_task(cluster.until_head_is_lost())
        cancel(task, iterations)
        [end] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(end, asyncio.CancelledError)

    asyncio.run(main())


def test_a_head_that_does_not_answer_is_lost(head, monkeypatch):
    monkeypatch.setattr(cluster, "_PROBE_S", 0.01)
    monkeypatch.setattr(cluster, "HEAD_TIMEOUT_S", 60.0)

    async def main():
        lost = asyncio.create_task(cluster.until_head_is_lost())
        for _ in range(3):
            await _next_request(head)
        assert not lost.done()
        head.responds.clear()
        cluster.HEAD_TIMEOUT_S = 0.01
        await asyncio.wait_for(lost, 60)
        head.responds.set()

    asyncio.run(main())


def test_a_cluster_that_was_not_named_is_not_joined(monkeypatch):
    """Nor is the cluster that `ray start` has recorded on this machine."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    starts = []
    monkeypatch.setattr(ray, "init", lambda **arguments: starts.append(arguments))
    context = types.SimpleNamespace(gcs_address="203.0.113.1:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    cluster.connect(None, default="local")
    assert starts[0]["address"] == "local"
    for function in (cluster.join, serving.served, lambda: serving.stop("chat")):
        with pytest.raises(ModelLoadError, match="no Ray cluster was named"):
            function()
    with pytest.raises(ModelLoadError, match="no Ray cluster was named"):
        serving.serve("chat", "demo", "reference")
    assert len(starts) == 1


@pytest.mark.parametrize("server", ["none", "silent", "http"])
def test_an_address_without_a_cluster_is_an_error(monkeypatch, server):
    """Ray itself tries to join for several minutes."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_JOIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray tries to join"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if server != "none":
            listening.listen()
        if server == "http":
            threading.Thread(target=_respond, args=[listening], daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        where = f"the Ray cluster at '{re.escape(address)}'"
        message = f"cannot join {where}.*: no cluster responds there, for 0.5 s"
        with pytest.raises(ModelLoadError, match=message):
            genlm.get_backend("ray")("chat", address=address)
        result = CliRunner().invoke(app, ["serve", "--status", "--address", address])
    assert isinstance(result.exception, ModelLoadError)
    assert re.search(message, str(result.exception))


def _respond(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the test has ended
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)


def test_a_cluster_whose_head_responds_is_joined(monkeypatch):
    address = ray.get_runtime_context().gcs_address
    context = types.SimpleNamespace(gcs_address=address)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    joined = []
    monkeypatch.setattr(ray, "init", lambda **arguments: joined.append(arguments))
    assert cluster.connect(address, default=None) == address
    assert [arguments["address"] for arguments in joined] == [address]


def test_the_local_cluster_is_one_whose_head_runs_here(monkeypatch):
    joined = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.1:6379")
    assert cluster.join(is_local=True) == joined
    assert os.environ["RAY_ADDRESS"] == "203.0.113.1:6379"
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "203.0.113.5")
    with pytest.raises(ModelLoadError, match=f"which is a node of the one at '{joined}'"):
        cluster.join(is_local=True)


STATUS = """
import atexit, os, signal, sys, threading
from genlm.cli import app
from genlm_ray import cluster
from genlm_ray.engine import RayEngine

address, head = sys.argv[1], int(sys.argv[2])
descriptions = RayEngine.served(address)

def served(address):
    os.kill(head, signal.SIGSTOP)
    # Python 3.12 starts no thread while the interpreter exits.
    atexit.register(setattr, threading.Thread, "start", None)
    return descriptions

RayEngine.served = staticmethod(served)
cluster.LEAVE_TIMEOUT_S = 1.0
app(["serve", "--status", "--name", "nothing", "--address", address])
"""


def test_the_command_ends_after_its_table_although_the_head_hangs():
    address = ray.get_runtime_context().gcs_address
    children = psutil.Process().children(recursive=True)
    [head] = [child for child in children if child.name() == "gcs_server"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", STATUS, address, str(head.pid)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        head.resume()
    assert done.returncode == 0, done.stderr
    assert "no served models" in done.stdout
    assert f"joined the Ray cluster at {address}" in done.stderr
    assert "the Ray cluster does not answer" in done.stderr


FORKING = """
import os, sys
import genlm
from genlm_ray import cluster
from genlm_ray.conformance import RESOURCES

def load():
    return genlm.load_model("demo", "ray", engine="reference", resources=RESOURCES)

cluster.connect(sys.argv[1], default=None)
if not os.fork():
    try:
        load()
    except genlm.ModelLoadError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
with load() as llm:
    print(len(llm.next_token_logprobs_sync([1])))
"""


def test_a_forked_process_is_told_that_ray_stayed_behind():
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore::DeprecationWarning"),  # Python 3.12's, of the fork
            *("-c", FORKING, ray.get_runtime_context().gcs_address),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    forked, row = done.stdout.splitlines()
    assert forked.startswith("this process was forked from one that had joined a Ray cluster")
    assert row == "257"


TERMINATED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(10 + signal.alarm(0)))
import genlm
from genlm_ray.conformance import RESOURCES

llm = genlm.load_model(
    "demo", "ray", engine="reference", resources=RESOURCES, address=sys.argv[1]
)
os.kill(os.getpid(), signal.SIGTERM)
llm.next_token_logprobs_sync([1])
"""


def test_the_handler_of_sigterm_of_a_program_is_kept():
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, ray.get_runtime_context().gcs_address],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 10, done.stderr


def test_a_process_that_sends_no_token_or_has_none_gets_the_error_of_ray(tmp_path):
    address = ray.get_runtime_context().gcs_address
    attempts = {"RAY_NUM_REDIS_GET_RETRIES": "2"}
    command = "from genlm.cli import app; import sys; app(['serve', '--status', *sys.argv[1:]])"

    def serve(mode: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", command, "--address", address],
            capture_output=True, text=True, timeout=300, check=False,
            env=os.environ | attempts | variables | {"RAY_AUTH_MODE": mode},
        )  # fmt: skip

    refused = serve("disabled")
    assert refused.returncode == 1
    message = refused.stderr.splitlines()[-1]
    assert "AuthenticationError" in message
    assert "RAY_AUTH_MODE is currently 'disabled' (not 'token')" in message
    missing = serve("token", HOME=str(tmp_path))
    assert missing.returncode == 1
    assert "no authentication token was found" in missing.stderr.splitlines()[-1]
    joined = serve("token")
    assert joined.returncode == 0, joined.stderr


def test_the_cluster_of_this_machine_is_asked_with_its_token(monkeypatch):
    modes = []
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(
        cluster, "GcsClient", lambda **_: modes.append(os.environ["RAY_AUTH_MODE"])
    )
    cluster._check_head("auto")
    assert modes == ["token"]


@pytest.mark.parametrize(
    "resources",
    [{}, [], {"num_cpus": 0}, {"num_cpus": -1}, {"num_cpus": float("nan")}, [RESOURCES, {}]],
)
def test_resources_without_a_positive_amount_are_refused(resources):
    with pytest.raises(ValueError, match="at least one of them above 0"):
        cluster.bundles_of(resources)


@pytest.mark.parametrize("resources", ["abc", 3, [3], [[1]], {"num_cpus": "many"}])
def test_resources_that_are_no_amounts_are_refused(resources):
    with pytest.raises(TypeError, match=r"resources=.*: expected amounts by name"):
        cluster.bundles_of(resources)


def test_options_that_are_no_mapping_are_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"^engine_opts='x'; expected a mapping"):
        ReplicaSpec("reference", "demo", engine_opts="x")
    with pytest.raises(TypeError, match=r"^replicas='2'; expected an integer"):
        ReplicaSpec("reference", "demo", replicas="2")
    for place_timeout_s in ("9", -1):
        message = f"^place_timeout_s={place_timeout_s!r}: expected a time in seconds, 0 or"
        with pytest.raises(ValueError, match=message):
            ReplicaSpec("reference", "demo", place_timeout_s=place_timeout_s)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    with pytest.raises(TypeError, match=r"^ray_opts='x'; expected a mapping"):
        cluster.connect(None, "x", default="local")


def test_an_interrupted_reservation_is_given_back(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster.PlacementGroup, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.reserve_resources([{"CPU": 0.1}], 2, name="late", timeout_s=60)
    assert cluster.reservations("late") == []


def test_all_replicas_together_wait_for_resources_no_longer_than_one(monkeypatch):
    waits = []

    def wait(_, timeout_s):
        waits.append(timeout_s)
        time.sleep(0.1)
        return len(waits) < 3

    monkeypatch.setattr(cluster.PlacementGroup, "wait", wait)
    with pytest.raises(ModelLoadError, match="after 60 s other programs still use"):
        cluster.reserve_resources([{"CPU": 0.1}], 3, name="late", timeout_s=60)
    assert waits[0] - waits[2] >= 0.2
    assert cluster.reservations("late") == []


def test_calls_of_replicas_are_not_stored_in_the_head(pair):
    assert not any(link.actor._ray_enable_task_events for link in pair.engine.driver.links)


def test_models_share_one_class_of_replicas(pair):
    before = Replica.__subclasses__()
    genlm.load_model("demo", "ray", engine="reference", resources=RESOURCES).close()
    assert Replica.__subclasses__() == before
