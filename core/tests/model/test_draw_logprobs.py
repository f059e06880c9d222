"""Log-probabilities with which `draw` and `sample` draw given tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genlm
from genlm import OutputCache, Population, PopulationError

from ..engine.test_group_sampling import SIZE, TinyEngine
from ..prefix.test_populations import SIZE as TREE_SIZE
from ..prefix.test_populations import Engine, expected

PROMPTS = [[1], [1, 2], [1], [3, 0], [2, 1]]


def oracle(
    row: np.ndarray[Any, Any], mask: Any, temperature: float, bias: Any, limits: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """The distribution of a draw in float64, from the definitions."""
    scores = np.where(mask, row.astype(np.float64) + bias, -np.inf)
    if scores.max() == -np.inf:
        return np.full(len(row), -np.inf)
    if temperature == 0:
        return np.where(np.arange(len(row)) == scores.argmax(), 0.0, -np.inf)
    weights = np.exp((scores - scores.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    allowed = np.zeros(len(row), bool)
    allowed[order[: limits.get("top_k") or len(row)]] = True
    within = np.where(allowed, weights, 0)[order]
    before = np.cumsum(within) - within
    allowed[order[before >= (limits.get("top_p") or math.inf) * within.sum()]] = False
    allowed &= weights >= (limits.get("min_p") or 0) * weights.max()
    with np.errstate(divide="ignore"):
        return np.log(np.where(allowed, weights, 0) / weights[allowed].sum())


@pytest.mark.parametrize("use_rows_of_tables", [False, True])
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_scores_are_those_of_the_draws(use_rows_of_tables: bool, data: st.DataObject) -> None:
    draw = data.draw
    engine = Engine(500) if use_rows_of_tables else TinyEngine()
    size = TREE_SIZE if use_rows_of_tables else SIZE
    count, seed = len(PROMPTS), draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "temperature": draw(
            st.sampled_from([1.0, 0.0, 0.3, random.choice([0.0, 0.5, 1.0, 2.0], count)])
        ),
        "bias": draw(
            st.sampled_from(
                [
                    0.0,
                    random.normal(size=count),
                    random.normal(size=(1, size)) * 3,
                    random.normal(size=(count, size)) * 3,
                ]
            )
        ),
        "top_k": draw(st.sampled_from([None, 1, 3])),
        "top_p": draw(st.sampled_from([None, 0.3, 0.8])),
        "min_p": draw(st.sampled_from([None, 0.2])),
    }
    masks = None
    if draw(st.booleans()):
        masks = random.random((draw(st.sampled_from([1, count])), size)) < 0.7
        masks[0] = draw(st.booleans())
    width = draw(st.integers(1, 4))
    ids = random.integers(0, size, (count, width))
    counts = random.integers(0, width + 1, count)
    ids[np.arange(width) >= counts[:, None]] = -1
    limits = {name: options[name] for name in ("top_k", "top_p", "min_p")}
    temperatures = np.broadcast_to(options["temperature"], count)
    biases = np.broadcast_to(
        options["bias"][:, None] if np.ndim(options["bias"]) == 1 else options["bias"],
        (count, size),
    )

    def correct(prompt: list[int], member: int, token: int) -> float:
        row = expected(None, prompt) if use_rows_of_tables else TinyEngine.row(prompt)
        mask = True if masks is None else masks[member % len(masks)]
        settings = temperatures[member], biases[member], limits
        return float(oracle(row.numpy(), mask, *settings)[token])

    with genlm.AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:
        population = llm.population(PROMPTS)
        if draw(st.booleans()):
            population.draw_sync(seed=0)
        scores = population.score_sync(ids, masks, **options)
        wanted = torch.zeros(scores.shape)
        for member, (prompt, row) in enumerate(zip(PROMPTS, ids.tolist(), strict=True)):
            for place, token in enumerate(row):
                if token >= 0:
                    wanted[member, place] = correct([*prompt, *row[:place]], member, token)
        torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=2e-5)
        firsts = population.token_logprobs_sync(ids[:, 0], masks, **options)
        torch.testing.assert_close(firsts, wanted[:, 0], rtol=1e-5, atol=2e-5)
        sampled = population.sample_sync(width, masks, **options, stop=(), seed=seed)
        again = population.score_sync(sampled.token_ids, masks, **options)
        torch.testing.assert_close(again, sampled.draw_logprob, rtol=1e-5, atol=2e-5)


def population(rows: torch.Tensor) -> tuple[genlm.AsyncLM, Population]:
    """A population whose member i has row i."""

    class Fixed(TinyEngine):
        def evaluate(self, queries: Any) -> torch.Tensor:
            return rows[[query.token_ids[-1] for query in queries]]

    llm = genlm.AsyncLM(Fixed, output_cache=OutputCache(0))
    return llm, llm.population([[place] for place in range(len(rows))])


def test_shares_that_underflow_are_finite() -> None:
    rows = torch.full((1, SIZE), -math.inf)
    rows[0, :3] = torch.tensor([0.6, 0.4 - 1e-7, 1e-7]).log()
    llm, members = population(rows)
    with llm:
        found = members.token_logprobs_sync([[0, 1, 2, 3]], temperature=0.05)[0].double()
        scores = rows[0, :4].double() / 0.05
        torch.testing.assert_close(found, scores - scores.logsumexp(0), rtol=1e-5, atol=1e-6)
        assert found[2] < -300
        only = members.token_logprobs_sync([[2, 0]], [[2]], temperature=0.05)[0]
        assert only.tolist() == [0.0, -math.inf]
        none = members.token_logprobs_sync([[2, 0]], bias=np.full(SIZE, -math.inf))
        assert none.tolist() == [[-math.inf] * 2]
        best = members.token_logprobs_sync([[0, 1]], temperature=0.0)
        assert best.tolist() == [[0.0, -math.inf]]


def test_a_mask_alone_is_a_setting_of_the_draws() -> None:
    rows = torch.log_softmax(torch.arange(SIZE).float()[None], -1)
    llm, members = population(rows)
    with llm:
        shares = torch.log_softmax(rows[0, [1, 3]], -1)
        wanted = [float(shares[0]), float(shares[1]), -math.inf, 0.0]
        ids = [[1, 3, 2, -1]]
        assert members.token_logprobs_sync(ids, [[1, 3]])[0].tolist() == pytest.approx(
            wanted, rel=1e-5
        )
        for token, logprob in zip(ids[0], wanted, strict=True):
            score = members.score_sync([[token]], [[1, 3]])
            assert score.tolist() == [[pytest.approx(logprob, rel=1e-5)]]


def test_members_share_the_weights_of_equal_settings_and_have_their_own_tokens() -> None:
    rows = torch.log_softmax(
        torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)), -1
    )
    llm, members = population(rows)
    with llm:
        order = [2, 0, 1, 2, 2, 0]
        ids = np.array([[0, 1], [3, -1], [2, 2], [5, 6], [-1, 1], [4, 0]])
        temperature = np.array([3, 2, 0.5, 1, 3, 2.0])
        found = members[order].token_logprobs_sync(ids, temperature=temperature)
        for place, (row, new) in enumerate(zip(order, ids, strict=True)):
            shares = torch.log_softmax(rows[row] / temperature[place], -1)
            wanted = torch.where(torch.from_numpy(new) < 0, 0, shares[new])
            torch.testing.assert_close(found[place], wanted, rtol=1e-5, atol=1e-6)
        assert members[[]].token_logprobs_sync([], temperature=2.0).shape == (0,)
        assert members[[]].score_sync([], temperature=2.0).shape == (0, 0)


@pytest.mark.parametrize("method", ["token_logprobs_sync", "score_sync"])
def test_errors_are_those_of_draws_and_name_the_members(method: str) -> None:
    with genlm.AsyncLM(TinyEngine, output_cache=OutputCache(0)) as llm:
        members = llm.population(PROMPTS)
        ids = np.ones((len(PROMPTS), 2), np.int64)
        call = getattr(members, method)
        with pytest.raises(ValueError, match="top_p=2"):
            call(ids, top_p=2.0)
        with pytest.raises(ValueError, match="mask_index without masks"):
            call(ids, mask_index=[0] * 5)
        with pytest.raises(ValueError, match="temperature=-1"):
            call(ids, temperature=-1.0)
        bias = np.zeros((len(PROMPTS), SIZE))
        bias[3, 2] = math.nan
        with pytest.raises(PopulationError, match="bias is NaN") as raised:
            call(ids, bias=bias)
        assert set(raised.value.members) == {3}
        call(ids, bias=0.0)  # the population is usable


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_speculative_decoding_has_the_distribution_of_the_target(temperature: float) -> None:
    """Members that a draft model continues and the target corrects, against enumeration."""
    count, length = 2_000, 2
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(2, SIZE, SIZE, generator=generator).log_softmax(-1)
    models = [population(matrix)[0] for matrix in matrices]
    target, draft = (llm.population([1], count) for llm in models)
    for seed in range(length):  # each round adds at least one token
        drafted = draft.sample_sync(2, temperature=temperature, stop=(), seed=2 * seed)
        scores = target.score_sync(drafted.token_ids, temperature=temperature)
        ratios = scores - drafted.draw_logprob
        kept = (torch.rand(ratios.shape, generator=generator).log() < ratios).int().cumprod(1)
        lengths = target.lengths + kept.sum(1)
        target = target.extend(drafted.token_ids).truncate(lengths)
        draft = drafted.population.truncate(lengths)
        rows, others = (
            (each.next_token_logprobs_sync() / temperature).softmax(1)
            for each in (target, draft)
        )
        remaining = (rows - others * (kept[:, -1:] == 0)).clamp(min=0)
        shares = (remaining / remaining.sum(1, keepdim=True)).log()
        last = target.draw_sync(rows=shares, seed=2 * seed + 1)
        target, draft = target.extend(last.token_ids), draft.extend(last.token_ids)
    texts = target.tokens[:, 1 : 1 + length]
    found = torch.bincount(texts[:, 0] * SIZE + texts[:, 1], minlength=SIZE**2) / count
    steps = (matrices[0].double() / temperature).softmax(-1)
    wanted = steps[1][:, None] * steps
    assert float((found.view(SIZE, SIZE) - wanted).abs().sum()) / 2 < 0.12
    other = (matrices[1].double() / temperature).softmax(-1)
    assert float((other[1][:, None] * other - wanted).abs().sum()) / 2 > 0.3
    for llm in models:
        llm.close()
