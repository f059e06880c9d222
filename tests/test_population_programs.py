"""The programs on populations in examples/ agree with closed forms of `reference`.

The models are of order 2, so a row depends on one token. All rows make a matrix of float64, and
sums over all texts are products of such matrices.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import genlm
from genlm.core.reference.ngram import exact_row

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = (
    *("power_mcmc", "power_smc", "reward_smc", "ensemble", "beam_search"),
    *("twisted", "distil", "importance", "intersection"),
)
END = 256
LETTERS = b" .abcd"
TEXTS = ("ab a bcd ab. aab ba dab", "abba ab dad. bad cab a b")
RUNS = 150
CHAINS = 4000


def program(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


@pytest.fixture(scope="module")
def models() -> Iterator[list[genlm.AsyncLM]]:
    """Two models of the same bytes."""
    found = [genlm.load_model("demo", "reference", text=text, order=2) for text in TEXTS]
    yield found
    for llm in found:
        llm.close()


@pytest.fixture(scope="module")
def matrices() -> list[np.ndarray]:
    """Of each model the probability of each token after each token, from the formula."""
    return [
        np.stack([exact_row([text.encode()], [token], 2) for token in range(END + 1)])
        for text in TEXTS
    ]


def going_on(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Sum over all continuations of at most so many tokens, by the token before them."""
    total = np.ones(END + 1)
    for _ in range(steps):
        total = matrix[:, END] + matrix[:, :END] @ total[:END]
    return total


def assert_unbiased(estimates: list[float], exact: float) -> None:
    """The mean is within four standard errors, and these are small."""
    error = np.std(estimates) / math.sqrt(len(estimates))
    assert error < 0.1 * exact
    assert abs(np.mean(estimates) - exact) < 4 * error


def mean_weight(log_weights: np.ndarray) -> float:
    return float(np.exp(log_weights).mean())


def weighted(
    keys: Any, log_weights: np.ndarray, found: dict[Any, float], runs: int = RUNS
) -> None:
    """Add the weights of particles to the totals of all runs."""
    for key, weight in zip(keys, np.exp(log_weights) / len(log_weights) / runs, strict=True):
        found[key] = found.get(key, 0.0) + weight


def distance(found: dict[Any, float], exact: dict[Any, float]) -> float:
    """Half the sum of differences, as a share of the exact total."""
    keys = found.keys() | exact.keys()
    differences = sum(abs(found.get(key, 0) - exact.get(key, 0)) for key in keys)
    return differences / 2 / sum(exact.values())


@pytest.mark.parametrize("block", [1, 2])
def test_power_smc_has_the_weights_of_the_power(models, matrices, block):
    llm, alpha, steps, start = models[0], 3.0, 4, ord("a")
    power_smc, power = program("power_smc").power_smc, matrices[0] ** 3
    estimates, found = [], {}
    for seed in range(RUNS):
        particles, log_weights = power_smc(
            llm, [start], 24, alpha=alpha, max_tokens=steps, block=block, seed=seed
        )
        estimates.append(mean_weight(log_weights))
        weighted(particles.tokens[:, 1].tolist(), log_weights, found)
    total = going_on(power, steps)
    assert_unbiased(estimates, total[start])
    after = going_on(power, steps - 1)
    exact = {token: power[start, token] * after[token] for token in range(END)}
    exact[END] = power[start, END]
    assert distance(found, exact) < 0.1


def test_power_mcmc_has_the_distribution_of_the_power(models, matrices):
    llm, alpha, steps, start = models[0], 2.0, 4, ord("a")
    power_mcmc, power = program("power_mcmc").power_mcmc, matrices[0] ** alpha
    texts, share = power_mcmc(
        llm, [32, start], CHAINS, alpha=alpha, max_tokens=steps, moves=60, seed=2
    )
    assert 0.3 < share < 0.9
    found: dict[Any, float] = {}
    for text in texts.tokens[:, 2:].tolist():
        key = text[0], END if END in text else text[-1]
        found[key] = found.get(key, 0.0) + 1 / CHAINS
    power[END] = np.arange(END + 1) == END  # the texts that have ended
    weights = power[start][:, None] * np.linalg.matrix_power(power, steps - 1)
    exact = {key: weight / weights.sum() for key, weight in np.ndenumerate(weights)}
    assert distance(found, exact) < 0.06  # that of the proposals is 0.35


class Judge:
    """A population that records what the members are when they are scored."""

    def __init__(self, population: genlm.Population, seen: list[Any]) -> None:
        self.population = population
        self.seen = seen

    def __getitem__(self, index: Any) -> Judge:
        return Judge(self.population[index], self.seen)

    def extend(self, token_ids: Any) -> Judge:
        return Judge(self.population.extend(token_ids), self.seen)

    def score_sync(self, token_ids: Any) -> Any:
        self.seen.append(self.population.tokens[:, 2:])
        return self.population.score_sync(token_ids)


def test_blocks_that_are_rewarded_have_the_weights_of_the_product(models, matrices):
    reward_smc, start, judged = program("reward_smc").reward_smc, ord("a"), ord("d")
    first, second = matrices[0], matrices[1] ** 1.5
    product = first * second
    estimates, found = [], {}
    for seed in range(RUNS):
        particles = models[0].population([start], 16)
        judge = Judge(models[1].population([ord("b"), judged], 16), [])
        particles, log_weights = reward_smc(
            particles, judge, scale=1.5, blocks=2, block=2, stop=END, seed=seed
        )
        scored = judge.seen[-1]
        assert (particles.tokens[:, 1 : 1 + scored.shape[1]] == scored).all()
        estimates.append(mean_weight(log_weights))
        weighted(particles.tokens[:, 1].tolist(), log_weights, found)
    beginning = first[start] * second[judged]
    after = going_on(product, 3)
    exact = {token: beginning[token] * after[token] for token in range(END)}
    exact[END] = beginning[END]
    assert_unbiased(estimates, sum(exact.values()))
    assert distance(found, exact) < 0.1


def test_products_of_models_have_the_weights_of_the_product(models, matrices):
    ensemble, found, estimates = program("ensemble").ensemble, {}, []
    for seed in range(50):
        texts, log_weights = asyncio.run(
            ensemble(models, b"a", 16, combine=np.add, max_bytes=3, seed=seed)
        )
        estimates.append(mean_weight(log_weights))
        weighted([text[:1] for text in texts], log_weights, found, 50)
    product = matrices[0] * matrices[1]
    after, start = going_on(product, 2), ord("a")
    exact = {bytes([byte]): product[start, byte] * after[byte] for byte in range(END)}
    exact[b""] = product[start, END]
    assert_unbiased(estimates, going_on(product, 3)[start])
    assert distance(found, exact) < 0.05


def test_mixtures_of_models_are_drawn_with_equal_weights(models, matrices):
    """The prompt tells how likely each model is."""
    ensemble, found = program("ensemble").ensemble, {}
    for seed in range(40):
        texts, log_weights = asyncio.run(
            ensemble(models, b"ca", 30, combine=np.logaddexp, max_bytes=2, seed=seed)
        )
        assert np.abs(log_weights).max() < 1e-6
        keys = [text if set(text) <= set(LETTERS) else None for text in texts]
        weighted(keys, log_weights, found, 40)
    prior = np.array([each[END, ord("c")] * each[ord("c"), ord("a")] for each in matrices])
    assert 0.1 < prior[0] / prior.sum() < 0.9
    exact = {}
    for share, each in zip(prior / prior.sum(), matrices, strict=True):
        exact[b""] = exact.get(b"", 0) + share * each[ord("a"), END]
        for byte in LETTERS:
            begun = share * each[ord("a"), byte]
            after = [each[byte, END], *each[byte, list(LETTERS)]]
            keys = [bytes([byte]), *(bytes([byte, last]) for last in LETTERS)]
            for key, probability in zip(keys, after, strict=True):
                exact[key] = exact.get(key, 0) + begun * probability
    exact[None] = 1 - sum(exact.values())
    assert distance(found, exact) < 0.1


def test_continuations_of_two_experts_have_the_weights_of_the_product(models, matrices):
    intersect, starts = program("intersection").intersect, (ord("a"), ord("d"))
    product = matrices[0] * matrices[1]
    estimates, found = [], {}
    for seed in range(RUNS):
        experts = (
            llm.population([start], 16) for llm, start in zip(models, starts, strict=True)
        )
        particles, log_weights = intersect(*experts, max_tokens=3, end=END, seed=seed)
        estimates.append(mean_weight(log_weights))
        weighted(particles.tokens[:, 1].tolist(), log_weights, found)
    first = matrices[0][starts[0]] * matrices[1][starts[1]]
    after = going_on(product, 2)
    exact = {token: first[token] * after[token] for token in range(END)}
    exact[END] = first[END]
    assert_unbiased(estimates, sum(exact.values()))
    assert distance(found, exact) < 0.1


def test_texts_that_another_model_proposes_have_the_weights_of_the_base_model(models, matrices):
    importance, starts = program("importance").importance, (ord("a"), ord("d"))
    estimates, found = [], {}
    for seed in range(RUNS):
        both = (llm.population([start], 50) for llm, start in zip(models, starts, strict=True))
        particles, log_weights = importance(*both, max_tokens=2, end=END, seed=seed)
        estimates.append(mean_weight(log_weights))
        weighted(particles.tokens[:, 1].tolist(), log_weights, found)
    assert_unbiased(estimates, 1.0)
    assert distance(found, dict(enumerate(matrices[0][starts[0]]))) < 0.1


def test_beam_search_with_enough_beams_is_exhaustive(models, matrices):
    beams, scores = program("beam_search").beam_search(
        models[0], [ord("a")], END + 1, max_tokens=2
    )
    rows = np.log(matrices[0])
    texts = {(END,): rows[ord("a"), END]} | {
        (first, second): rows[ord("a"), first] + rows[first, second]
        for first, second in itertools.product(range(END), range(END + 1))
    }
    best = sorted(texts.values(), reverse=True)[: END + 1]
    np.testing.assert_allclose(scores, best, atol=1e-5)
    assert len(beams) == END + 1
    found = [tuple(beam.token_ids[1:]) for beam in beams]
    assert len(set(found)) == len(found)
    np.testing.assert_allclose(scores, [texts[text] for text in found], atol=1e-5)


@pytest.mark.parametrize("width", [3, 40])
def test_beams_are_those_of_a_search_by_lists(models, matrices, width):
    """The same search, one beam after the other."""
    rows = np.log(matrices[1])
    beams = [((ord("a"),), 0.0)]
    for _ in range(4):
        grown = [each for each in beams if each[0][-1] == END]
        grown += [
            ((*text, token), score + rows[text[-1], token])
            for text, score in beams
            if text[-1] != END
            for token in range(END + 1)
        ]
        beams = sorted(grown, key=lambda each: -each[1])[:width]
    _, scores = program("beam_search").beam_search(models[1], [ord("a")], width, max_tokens=4)
    np.testing.assert_allclose(scores, [score for _, score in beams], atol=1e-5)


def test_twisted_particles_have_the_weights_of_the_constraint(models, matrices):
    twisted, estimates, start, space = program("twisted").twisted, [], ord("b"), ord(" ")
    for seed in range(RUNS):
        particles, log_weights = twisted(
            models[0], [start], 16, spaces=2, max_tokens=5, seed=seed
        )
        estimates.append(mean_weight(log_weights))
        tokens = particles.tokens[:, 1:]
        assert tokens.shape == (16, 5)
        assert ((tokens == space).sum(1) == 2).all()
    states = np.zeros((END + 1, 3))  # [last token, spaces so far]
    states[start, 0] = 1
    for _ in range(5):
        following = matrices[0].T @ states
        following[END] = 0
        following[space] = np.roll(following[space], 1)
        following[space, 0] = 0
        states = following
    assert_unbiased(estimates, states[:, 2].sum())


def test_losses_of_a_student_are_those_in_float64(models, matrices):
    distil = program("distil")
    text = list(b" dab. a bc")
    prompts = [ord("c"), ord("d"), ord("a")], [ord("b")]
    before = [[prompt[-1], *text[:-1]] for prompt in prompts]
    teacher, student = (each[ids] for each, ids in zip(matrices, before, strict=True))
    exact = (teacher * np.log(teacher / student)).sum(1)
    for piece in (3, 128):
        found = distil.divergences(models[0], prompts[0], models[1], prompts[1], text, piece)
        np.testing.assert_allclose(found, exact, atol=1e-5)
    logprobs, _ = models[0].reduce_text_sync(
        [*prompts[0], *text], lambda rows: rows.topk(4), len(prompts[0])
    )
    np.testing.assert_allclose(logprobs, np.log(-np.sort(-teacher)[:, :4]), atol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_are_short_and_run_by_the_name_of_an_engine(capsys, monkeypatch, name):
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "demo", "reference"])
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert len(path.read_text().splitlines()) <= 50
