"""How do replicas scale? A simulation of up to a thousand with the code of the router.

    python benchmarks/simulate_replicas.py [--save]

A discrete-event simulation. Real: `genlm_ray.router.Router`, every call of which is timed on
this machine. The time of a step of a replica is `step + rows * row + new tokens * token`; a
driver takes `front` for a request in addition to the router, and a message takes time. These
times are measured first on this machine unless they are arguments: a replica's on `hf` with the
31 M Llama on one thread, the driver's and the message's on two replicas of an engine that
computes nothing. Tokens are those that the replicas compute in the simulation, not the
estimates of the router.

Populations of 64 particles per replica continue a common prompt of 256 tokens; each particle
continues when it has its result, and all are resampled every 4 steps. Contestants: one driver
whose front end has only the cost of the router; one driver; a driver for every 8 replicas, as
several programs or processes use them (each with a separate router and population).

The limit of one driver is 1 / (front end + router) requests a second; the replicas' is the
number of them over the time of a row. Near-linear scaling ends where they cross.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch
from bench_ray import free_engine, measure_front, options_of, replicas
from particle_model import VOCAB_SIZE, prompt_of, save_model
from report import RESULTS, environment

import genlm
from genlm.plugin import Query, TokenSequence
from genlm_ray.router import Router

PER_REPLICA, PROMPT, STEPS, EVERY = 64, 256, 12, 4
MOST_IN_FLIGHT = 512
ROUNDS = 5
TIMES = {
    "step_ms": "milliseconds of a replica's step besides its rows",
    "row_ms": "milliseconds of each row of a step",
    "token_ms": "milliseconds of each new token of a prompt",
    "front_us": "microseconds of the driver for a request, besides the router",
    "message_ms": "milliseconds of a message from a driver to a replica, or back",
}
"""Options; what is not given is measured."""

PLOT = Path(__file__).parents[1] / "docs" / "assets" / "ray-replicas.svg"


@dataclass(frozen=True)
class Times:
    """Seconds that a replica takes for a step, a driver for a request, and a message."""

    step_s: float
    row_s: float
    token_s: float
    front_s: float
    message_s: float


@dataclass(eq=False)
class Node:
    """A token of the tree of all particles, and the replicas that have computed it."""

    sequence: TokenSequence
    parent: Node | None
    computed_by: set[int] = field(default_factory=set)


@dataclass
class Replica:
    """What a replica is doing."""

    messages: list[list[int]] = field(default_factory=list)
    is_busy: bool = False
    busy_s: float = 0.0


class Simulation:
    """One driver, its replicas and its population."""

    def __init__(self, replicas: int, times: Times, seed: int) -> None:
        self.times, self.router = times, Router(max_contexts=2**20)
        self.replicas = [Replica() for _ in range(replicas)]
        for number in range(replicas):
            self.router.add(number)
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()
        self.ids = itertools.count()
        self.nodes: dict[int, Node] = {}  # by query
        self.asked_s: dict[int, float] = {}
        self.particles: dict[int, list[int]] = {}  # by query, those that wait for it
        self.computed = self.needed = self.answered = 0
        self.router_s = self.queue_s = self.driver_free_s = self.now_s = 0.0
        self.root = Node(TokenSequence.of(range(PROMPT)), None)
        self.population = [
            Node(TokenSequence.of([i], self.root.sequence), self.root)
            for i in range(PER_REPLICA * replicas)
        ]
        self.steps = [0] * len(self.population)
        self.at_barrier: list[int] = []

    def run(self) -> dict[str, float]:
        """Run all steps; returns the figures."""
        self._ask(list(range(len(self.population))))
        while self.events:
            self.now_s, _, kind, payload = heapq.heappop(self.events)
            if kind == "arrived":
                replica, queries = payload
                self.replicas[replica].messages.append(queries)
                self._start(replica)
            elif kind == "stepped":
                self._stepped(*payload)
            else:
                self._answered(*payload)
        count = len(self.replicas)
        return {
            "rows": self.answered,
            "seconds": self.now_s,
            "utilisation": sum(each.busy_s for each in self.replicas) / (count * self.now_s),
            "queue_ms": 1e3 * self.queue_s / self.answered,
            "tokens_twice": self.computed / self.needed - 1,
            "router_us": 1e6 * self.router_s / self.answered,
        }

    # -- the driver -------------------------------------------------------------------

    def _ask(self, particles: list[int]) -> None:
        """Ask for the next tokens of particles; equal contexts are one request."""
        shared: dict[int, int] = {}
        queries = []
        for index in particles:
            node = self.population[index]
            query_id = shared.get(id(node))
            if query_id is None:
                query_id = shared[id(node)] = next(self.ids)
                queries.append(Query(query_id, node.sequence))
                self.nodes[query_id] = node
                self.particles[query_id] = []
            self.particles[query_id].append(index)
        began = time.thread_time()
        self.router.submit(queries)
        self._spend(time.thread_time() - began, len(queries))
        for query in queries:
            self.asked_s[query.query_id] = self.driver_free_s
        self._send()

    def _spend(self, router_s: float, requests: int) -> None:
        self.router_s += router_s
        begin_s = max(self.now_s, self.driver_free_s)
        self.driver_free_s = begin_s + router_s + requests * self.times.front_s

    def _send(self) -> None:
        began = time.thread_time()
        in_flight = self.router.in_flight
        room = {one: MOST_IN_FLIGHT - in_flight[one] for one in range(len(self.replicas))}
        taken = self.router.take(room)
        self._spend(time.thread_time() - began, 0)
        for number, routed in taken.items():
            queries = [each.query.query_id for each in routed]
            self._at(self.driver_free_s + self.times.message_s, "arrived", (number, queries))

    def _answered(self, number: int, queries: list[int]) -> None:
        began = time.thread_time()
        for query_id in queries:
            self.router.finish(query_id, number)
        self._spend(time.thread_time() - began, 0)
        going = []
        for query_id in queries:
            self.answered += 1
            node = self.nodes.pop(query_id)
            for index in self.particles.pop(query_id):
                self._extend(index, node)
                going.append(index)
        self._send()
        on = [index for index in going if self.steps[index] % EVERY]
        self.at_barrier += [index for index in going if not self.steps[index] % EVERY]
        if on:
            self._ask(on)
        if len(self.at_barrier) == len(self.population) and self.steps[0] < STEPS:
            self._resample()

    def _extend(self, index: int, node: Node) -> None:
        token = TokenSequence.of([self.random.randrange(2**20)], node.sequence)
        self.population[index] = Node(token, node)
        self.steps[index] += 1

    def _resample(self) -> None:
        weights = [self.random.expovariate(1) for _ in self.population]
        chosen = sorted(
            self.random.choices(range(len(weights)), weights, k=len(self.population))
        )
        self.population = [self.population[index] for index in chosen]
        self.at_barrier = []
        self._ask(list(range(len(self.population))))

    # -- the replicas -----------------------------------------------------------------

    def _start(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.is_busy or not replica.messages:
            return
        messages, replica.messages = replica.messages, []  # the engine takes all that is there
        queries = [query for message in messages for query in message]
        tokens = 0
        for query_id in queries:
            self.queue_s += max(0.0, self.now_s - self.asked_s.pop(query_id))
            tokens += self._compute(self.nodes[query_id], number)
        self.computed += tokens
        rows, times = len(queries), self.times
        prompt = max(0, tokens - rows)
        step_s = times.step_s + rows * times.row_s + prompt * times.token_s
        replica.is_busy = True
        replica.busy_s += step_s
        self._at(self.now_s + step_s, "stepped", (number, messages))

    def _compute(self, node: Node, number: int) -> int:
        """Mark a context and all before it; returns the tokens that were not computed there."""
        tokens, each = 0, node
        while number not in each.computed_by:
            length = PROMPT if each.parent is None else 1
            self.needed += length if not each.computed_by else 0
            each.computed_by.add(number)
            tokens += length
            if each.parent is None:
                break
            each = each.parent
        return max(1, tokens)

    def _stepped(self, number: int, messages: list[list[int]]) -> None:
        self.replicas[number].is_busy = False
        for queries in messages:
            self._at(self.now_s + self.times.message_s, "answered", (number, queries))
        self._start(number)

    def _at(self, time_s: float, kind: str, payload: Any) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), kind, payload))


def simulated(replicas: int, times: Times, per_driver: int | None) -> dict[str, float]:
    """Figures of all drivers together; those of several drivers do not disturb each other."""
    size = min(replicas, per_driver or replicas)
    drivers = replicas // size
    runs = [Simulation(size, times, seed).run() for seed in range(min(drivers, 4))]
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    slowest = max(run["seconds"] for run in runs)
    return {**mean, "rows_per_s": drivers * mean["rows"] / slowest}


def measured_replica() -> dict[str, float]:
    """Milliseconds of a step, of each row in it and of each new token of a prompt, on `hf`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), VOCAB_SIZE)
        with genlm.load_model(
            folder, "hf", output_cache=genlm.OutputCache(0), **options_of("hf")
        ) as llm:
            samples = [_replica_times(llm, seed) for seed in range(ROUNDS + 1)][1:]
    return {name: statistics.median(each[name] for each in samples) for name in samples[0]}


def _replica_times(llm: genlm.AsyncLM, seed: int) -> dict[str, float]:
    prompt = [seed, *prompt_of(PROMPT)[1:]]
    llm.clear_kv_cache()
    began = time.perf_counter()
    llm.next_token_logprobs_sync(prompt)
    prompt_s = time.perf_counter() - began

    def steps_s(count: int) -> float:
        contexts = [llm.context([*prompt, i]) for i in range(count)]
        llm.batch_next_token_logprobs_sync(contexts)
        began = time.perf_counter()
        for step in range(STEPS):
            contexts = [each.extend(step) for each in contexts]
            llm.batch_next_token_logprobs_sync(contexts)
        return (time.perf_counter() - began) / STEPS

    one_s, all_s = steps_s(1), steps_s(PER_REPLICA)
    row_s = (all_s - one_s) / (PER_REPLICA - 1)
    step_s = max(0.0, one_s - row_s)
    return {
        "step_ms": 1e3 * step_s,
        "row_ms": 1e3 * row_s,
        "token_ms": 1e3 * max(0.0, prompt_s - one_s) / (PROMPT - 1),
    }


def measured_driver() -> dict[str, float]:
    """Microseconds of a request in the driver besides the router, milliseconds of a message."""
    samples: dict[str, list[float]] = {}
    with free_engine(), replicas("free", 2, "free") as llm:
        spent = _timed(llm.engine.driver.router)
        asyncio.run(measure_front(llm, samples, "driver"))
        asked = llm.statistics().answered
        actor = llm.engine.driver.links[0].actor
        calls = []
        for _ in range(50):
            began = time.perf_counter()
            ray.get(actor.detach.remote(0))  # no session has this number
            calls.append((time.perf_counter() - began) / 2)
    driver_us = statistics.median(samples["driver, driver"])
    return {
        "front_us": driver_us - 1e6 * sum(spent) / asked,
        "message_ms": 1e3 * statistics.median(calls),
    }


def _timed(router: Router) -> list[float]:
    """Have a router add the CPU time of each call to the list that is returned."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent.append(time.thread_time() - began)

        return run

    for name in ("submit", "take", "finish"):
        setattr(router, name, timed(getattr(router, name)))
    return spent


def plot(found: dict[str, dict[int, dict[str, float]]]) -> None:
    """Draw rows a second, utilisation, queue times, repeated tokens and the router's time."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "genlm"
    figure, axes = plt.subplots(1, 5, figsize=(17, 3.4), layout="constrained")
    shown = {
        "rows_per_s": "rows a second", "utilisation": "replicas' share of time at work",
        "queue_ms": "ms from the router to a replica's step",
        "tokens_twice": "tokens computed again, share", "router_us": "router, us a request",
    }  # fmt: skip
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        for contestant, by_count in found.items():
            counts = sorted(by_count)
            axis.plot(counts, [by_count[n][name] for n in counts], marker="o", label=contestant)
        axis.set(xscale="log", xlabel="replicas", title=title)
        if name in {"rows_per_s", "queue_ms"}:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, what in TIMES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help=what)
    parser.add_argument("--replicas", default="1,2,4,16,64,256,1000")
    parser.add_argument("--save", action="store_true", help="append to results, draw the plot")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in TIMES}
    if None in given.values():
        measured = measured_replica() | measured_driver()
        given = {name: measured[name] if v is None else v for name, v in given.items()}
        print({name: round(value, 3) for name, value in given.items()}, flush=True)
    real = Times(
        given["step_ms"] / 1e3,
        given["row_ms"] / 1e3,
        given["token_ms"] / 1e3,
        given["front_us"] / 1e6,
        given["message_ms"] / 1e3,
    )
    base = replace(real, front_s=0.0)
    contestants = {
        "one driver, router alone": (base, None),
        "one driver": (real, None),
        "a driver for 8 replicas": (real, 8),
    }
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in contestants}
    print(f"{'':26} replicas     rows/s  of linear  at work  queue ms  again  router us")
    for name, (times, per_driver) in contestants.items():
        for count in map(int, options.replicas.split(",")):
            one = found[name][count] = simulated(count, times, per_driver)
            smallest = min(found[name])
            one["of_linear"] = (one["rows_per_s"] / count) / (
                found[name][smallest]["rows_per_s"] / smallest
            )
            print(
                f"{name:26} {count:8} {one['rows_per_s']:10.0f} {one['of_linear']:10.2f} "
                f"{one['utilisation']:8.2f} {one['queue_ms']:9.1f} {one['tokens_twice']:6.3f} "
                f"{one['router_us']:10.1f}",
                flush=True,
            )
    record = {
        "benchmark": "simulate_replicas", "times": given, "found": found,
        **environment(),
    }  # fmt: skip
    line = json.dumps(record)
    if options.save:
        with (RESULTS / "simulate_replicas.jsonl").open("a") as file:
            file.write(line + "\n")
        plot(found)


if __name__ == "__main__":
    main()
