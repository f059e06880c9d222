"""`Python` against exact expectations over all draws, and against enumerations of texts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from constrained_model import (
    END,
    SPECIAL,
    TEXT_IDS,
    TOKENS,
    SmallEngine,
    probability,
    row,
    text_of,
    unpacked,
)

import genlm
from genlm.constraints import Automaton, Python, predicate
from genlm.constraints.rejection import Search
from genlm.core.base.blocking import run_blocking
from genlm.core.model.draw_settings import DrawSettings
from genlm.core.rows.row_weights import RowWeights
from genlm.smc import steer_sync

PROMPT = (2,)


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


def few_a(text: bytes) -> bool:
    return text.count(b"a") <= 1


def has_b(text: bytes) -> bool:
    return few_a(text) and b"b" in text


# -- the estimate ---------------------------------------------------------------------


def searched(
    orders: np.ndarray, q: np.ndarray, accepted: set[int], extra: int, first: int
) -> tuple[genlm.DrawnTokens, np.ndarray]:
    """The result of a search for each order of the tokens, and the chance of each order.

    The first round draws `first` tokens, the second all of them and one that is none.
    """
    size, count = orders.shape
    shares = q[orders] / (1 - np.cumsum(q[orders], axis=1) + q[orders])
    none = ((0, 0), (0, 1))
    token_ids = np.pad(orders, none, constant_values=-1)
    logprobs = np.pad(np.log(q)[orders], none, constant_values=-np.inf)
    draw_logprobs = np.pad(np.log(np.minimum(shares, 1)), none)
    constraint = SimpleNamespace(
        language=SimpleNamespace(extra_draws=extra),
        test_tokens=lambda members, ids, is_cancelled: np.isin(ids, [*accepted]),
        with_tokens=lambda *arguments, **options: None,
    )
    weights = RowWeights((size, count))
    search = Search(
        constraint, DrawSettings(np.arange(size), np.zeros(size, np.float32), weights)
    )
    result = None
    for k in (first, count + 1):
        if result is None:
            columns = (array[:, :k] for array in (token_ids, logprobs, draw_logprobs))
            ids, of_model, of_draw = map(torch.from_numpy, columns)
            result = search.take(genlm.DrawnTokens(ids, of_model, torch.zeros(size), of_draw))
    return result, shares.prod(1)


@pytest.mark.parametrize("first", [1, 2, 3, 5])
@pytest.mark.parametrize("extra", [1, 2, 4])
@pytest.mark.parametrize("accepted", [{0}, {3}, {0, 4}, {1, 2, 3}, {0, 1, 2, 3, 4}, set()])
def test_the_estimate_of_the_mass_is_unbiased_whatever_token_is_accepted(
    accepted, extra, first
):
    """The expectation over all 120 orders of five tokens is the probability of each."""
    q = np.array([0.05, 0.4, 0.25, 0.1, 0.2])
    orders = np.array([*itertools.permutations(range(5))])
    accepted_tokens, chances = searched(orders, q, accepted, extra, first)
    token_ids = accepted_tokens.token_ids.numpy()
    assert {*token_ids.tolist()} == (accepted or {-1})
    assert np.isneginf(accepted_tokens.log_mass.numpy()).all() == (not accepted)
    for token in accepted:
        weights = accepted_tokens.log_mass.double().exp().numpy() * (token_ids == token)
        assert (weights * chances).sum() == pytest.approx(q[token], rel=1e-6)


def test_more_draws_have_less_variance():
    rng, variances = np.random.default_rng(0), []
    q = np.array([0.3, 0.1, 0.2, 0.05, 0.15, 0.2])
    for extra in (1, 4):
        orders = np.array([rng.choice(6, 6, replace=False, p=q) for _ in range(1500)])
        accepted_tokens, _ = searched(orders, q, {0, 2, 3}, extra, 6)
        estimates = accepted_tokens.log_mass.exp()
        assert float(estimates.mean()) == pytest.approx(0.55, abs=0.03)
        variances.append(float(estimates.var()))
    assert variances[1] < 0.6 * variances[0]


# -- draws ----------------------------------------------------------------------------


def is_utf8_beginning(text: bytes) -> bool:
    return any(is_utf8(text + ending) for ending in (b"", b"\xa9"))


def drawn(llm: Any, language: Python, size: int, **options: Any) -> Any:
    constraint = language.start(llm, size)
    return run_blocking(constraint.draw(llm.population(PROMPT, size), **options))


@pytest.mark.parametrize("first_draws", [1, 2, 8])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "language",
    [
        Python(lambda text: b"b" in text, has_b),
        Python(lambda text: text.startswith(b"\xc3"), extra_draws=1),
        Python(lambda text: b"b" not in text, within=Automaton.regex("(a|é)(a|b|é)*")),
    ],
    ids=["b", "é", "within"],
)
def test_weighted_draws_have_the_models_probabilities(
    llm, language, temperature, first_draws, monkeypatch
):
    """The mean of the weight of each token is its probability; the seed is fixed."""
    monkeypatch.setattr(predicate, "_FIRST_DRAWS", first_draws)
    size = 4000
    tokens = drawn(llm, language, size, temperature=temperature, seed=7)
    masked = unpacked(language.start(llm, 1))
    allowed = {
        token
        for token in masked
        if (language.prefix(TOKENS[token]) if token != END else language.complete(b""))
    }
    exact = row(PROMPT).exp()
    ids = tokens.token_ids.numpy()
    assert set(ids.tolist()) <= allowed
    weights = tokens.log_mass.double().exp().numpy()
    for token in allowed:
        samples = weights * (ids == token)
        error = samples.std() / math.sqrt(size)
        assert abs(samples.mean() - float(exact[token])) < 4.5 * error + 1e-6
    mass = float(exact[sorted(allowed)].sum())
    error = weights.std() / math.sqrt(size)
    assert error < 0.03 * mass
    assert abs(weights.mean() - mass) < 4.5 * error + 1e-6
    np.testing.assert_allclose(tokens.logprobs, row(PROMPT)[ids], atol=1e-5)
    np.testing.assert_allclose(
        tokens.logprobs - tokens.draw_logprob, tokens.log_mass, atol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("shape", ["number", "tokens", "all"])
def test_draws_with_a_bias_have_the_weights_of_the_model_and_its_mass(llm, shape, temperature):
    size, rng = 4000, np.random.default_rng(5)
    by_token = rng.normal(size=len(TOKENS))
    by_token[TOKENS.index(b"b")] = -math.inf
    bias = {"number": np.full(size, 0.7), "tokens": by_token}.get(shape)
    if bias is None:
        bias = torch.from_numpy(np.tile(by_token, (size, 1)))
    added = np.full(len(TOKENS), 0.7) if shape == "number" else by_token
    language = Python(lambda text: text != b"a", lambda _: False, extra_draws=1)
    tokens = drawn(llm, language, size, temperature=temperature, bias=bias, seed=7)
    exact, ids = row(PROMPT).double().exp().numpy(), tokens.token_ids.numpy()
    allowed = [token for token in unpacked(language.start(llm, 1)) if token != END]
    allowed = [token for token in allowed if TOKENS[token] != b"a" and added[token] > -10]
    assert set(ids.tolist()) == set(allowed)
    masses = tokens.log_mass.double().exp().numpy()
    ratios = (tokens.logprobs - tokens.draw_logprob).double().exp().numpy()
    np.testing.assert_allclose(masses, ratios * np.exp(added[ids]), rtol=1e-5)
    for token in allowed:
        samples = ratios * (ids == token)
        error = samples.std() / math.sqrt(size)
        assert abs(samples.mean() - exact[token]) < 4.5 * error + 1e-6
    np.testing.assert_allclose(tokens.logprobs, row(PROMPT)[ids], atol=1e-5)


class ConfidentEngine(SmallEngine):
    """Probabilities to the power 30; those of likely tokens round to 1 in float32."""

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        return torch.log_softmax(30 * super().evaluate(queries), dim=1)


@pytest.mark.parametrize("engine", [SmallEngine, ConfidentEngine])
@pytest.mark.parametrize("temperature", [1.0, 0.05, 1e-4, 1e-30, 5e-324, 0.0])
def test_rejected_tokens_may_have_all_but_a_rounding_error_of_the_probability(
    engine, temperature
):
    """The only accepted token has the weight of its probability, after any draws."""
    with genlm.AsyncLM(engine) as llm:
        rows = llm.next_token_logprobs_sync(PROMPT)
        for text in (b"a", b"b", b"ab", "é".encode()):
            [token] = [place for place, each in enumerate(TOKENS) if each == text]
            language = Python(lambda found, text=text: found == text, lambda _: False)
            result = drawn(llm, language, 20, temperature=temperature, seed=1)
            assert (result.token_ids == token).all()
            np.testing.assert_allclose(result.log_mass, rows[token].item(), rtol=1e-5)
            np.testing.assert_allclose(result.logprobs, rows[token].item(), rtol=1e-5)
            np.testing.assert_allclose(result.draw_logprob, 0, atol=1e-4)


def test_temperature_0_selects_the_most_likely_accepted_tokens(llm):
    exact, ids = 0.0, PROMPT
    for _ in range(4):
        logprobs = row(ids)
        accepted = [
            token for token in TEXT_IDS if is_utf8_beginning(text_of((*ids[1:], token)))
        ]
        best = max(
            (token for token in accepted if few_a(text_of((*ids[1:], token)))),
            key=lambda token, logprobs=logprobs: logprobs[token],
        )
        exact, ids = exact + float(logprobs[best]), (*ids, best)
    *_, particles = steer_sync(
        llm,
        PROMPT,
        3,
        max_tokens=4,
        constraint=Python(few_a, lambda _: False),
        temperature=0,
    )
    assert [each.token_ids for each in particles.population] == [ids] * 3
    np.testing.assert_allclose(particles.log_weights, exact, rtol=1e-5)


def test_the_function_is_called_for_the_drawn_tokens_alone_and_once_for_each(llm):
    called: list[bytes] = []

    def prefix(text: bytes) -> bool:
        called.append(text)
        return True

    constraint = Python(prefix, lambda text: True).start(llm, 50)
    tokens = run_blocking(constraint.draw(llm.population(PROMPT, 50), seed=0))
    constraint.advance(tokens.token_ids)
    assert max(Counter(called).values()) == 1
    assert len(called) <= len(TEXT_IDS)
    texts: list[bytes] = []
    drawn(llm, Python(lambda text: bool(texts.append(text)) or True), 1, seed=1)
    assert 1 <= len(texts) <= 3


def test_the_first_round_draws_a_few_more_tokens_than_the_step_before_needed(llm, monkeypatch):
    counts: list[int] = []
    draw = genlm.Population._draw

    async def recorded(
        self: Any, settings: Any, seed: int | None, count: int, *args: Any
    ) -> Any:
        counts.append(count)
        return await draw(self, settings, seed, count, *args)

    monkeypatch.setattr(genlm.Population, "_draw", recorded)
    language = Python(lambda text: True, extra_draws=2)
    list(steer_sync(llm, PROMPT, 20, max_tokens=3, constraint=language, seed=0))
    assert counts == [8, 5, 5]
    counts.clear()
    language = Python(lambda text: not text or text.endswith(b"b"), extra_draws=2)
    list(steer_sync(llm, PROMPT, 20, max_tokens=2, constraint=language, seed=0))
    assert 5 < counts[-1] <= 32
    counts.clear()
    for extra_draws in (9, 500):  # the latter is more than there are tokens
        language = Python(lambda text: True, extra_draws=extra_draws)
        list(steer_sync(llm, PROMPT, 20, max_tokens=2, constraint=language, seed=0))
    assert counts == [10, len(TOKENS) + 1, len(TOKENS) + 1, len(TOKENS) + 1]


def test_tokens_that_were_not_drawn_are_tested(llm):
    """Also those of members that were copied after the draw."""
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    constraint = Python(few_a, has_b).start(llm, 3).advance([a, a, a])
    drawn = run_blocking(constraint.draw(llm.population([(2, a)] * 3), seed=1))
    drawn.token_ids[:] = a
    assert constraint.advance(drawn.token_ids).log_potential.tolist() == [-np.inf] * 3
    assert constraint[[2, 0]].advance([a, b]).log_potential.tolist() == [-np.inf, 0]
    assert constraint.advance([END, b, -1]).log_potential.tolist() == [-np.inf, 0, 0]


def test_tokens_outside_of_the_other_language_are_dead(llm):
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    constraint = Python(few_a, within=Automaton.regex("b+")).start(llm, 3)
    assert constraint.advance([a, b, END]).log_potential.tolist() == [-np.inf, 0, -np.inf]


def test_particles_of_a_language_end_with_the_stop_ids_of_the_filter(llm):
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    language = Automaton.regex("b+")
    *_, ended = steer_sync(llm, PROMPT, 50, max_tokens=3, constraint=language, stop=a, seed=0)
    finished = ended.population.finished.numpy()
    assert finished.any()
    for context, is_finished in zip(ended.population, finished, strict=True):
        *text, last = context.token_ids[len(PROMPT) :]
        assert {*text} <= {b}
        assert last == (a if is_finished else b)


def test_dead_and_finished_members_draw_nothing(llm):
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    constraint = Python(few_a, has_b).start(llm, 4).advance([a, b, b, SPECIAL])
    assert constraint.log_potential.tolist() == [0, 0, 0, -np.inf]
    constraint = constraint.advance([a, END, -1, a])
    assert constraint.log_potential.tolist() == [-np.inf, 0, 0, -np.inf]
    assert constraint.finished.tolist() == [False, True, False, False]
    population = llm.population([(2, a, a), (2, b, END), (2, b), (2, SPECIAL)])
    tokens = run_blocking(constraint.draw(population, seed=0))
    assert tokens.token_ids[[0, 1, 3]].tolist() == [-1, -1, -1]
    assert tokens.log_mass[[0, 1, 3]].tolist() == [-math.inf, 0, -math.inf]
    log_weights = tokens.logprobs - tokens.draw_logprob
    assert log_weights[[0, 1, 3]].tolist() == [-math.inf, 0, -math.inf]
    assert tokens.token_ids[2] >= 0
    selected = constraint[[2, 1]]
    assert selected.finished.tolist() == [False, True]
    assert selected.advance([END, END]).finished.tolist() == [True, True]


def test_a_function_that_accepts_nothing_leaves_no_token(llm):
    tokens = drawn(llm, Python(lambda text: False), 3, seed=0)
    assert tokens.token_ids.tolist() == [-1] * 3
    assert tokens.log_mass.tolist() == [-math.inf] * 3


def test_a_coroutine_function_is_refused(llm):
    async def accepts(text):
        return True

    with pytest.raises(TypeError, match="is a coroutine function"):
        drawn(llm, Python(accepts), 3, seed=0)


@pytest.mark.parametrize("result", [np.ones(2), torch.ones(2)])
def test_a_result_that_is_neither_true_nor_false_is_refused(llm, result):
    message = f"returned {type(result).__name__}, which is neither true nor false"
    with pytest.raises(TypeError, match=message):
        drawn(llm, Python(lambda _: result), 3, seed=0)


def test_a_finished_language_around_it_ends_or_kills(llm):
    """Without an end of text, where the automaton is over."""
    with genlm.AsyncLM(lambda: SmallEngine(tokenizer=None)) as endless:
        language = Python(lambda text: True, has_b, within=Automaton.regex("a|b"))
        ids = [TOKENS.index(b"a"), TOKENS.index(b"b")]
        constraint = language.start(endless, 2).advance(ids)
        assert constraint.finished.tolist() == [False, True]
        assert constraint.log_potential.tolist() == [-np.inf, 0]


# -- characters -----------------------------------------------------------------------


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_functions_see_valid_characters_of_which_the_last_may_be_incomplete(llm):
    ended, seen = [], []
    language = Python(
        lambda text: bool(seen.append(text)) or len(text) < 4,
        lambda text: bool(ended.append(text)) or True,
    )
    for seed in range(40):
        list(steer_sync(llm, PROMPT, 10, max_tokens=6, constraint=language, seed=seed))
    assert any(not is_utf8(text) for text in seen)
    endings = b"", b"\x80", b"\xa9"
    assert all(any(is_utf8(text + ending) for ending in endings) for text in seen)
    assert ended
    assert all(is_utf8(text) for text in ended)


# -- in a filter ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("within", "temperature"),
    [(None, 1.0), (Automaton.regex("[abé]*"), 1.4)],
    ids=["alone", "within"],
)
def test_evidence_and_weights_of_a_filter_are_those_of_enumeration(llm, within, temperature):
    """Texts of up to three tokens that end; the seeds are fixed."""
    exact = {
        (*ids, END): probability(PROMPT, (*ids, END))
        for length in range(3)
        for ids in itertools.product(TEXT_IDS, repeat=length)
        if is_utf8(text_of(ids)) and has_b(text_of(ids))
    }
    language, size, count = Python(few_a, has_b, within=within), 40, 100
    estimates = []
    for seed in range(count):
        *_, particles = steer_sync(
            llm,
            PROMPT,
            size,
            max_tokens=3,
            constraint=language,
            temperature=temperature,
            seed=seed,
        )
        mass = dict.fromkeys(exact, 0.0)
        for context, log_weight in zip(
            particles.population, particles.log_weights, strict=True
        ):
            ids = context.token_ids[1:]
            if ids[-1] == END and log_weight > -math.inf:
                mass[ids] += math.exp(log_weight) / size
        estimates.append([sum(mass.values()), *mass.values()])
    expected = np.array([sum(exact.values()), *exact.values()])
    likely = expected > 0.05 * expected[0]
    assert likely.sum() >= 4
    errors = np.std(estimates, axis=0, ddof=1)[likely] / math.sqrt(count)
    assert 0 < errors[0] < 0.08 * expected[0]
    deviations = np.abs(np.mean(estimates, axis=0) - expected)[likely]
    assert (deviations < 4.5 * errors).all()


def test_a_language_that_is_none_is_refused():
    with pytest.raises(TypeError, match="expected a function of bytes; found 'a'"):
        Python("a")
    with pytest.raises(ValueError, match="extra_draws"):
        Python(few_a, extra_draws=0)
    assert repr(Python(few_a, within=Automaton.regex("a"))) == (
        "<Python few_a within <Automaton of 2 states>>"
    )
