"""Replicas that die or hang: nothing is lost or answered twice, nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import subprocess
import sys
import time

import pytest
import ray
import torch

from genlm import AdapterError, EngineDiedError

PROMPTS = [[first, second, 32] for first in range(20) for second in range(15)]


async def _until_asked(llm, count):
    while llm.statistics().pending < count:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


def _interrupt(llm, prompts, act):
    """Ask while the replicas' processes are stopped, `act`, and return the rows."""

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs(ids)) for ids in prompts]
        await _until_asked(llm, len(prompts))
        act()
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    return torch.stack(asyncio.run(main()))


def test_what_a_killed_replica_had_is_asked_again(load, pids, reference, tmp_path):
    adapter = tmp_path / "poet"
    adapter.mkdir()
    (adapter / "text.txt").write_text("roses are red\n\nviolets are blue\n")
    llm = load(replicas=2, max_restarts=2)
    llm.add_new_lora(str(adapter), "poet")
    before = pids(llm)
    for pid in before:  # else all are answered before one of them is killed
        os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        os.kill(before[0], signal.SIGKILL)
        os.kill(before[1], signal.SIGCONT)

    rows = _interrupt(llm, PROMPTS, kill)
    torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(PROMPTS))
    counted = llm.statistics()
    assert counted.answered == len(PROMPTS)
    assert counted.failed == 0
    # The new replica has the adapter: it is used once the other one has been killed.
    while llm.statistics().engine["replica 0: state"] != "up":
        llm.next_token_logprobs_sync([1, 2])  # the engine's thread notices it between steps
        time.sleep(0.05)
    assert pids(llm)[0] != before[0]
    os.kill(before[1], signal.SIGKILL)
    reference.add_new_lora(str(adapter), "poet")
    for ids in PROMPTS[:3]:
        torch.testing.assert_close(
            llm.next_token_logprobs_sync(ids, lora_name="poet"),
            reference.next_token_logprobs_sync(ids, lora_name="poet"),
        )
    with pytest.raises(AdapterError):
        llm.add_new_lora(str(tmp_path / "nothing"), "nobody")
    torch.testing.assert_close(  # refused alone: the others are as they were
        llm.next_token_logprobs_sync(PROMPTS[0], lora_name="poet"),
        reference.next_token_logprobs_sync(PROMPTS[0], lora_name="poet"),
    )


def test_a_message_that_fails_does_not_hold_up_the_next(load, reference):
    llm = load(replicas=1)
    [link] = llm.engine._links
    unknown = pickle.dumps([(0, 1, 10**6, b"", None, None, ())])
    failed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    link._send("exchange", lambda _, error: failed.put(error), link.session, unknown)
    assert isinstance(failed.get(timeout=60), ray.exceptions.RayTaskError)
    row = asyncio.run(asyncio.wait_for(llm.next_token_logprobs([5, 6]), 60))
    assert (row - reference.next_token_logprobs_sync([5, 6])).abs().max() <= 1e-5


def test_a_replica_that_returns_while_nothing_is_asked_keeps_its_session(load, pids, reference):
    """The engine's thread hears of the session with the next request, however late."""
    llm = load(replicas=2)
    link = llm.engine._links[0]
    os.kill(pids(llm)[0], signal.SIGKILL)
    while link.session is not None:
        llm.next_token_logprobs_sync([1, 2])
        time.sleep(0.01)
    while link.attached is None:
        time.sleep(0.05)
    first = link.attached
    time.sleep(1.0)  # the monitor looks after it five times
    assert link.attached == first
    torch.testing.assert_close(
        llm.batch_next_token_logprobs_sync(PROMPTS),
        reference.batch_next_token_logprobs_sync(PROMPTS),
    )
    assert link.session == first
    assert llm.statistics().engine["replica 0: restarts"] == 1


def test_a_replica_that_hangs_is_replaced(load, pids, reference):
    llm = load(replicas=2, ping_timeout_s=2.0)
    before = pids(llm)
    os.kill(before[0], signal.SIGSTOP)
    rows = _interrupt_none(llm, PROMPTS)
    torch.testing.assert_close(rows, reference.batch_next_token_logprobs_sync(PROMPTS))
    while llm.statistics().engine["replica 0: state"] != "up":
        llm.next_token_logprobs_sync([1, 2])
        time.sleep(0.05)
    assert pids(llm)[0] != before[0]
    assert llm.statistics().engine["replica 0: restarts"] == 1


def _interrupt_none(llm, prompts):
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
        await _until_asked(llm, 9)
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


CLUSTER_LOST = """
import os, signal, sys, threading, time
import psutil
import genlm
from genlm_ray.conformance import CLUSTER

llm = genlm.load_model(
    "demo", "ray", engine="reference", replicas=1, ray_opts=CLUSTER, resources={"num_cpus": 0.1}
)
processes = psutil.Process().children(recursive=True)
for one in processes:
    if "raylet" in one.name() or "gcs" in one.name():
        one.kill()
for one in processes:
    try:
        one.kill()
    except psutil.NoSuchProcess:
        pass
try:
    llm.next_token_logprobs_sync([1, 2, 3])
except genlm.EngineDiedError as error:
    print("ended:", type(error).__name__, flush=True)
"""


def test_losing_the_cluster_ends_every_request():
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER_LOST],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "ended: EngineDiedError" in done.stdout, done.stderr[-2000:]
