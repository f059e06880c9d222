"""The SMC example is exact where exactness can be enumerated."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import run_code, run_program

import genlm
import genlm.smc
from genlm.cli import smc
from genlm.constraints import Constraint
from genlm.smc import filters

EOS = 0
TOKENS = [b"<end>", b"a", b"bb", b" ", b"a b"]
LIMIT = 2
TOKENIZER = SimpleNamespace(eos_token_id=EOS)
STEPS = 4
REPOSITORY = Path(__file__).parents[3]


class TinyEngine(genlm.BatchEngine):
    """Five tokens, each with a fixed random row after every sequence."""

    def __init__(self, tokenizer: Any = TOKENIZER, max_context: int | None = None) -> None:
        byte_vocab = [genlm.Token(index, token) for index, token in enumerate(TOKENS)]
        names = [repr(token) for token in TOKENS]
        self.vocabulary = genlm.Vocabulary(tokenizer, byte_vocab, names)
        self.max_context = max_context

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        return torch.stack([row(query.token_ids) for query in queries])


@functools.cache
def row(token_ids: tuple[int, ...]) -> torch.Tensor:
    """Peaked rows, so that weights differ and resampling happens."""
    logits = np.random.default_rng((1, *token_ids)).normal(scale=2.0, size=len(TOKENS))
    logits[EOS] -= 2
    return torch.log_softmax(torch.from_numpy(logits), dim=0).float()


def obeys(token_ids: Sequence[int], limit: int = LIMIT) -> bool:
    text = b"".join(TOKENS[token_id] for token_id in token_ids if token_id != EOS)
    return all(len(word) <= limit for word in re.findall(rb"[a-zA-Z\x80-\xff]+", text))


def outcomes(prompt: tuple[int, ...], steps: int = STEPS) -> dict[tuple[int, ...], float]:
    """Every sequence the model can draw, with its probability."""
    finished: dict[tuple[int, ...], float] = {}
    growing = {prompt: 1.0}
    for _ in range(steps):
        grown: dict[tuple[int, ...], float] = {}
        for sequence, p in growing.items():
            for token_id, q in enumerate(row(sequence).double().exp().tolist()):
                place = finished if token_id == EOS else grown
                place[(*sequence, token_id)] = p * q
        growing = grown
    return finished | growing


@pytest.fixture
def llm() -> Iterator[genlm.AsyncLM]:
    with genlm.AsyncLM(TinyEngine) as model:
        yield model


class TableConstraint(Constraint):
    """A table of the state after each state and token, of which the last is dead."""

    def __init__(self, table: np.ndarray, states: np.ndarray) -> None:
        self.table, self.states = table, states
        self.finished = np.zeros(len(states), bool)
        self.log_potential = np.where(states == len(table) - 1, -np.inf, 0.0)

    def masks(self) -> Any:
        return self.table < len(self.table) - 1, self.states

    def advance(self, token_ids: Any) -> TableConstraint:
        after = self.table[self.states, token_ids]
        return TableConstraint(self.table, np.where(token_ids < 0, self.states, after))

    def __getitem__(self, ancestors: Any) -> TableConstraint:
        return TableConstraint(self.table, self.states[ancestors])


def run(llm: genlm.AsyncLM, prompt: tuple[int, ...], *, seed: int, **options: Any) -> list[Any]:
    """Texts, weights (None without any) and log-evidence after each step."""
    [history] = run_all(llm, prompt, [seed], **options)
    return history


def run_all(
    llm: genlm.AsyncLM,
    prompt: tuple[int, ...],
    seeds: Iterable[int],
    *,
    size: int,
    steps: int = STEPS,
    table: np.ndarray | None = None,
    resample_below: float = 0.5,
) -> list[list[Any]]:
    """What `run` returns, for each of these seeds."""
    text = b"".join(TOKENS[token_id] for token_id in prompt)
    rule: Constraint = smc.max_word_length(LIMIT).start(llm, size, text=text)
    if table is not None:
        rule = TableConstraint(table, np.zeros(size, np.int64))

    async def collect(seed: int) -> list[Any]:
        history = []
        async for particles in genlm.smc.steer(
            llm,
            list(prompt),
            size,
            max_tokens=steps,
            constraint=rule,
            resample_below=resample_below,
            seed=seed,
        ):
            texts = [context.token_ids for context in particles.population]
            has_weight = np.isfinite(particles.log_weights).any()
            history.append(
                (texts, particles.weights if has_weight else None, particles.log_evidence)
            )
        return history

    async def collect_all() -> list[list[Any]]:
        return await asyncio.gather(*map(collect, seeds))

    return asyncio.run(collect_all())


@given(st.binary(max_size=12), st.integers(0, 4))
def test_the_automaton_agrees_with_splitting_the_text_into_words(
    text: bytes, limit: int
) -> None:
    words = re.findall(rb"[a-zA-Z\x80-\xff]+", text)
    expected = max(map(len, words), default=0) <= limit
    assert (text in smc.max_word_length(limit)) == expected


@pytest.mark.parametrize("prompt", [(3,), (1,)])
def test_the_evidence_is_unbiased(
    llm: genlm.AsyncLM, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also against each sequence alone: E[Z weight(x)] is the probability of x.

    The mean of 1,200 independent estimates is within 4.5 standard errors of the truth with
    probability above 1 - 1e-5; the seeds are fixed, so it is either always so or never.
    """
    resample = Mock(wraps=filters.filter_ancestors)
    monkeypatch.setattr(filters, "filter_ancestors", resample)
    allowed = {x: p for x, p in outcomes(prompt).items() if obeys(x)}
    evidence, masses = [], []
    for history in run_all(llm, prompt, range(1200), size=6, resample_below=0.7):
        particles, weights, log_evidence = history[-1]
        estimate = math.exp(log_evidence)
        evidence.append(estimate)
        mass = dict.fromkeys(allowed, 0.0)
        for particle, weight in zip(particles, weights, strict=True):
            mass[particle] += estimate * weight
        masses.append(list(mass.values()))
    assert resample.call_count > 60, "resampling hardly happened"
    exact = sum(allowed.values())
    error = np.std(evidence, ddof=1) / np.sqrt(len(evidence))
    assert 0 < 4.5 * error < 0.1 * exact, "the bound says nothing"
    assert abs(np.mean(evidence) - exact) < 4.5 * error
    probabilities = np.array(list(allowed.values()))
    likely = probabilities > 0.02 * exact
    errors = np.std(masses, axis=0, ddof=1)[likely] / np.sqrt(len(masses))
    deviations = np.abs(np.mean(masses, axis=0) - probabilities)[likely]
    assert likely.sum() >= 5
    assert (deviations < 4.5 * errors).all()


@pytest.mark.parametrize("size", [1, 2, 30])
def test_every_particle_obeys_and_weights_sum_to_one(llm: genlm.AsyncLM, size: int) -> None:
    prompt = (3, 1)
    for populations in run_all(llm, prompt, range(10), size=size):
        assert 1 <= len(populations) <= STEPS
        for step, (particles, weights, log_evidence) in enumerate(populations, start=1):
            assert len(particles) == len(weights) == size
            assert weights.sum() == pytest.approx(1, abs=1e-12)
            assert (weights >= 0).all()
            assert log_evidence <= 0
            ended = all(particle[-1] == EOS for particle in particles)
            assert not ended or step == len(populations)
            for particle in particles:
                assert obeys(particle)
                assert particle[:2] == prompt
                assert EOS not in particle[:-1]
                assert len(particle) == 2 + step or particle[-1] == EOS


def test_one_particle_has_the_product_of_the_masses_it_was_left(llm: genlm.AsyncLM) -> None:
    for history in run_all(llm, (3,), range(20), size=1):
        [particle], weights, log_evidence = history[-1]
        expected = 0.0
        for position in range(1, len(particle)):
            before = particle[:position]
            allowed = [obeys((*before, token_id)) for token_id in range(len(TOKENS))]
            expected += math.log(row(before).double().exp()[allowed].sum())
        assert log_evidence == pytest.approx(expected, abs=1e-5)
        assert weights == [1]


def test_without_a_constraint_the_evidence_is_one(llm: genlm.AsyncLM) -> None:
    everything = np.zeros((2, len(TOKENS)), dtype=np.int64)
    particles, weights, log_evidence = run(llm, (3,), size=40, seed=0, table=everything)[-1]
    assert log_evidence == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(weights, 1 / 40, rtol=1e-5)
    assert len(set(particles)) > 10


def test_a_dead_end_costs_its_weight_and_keeps_the_evidence_unbiased(
    llm: genlm.AsyncLM,
) -> None:
    # From state 0: token 1 to where anything goes, 2 into the trap, 3 stays.
    trap, dead = 2, 3
    table = np.full((4, len(TOKENS)), dead)
    table[0, [1, 2, 3]] = 1, trap, 0
    table[1] = 1
    exact = 0.0
    for sequence, p in outcomes((3,), steps=2).items():
        state = 0
        for token_id in sequence:
            state = table[state, token_id]
        exact += p * (state != dead)
    evidence, trapped = [], 0
    for history in run_all(llm, (3,), range(400), size=4, table=table, steps=2):
        particles, weights, log_evidence = history[-1]
        evidence.append(math.exp(log_evidence))
        if weights is None:  # every particle went into the trap
            assert log_evidence == -math.inf
            assert set(particles) == {(3, 2)}
            continue
        for particle, weight in zip(particles, weights, strict=True):
            assert (weight == 0) == (particle == (3, 2))
            trapped += weight == 0
    error = np.std(evidence, ddof=1) / np.sqrt(len(evidence))
    assert trapped > 10
    assert 0 < 4.5 * error < 0.2 * exact
    assert abs(np.mean(evidence) - exact) < 4.5 * error


def test_the_filter_ends_when_no_particle_has_a_weight(llm: genlm.AsyncLM) -> None:
    nowhere = np.full((2, len(TOKENS)), 1)
    [(particles, weights, log_evidence)] = run(llm, (3,), size=3, seed=0, table=nowhere)
    assert particles == [(3,)] * 3
    assert weights is None
    assert log_evidence == -math.inf


def test_seeds_reproduce_and_differ(llm: genlm.AsyncLM) -> None:
    first, again, other = (run(llm, (3,), size=10, seed=seed)[-1] for seed in (5, 5, 6))
    assert first[0] == again[0]
    assert first[2] == again[2]
    np.testing.assert_array_equal(first[1], again[1])
    assert first[0] != other[0]


def test_the_example_is_the_same_file_and_short() -> None:
    example = REPOSITORY / "examples" / "smc.py"
    assert example.samefile(Path(smc.__file__))
    assert len(example.read_text().splitlines()) <= 50


def test_texts_end_where_the_context_is_full() -> None:
    with genlm.AsyncLM(lambda: TinyEngine(max_context=3)) as llm:
        populations = run(llm, (3,), size=20, seed=0, steps=100)
        assert len(populations) == 3
        particles, weights, log_evidence = populations[-1]
        assert weights.sum() == pytest.approx(1)
        assert math.isfinite(log_evidence)
        assert {len(particle) for particle in particles if particle[-1] != EOS} == {4}


def test_a_model_that_never_ends_its_texts_is_steered_too() -> None:
    with genlm.AsyncLM(lambda: TinyEngine(tokenizer=None)) as llm:
        particles, weights, _ = run(llm, (3,), size=10, seed=0)[-1]
        assert {len(particle) for particle in particles} == {1 + STEPS}
        assert weights.sum() == pytest.approx(1)


def test_the_example_runs_as_a_script_and_names_its_engine() -> None:
    script = REPOSITORY / "examples" / "smc.py"
    program = run_program(sys.executable, script, "demo", "reference")
    title, _, *lines = program.stdout.splitlines()
    assert title.startswith("50 particles after ")
    assert len(lines) > 5
    for line in lines[:-1]:
        weight, _, text = line.split(maxsplit=2)
        assert 0 <= float(weight) <= 1
        assert max(map(len, re.findall("[a-zA-Z]+", text))) <= 5


def test_the_example_takes_no_engine_silently() -> None:
    script = REPOSITORY / "examples" / "smc.py"
    code = (
        "import runpy, sys\n"
        "script = sys.argv.pop()\n"
        "from unittest import mock\n"
        "with mock.patch('genlm.load_model', side_effect=SystemExit) as load:\n"
        "    try: runpy.run_path(script, run_name='__main__')\n"
        "    except SystemExit: print(load.call_args.args)\n"
    )
    assert run_code(code, script).stdout == "('demo',)\n"
