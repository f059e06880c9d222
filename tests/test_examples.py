"""The results of the programs in examples/ agree with sums over all cases."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import genlm
from genlm.constraints import Automaton

EXAMPLES = Path(__file__).parents[1] / "examples"
STOP = 256
DRAWS = 2000


def program(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


@pytest.fixture(scope="module")
def llm():
    with genlm.load_model("demo", "hf") as llm:
        yield llm


@pytest.fixture(scope="module")
def row(llm):
    """Next-token probabilities by an unbatched forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llm.tokenizer.name_or_path)

    @functools.cache
    @torch.inference_mode()
    def row(token_ids: tuple[int, ...]) -> np.ndarray:
        logits = model.eval()(torch.tensor([token_ids])).logits[0, -1]
        return logits.double().softmax(0).numpy()

    return row


@pytest.fixture(scope="module")
def next_byte_mass(llm, row):
    """Probabilities of a text followed by each byte or by the end, over all tokens."""

    def next_byte_mass(token_ids: tuple[int, ...], text: bytes) -> np.ndarray:
        mass = np.zeros(257)
        probabilities = row(token_ids)
        for token, probability in zip(llm.byte_vocab, probabilities, strict=True):
            written = token.byte_string
            if token.token_id == llm.tokenizer.eos_token_id:
                mass[STOP] += probability * (text == b"")
            elif len(written) > len(text) and written.startswith(text):
                mass[written[len(text)]] += probability
            elif text.startswith(written):
                longer = (*token_ids, token.token_id)
                mass += probability * next_byte_mass(longer, text[len(written) :])
        return mass

    return next_byte_mass


@pytest.mark.parametrize("text", [b"", b"T", b"The va", b"return "])
def test_next_bytes_are_summed_over_all_ways_to_write_the_text(llm, next_byte_mass, text):
    reader = genlm.ByteReader(llm, width=10_000)

    async def read() -> np.ndarray:
        await reader.start([0])
        await reader.read(text)
        return reader.probabilities()

    expected = next_byte_mass((0,), text)
    np.testing.assert_allclose(asyncio.run(read()), expected / expected.sum(), atol=1e-6)
    assert reader.logprob == pytest.approx(math.log(expected.sum()), abs=1e-4)


def test_a_narrow_beam_goes_on_through_a_long_text(llm):
    reader = genlm.ByteReader(llm, width=3)
    text = b"The following functions are defined in this module. " * 3

    async def read() -> np.ndarray:
        await reader.start([0])
        await reader.read(text)
        return reader.probabilities()

    assert asyncio.run(read()).sum() == pytest.approx(1)
    assert -4 * len(text) < reader.logprob < 0


def test_bytes_are_drawn_with_their_probabilities(llm):
    sampled = program("next_byte").sampled

    async def draw() -> tuple[Counter[bytes], np.ndarray]:
        reader = genlm.ByteReader(llm, width=8)
        await reader.start([0])
        await reader.read(b"The val")
        drawn = await asyncio.gather(*(sampled(reader, 1, seed) for seed in range(300)))
        return Counter(drawn), reader.probabilities()

    counts, row = asyncio.run(draw())
    found = np.array([counts[bytes([byte])] for byte in range(256)] + [counts[b""]]) / 300
    assert np.abs(found - row).sum() < 0.2


@pytest.mark.parametrize(("begun", "expected"), [([1], [1]), ([], [7])])
def test_a_text_begins_after_the_end_of_another_if_the_tokenizer_names_no_beginning(
    begun, expected
):
    vocabulary = SimpleNamespace(eos_token_id=7)
    llm = SimpleNamespace(encode=lambda text: begun, vocabulary=vocabulary)
    assert program("score").beginning(llm) == expected


@pytest.fixture(scope="module")
def probability_of(llm, row):
    """Probability that a text is written and then over, over all tokens that write it."""

    def probability_of(token_ids: tuple[int, ...], text: bytes) -> float:
        total = float(row(token_ids)[llm.tokenizer.eos_token_id]) if text == b"" else 0.0
        for token in llm.byte_vocab:
            if text.startswith(token.byte_string):
                longer = (*token_ids, token.token_id)
                rest = probability_of(longer, text[len(token.byte_string) :])
                total += row(token_ids)[token.token_id] * rest
        return total

    return probability_of


def test_constrained_draws_have_the_models_probabilities_of_the_grammar(llm, probability_of):
    grammar = program("grammar")
    compiled = grammar.compiler(llm).compile_regex(" (is|was) (a|an|the)")
    words = (" is", " was"), (" a", " an", " the")
    prompt = llm.tokenizer.encode("The value")
    exact = {
        text: probability_of(tuple(prompt), text.encode())
        for text in map("".join, itertools.product(*words))
    }

    async def draw() -> list[tuple[list[int], float]]:
        asked = (grammar.constrained(llm, compiled, prompt, seed) for seed in range(DRAWS))
        return await asyncio.gather(*asked)

    weights = {text: np.zeros(DRAWS) for text in exact}
    for draw_id, (token_ids, log_weight) in enumerate(asyncio.run(draw())):
        weights[llm.tokenizer.decode(token_ids)][draw_id] = math.exp(log_weight)
    evidence = sum(weights.values())
    error = evidence.std() / math.sqrt(DRAWS)
    assert error < 0.1 * evidence.mean()
    assert abs(evidence.mean() - sum(exact.values())) < 4 * error
    distance = sum(abs(weights[text].mean() - exact[text]) for text in exact)
    assert distance < 0.15 * evidence.mean()


def test_answers_have_their_probabilities_given_the_format(llm, probability_of):
    answers = program("answers").answers
    formats = {
        "The value": [" is a", " is an", " was a", " was the"],
        "If the file": [" is", " does", " was"],
        "The list": [" is a", " has no"],
    }
    languages = {prompt: Automaton.choice(texts) for prompt, texts in formats.items()}
    found = answers(llm, languages, 1000, seed=4)
    for particles, (prompt, texts) in zip(found, formats.items(), strict=True):
        prompt_ids = tuple(llm.encode(prompt))
        exact = np.array([probability_of(prompt_ids, text.encode()) for text in texts])
        weights = [particles.text_weights.get(text, 0.0) for text in texts]
        assert sum(weights) == pytest.approx(1)
        np.testing.assert_allclose(weights, exact / exact.sum(), atol=0.06)
        assert particles.log_evidence == pytest.approx(math.log(exact.sum()), abs=0.1)


def test_scores_are_those_of_unbatched_passes(llm, row):
    score = program("score")

    def expected(token_ids: list[int], context: list[int]) -> float:
        text = context + token_ids
        places = range(len(context), len(text))
        return sum(math.log(row(tuple(text[:end]))[text[end]]) for end in places)

    first, second = (llm.tokenizer.encode(text) for text in ("The value", " is a list."))
    found = score.logprobs(llm, [second, first], [first, second])
    exact = [expected(second, first), expected(first, second)]
    assert found == pytest.approx(exact, abs=1e-4)
    found = score.mutual_information(llm, "The value", " is a list.")
    assert found == pytest.approx(
        expected(second, [0, *first]) - expected(second, [0]), abs=1e-4
    )


@pytest.mark.parametrize("name", ["answers", "grammar", "next_byte", "score"])
def test_the_examples_are_short_and_run_by_the_name_of_an_engine(capsys, monkeypatch, name):
    path = EXAMPLES / f"{name}.py"
    for engine in ("hf", "reference"):
        monkeypatch.setattr("sys.argv", [str(path), "demo", engine])
        runpy.run_path(str(path), run_name="__main__")
        assert len(capsys.readouterr().out.splitlines()) >= 3
    assert len(path.read_text().splitlines()) <= 50
