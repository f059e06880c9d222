"""Resident batches: used where they fit, never for another sequence."""

from __future__ import annotations

import functools
import random
from typing import Any

import mlx.core as mx
import pytest
import torch

from genlm.testing import TINY_LLAMA, TinyModel
from genlm_mlx import resident, storage
from genlm_mlx.engine import MLXEngine

from .conftest import Make
from .driving import Ids, largest_error, population, rows_of

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32


@pytest.fixture(scope="module")
def long_llama(make: Make) -> TinyModel:
    return make("llama", {**TINY_LLAMA, "max_position_embeddings": 512})


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences' pasts each layer of each pass gathered."""
    counts: list[int] = []
    gather = storage.KVStorage.gather

    def counted(self: Any, layer: int, rows: mx.array) -> list[mx.array]:
        counts.append(rows.shape[0])
        return gather(self, layer, rows)

    monkeypatch.setattr(storage.KVStorage, "gather", counted)
    return counts


def grow(particles: list[Ids], program: random.Random) -> list[Ids]:
    return [(*ids, program.randrange(3, 300)) for ids in particles]


def test_a_population_that_grows_is_gathered_once(
    llama: TinyModel, gathered: list[int]
) -> None:
    engine, program = MLXEngine(llama.path, dtype="float32"), random.Random(0)
    particles = grow([tuple(range(3, 20))] * 5, program)
    assert largest_error(engine, particles, llama.logprobs) <= 1e-5
    gathered.clear()
    for step in range(12):
        if step % 4 == 3:  # some of them twice, some not at all, in another order
            particles = program.choices(particles, k=5)
        particles = grow(particles, program)
        assert largest_error(engine, particles, llama.logprobs) <= 1e-5
    assert gathered == []


def test_columns_are_added_as_particles_outgrow_them(
    long_llama: TinyModel, gathered: list[int]
) -> None:
    engine, program = MLXEngine(long_llama.path, dtype="float32"), random.Random(0)
    particles = grow([(5, 6, 7)] * 3, program)
    rows_of(engine, particles)
    gathered.clear()
    for step in range(2 * resident._STEP + 3):
        particles = grow(particles, program)
        rows = rows_of(engine, particles)
        if step % 20 == 0 or step > 2 * resident._STEP:
            expected = torch.stack([long_llama.logprobs(ids) for ids in particles])
            torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-4)
    assert gathered == []


def watch(engine: MLXEngine, budget: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare with the budget what storage and held batches take; how much the latter do."""
    path: Any = engine._choice.path
    settle, make_room = storage.KVStorage.settle, storage.KVStorage.make_room
    sizes: list[int] = []

    def settled(self: Any, *results: Any) -> None:
        """At the end of a pass, with what it holds itself."""
        layers = [layer for result in results if isinstance(result, list) for layer in result]
        layer_bytes = sum(array.nbytes for pair in layers for array in pair)
        sizes.append(path.forward._resident.nbytes + layer_bytes)
        assert self.nbytes + sizes[-1] <= budget
        settle(self, *results)

    def grown(self: Any, slot: int) -> None:
        make_room(self, slot)
        assert self.nbytes + path.forward._resident.nbytes <= budget

    monkeypatch.setattr(storage.KVStorage, "settle", settled)
    monkeypatch.setattr(storage.KVStorage, "make_room", grown)
    return sizes


@pytest.mark.parametrize("slots", [40, 90, 200])
def test_what_is_held_fits_into_the_budget_beside_the_storage(
    slots: int, llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_INITIAL_SLOTS", 4)
    budget = (slots + 1) * TOKEN_BYTES
    engine = MLXEngine(llama.path, dtype="float32", kv_budget_bytes=budget)
    resident_bytes = watch(engine, budget, monkeypatch)
    oracle = functools.cache(llama.logprobs)
    for step in population(slots, 20, count=5):
        assert largest_error(engine, step, oracle) <= 1e-5
    assert (max(resident_bytes) > 0) == (slots > 40)


def test_an_older_batch_makes_way_before_the_next_is_held(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_INITIAL_SLOTS", 64)
    budget = (
        64 + 200
    ) * TOKEN_BYTES  # of either population 5 * 26 tokens are held, not of both
    engine = MLXEngine(llama.path, dtype="float32", kv_budget_bytes=budget)
    resident_bytes = watch(engine, budget, monkeypatch)
    for first in (3, 100):
        step = [(*range(first, first + 25), i) for i in range(200, 205)]
        assert largest_error(engine, step, llama.logprobs) <= 1e-5
    assert resident_bytes[-1] == 5 * 26 * TOKEN_BYTES


def test_slots_that_get_other_tokens_are_not_taken_for_what_they_held(
    long_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven slots are used and the rest is requested at once, so the first are reused.

    The token whose past is looked for follows slot 6, which ended a held past.
    """
    monkeypatch.setattr(storage, "_INITIAL_SLOTS", 8)
    engine = MLXEngine(
        long_llama.path, dtype="float32", kv_budget_bytes=(207 + 1) * TOKEN_BYTES
    )
    assert largest_error(engine, [tuple(range(3, 9))], long_llama.logprobs) <= 1e-5
    program = random.Random(1)
    long, other = (tuple(program.choices(range(3, 300), k=100)) for _ in range(2))
    start = (250, 251, 252)
    step = [(249, *long), (249, *other), start, (*start, 10), (*start, 11)]
    assert largest_error(engine, step, long_llama.logprobs) <= 1e-4


def test_a_batch_that_would_be_mostly_padding_is_gathered_again(
    long_llama: TinyModel, gathered: list[int]
) -> None:
    engine, program = MLXEngine(long_llama.path, dtype="float32"), random.Random(0)
    long = tuple(program.choices(range(3, 300), k=100))
    pair = [(*long, 7), (9,)]
    for _ in range(2):
        assert largest_error(engine, pair, long_llama.logprobs) <= 1e-4
        pair = grow(pair, program)
    gathered.clear()
    alone = [(*pair[1][:-1], 8)]
    assert largest_error(engine, alone, long_llama.logprobs) <= 1e-4
    assert gathered == [1, 1]
