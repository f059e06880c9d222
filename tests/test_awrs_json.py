"""The example of schema and check: its evidence and weights are those of an enumeration."""

from __future__ import annotations

import itertools
import json
import math
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import genlm

pytest.importorskip("xgrammar")

EXAMPLE = Path(__file__).parents[1] / "examples" / "awrs_json.py"
PROMPT = ">>> sorted(digits)\n"
DOCUMENTS = {
    json.dumps(digits).encode()
    for length in (2, 3)
    for digits in itertools.combinations(range(10), length)
}
PREFIXES = {document[:length] for document in DOCUMENTS for length in range(len(document) + 1)}


@pytest.fixture(scope="module")
def program() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


LISTS = "".join(
    f"{PROMPT}{list(digits)}\n\n"
    for digits in [*itertools.product(range(10), repeat=2), *[(1, 4, 6), (7, 2, 9)] * 40]
)


@pytest.fixture(scope="module", params=["reference", "hf"])
def llm(request):
    """For the reference, a model of lists, most of which are not ascending."""
    options = {"text": LISTS} if request.param == "reference" else {}
    with genlm.load_model("demo", request.param, **options) as model:
        yield model


def exact_masses(llm: genlm.AsyncLM) -> Counter[bytes]:
    """The probability that each document is written and then over, over all its tokens."""
    prompt, end, found = llm.encode(PROMPT), llm.vocabulary.eos_token_id, Counter()
    apart = llm.vocabulary.special_ids
    tokens = [(token.token_id, token.byte_string) for token in llm.byte_vocab]
    tokens = [(key, text) for key, text in tokens if text and key not in apart]
    tokens = [(key, text) for key, text in tokens if any(text in each for each in DOCUMENTS)]
    growing = {(): (b"", 0.0)}
    while growing:
        rows = llm.batch_next_token_logprobs_sync([[*prompt, *ids] for ids in growing])
        grown = {}
        for row, (ids, (text, logprob)) in zip(rows.double(), growing.items(), strict=True):
            if text in DOCUMENTS:
                found[text] += math.exp(logprob + float(row[end]))
            for key, more in tokens:
                if text + more in PREFIXES:
                    grown[*ids, key] = text + more, logprob + float(row[key])
        growing = grown
    assert found.keys() == DOCUMENTS
    return found


def test_evidence_and_weights_are_those_of_all_ascending_lists(llm, program):
    """The means of independent runs, whose seeds are fixed."""
    exact = exact_masses(llm)
    count = 30
    estimates, masses = np.empty(count), [Counter() for _ in range(count)]
    for seed in range(count):
        particles = program.ascending_lists(llm, PROMPT, 60, seed)
        alive = np.isfinite(particles.log_weights)
        assert particles.population.finished.all()
        estimates[seed] = math.exp(particles.log_evidence)
        for text, log_weight in zip(particles.texts, particles.log_weights, strict=True):
            if log_weight > -math.inf:
                assert text.encode() in DOCUMENTS
                masses[seed][text.encode()] += math.exp(log_weight) / 60
        assert alive.any()
    mass, error = exact.total(), estimates.std(ddof=1) / math.sqrt(count)
    assert error < 0.12 * mass
    assert abs(estimates.mean() - mass) < 4.5 * error
    for document, expected in exact.most_common(3):
        values = np.array([each[document] for each in masses])
        error = values.std(ddof=1) / math.sqrt(count)
        assert 0 < error < 0.1 * mass
        assert abs(values.mean() - expected) < 4.5 * error


def test_the_example_runs_as_a_script_and_is_short(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), "demo", "reference"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("100 particles after ")
    assert any("log-evidence" in line for line in lines)
    assert len(EXAMPLE.read_text().splitlines()) <= 50
