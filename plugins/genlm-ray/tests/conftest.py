"""One small local cluster for all tests, and two replicas for most of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

import genlm
from genlm_ray import cluster
from genlm_ray.conformance import CLUSTER, RESOURCES


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """Shorten the 5 seconds that Ray waits for a process to end; use Ray's default tokens."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RAY_AUTH_MODE", raising=False)
        patched.setenv("RAY_kill_worker_timeout_milliseconds", "200")
        yield


@pytest.fixture(scope="session")
def local_cluster() -> Iterator[None]:
    cluster.connect(None, CLUSTER, default="local")
    yield
    ray.shutdown()


@pytest.fixture
def load(request: pytest.FixtureRequest, local_cluster: None) -> Callable[..., genlm.AsyncLM]:
    """Function that loads replicas, which end with the test."""

    def load_replicas(
        engine: str = "reference", model: str = "demo", **options: Any
    ) -> genlm.AsyncLM:
        llm = genlm.load_model(
            model,
            "ray",
            engine=engine,
            output_cache=genlm.OutputCache(0),
            **({"resources": RESOURCES} | options),
        )
        request.addfinalizer(llm.close)
        return llm

    return load_replicas


@pytest.fixture(scope="session")
def _pair(local_cluster: None) -> Iterator[genlm.AsyncLM]:
    with genlm.load_model(
        "demo",
        "ray",
        engine="reference",
        replicas=2,
        max_restarts=-1,
        output_cache=genlm.OutputCache(0),
        resources=RESOURCES,
    ) as llm:
        yield llm


@pytest.fixture
def pair(_pair: genlm.AsyncLM) -> genlm.AsyncLM:
    """Two replicas of the reference engine, which all tests share and may kill."""

    def is_up(link: Any) -> bool:
        assert not link.is_dead
        try:
            drivers = ray.get(link.actor.describe.remote(), timeout=60)["drivers"]
        except RayError:
            return False
        return link.session in drivers

    engine: Any = _pair.engine
    while not all(map(is_up, engine.driver.links)):
        time.sleep(0.05)
    return _pair


@pytest.fixture(scope="session")
def reference() -> Iterator[genlm.AsyncLM]:
    """The model of the replicas in this process."""
    with genlm.load_model("demo", "reference") as llm:
        yield llm


@pytest.fixture
def pids() -> Callable[[genlm.AsyncLM], list[int]]:
    """Function that returns the process ids of the replicas."""

    def process_ids(llm: genlm.AsyncLM) -> list[int]:
        statistics = llm.statistics().engine
        return [
            int(statistics[f"replica {i}: pid"]) for i in range(int(statistics["replicas"]))
        ]

    return process_ids


@pytest.fixture(scope="session")
def alive() -> Callable[[int], bool]:
    def is_alive(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    return is_alive
