"""`genlm demo` on the reference engine: what it prints is true and reproducible."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from genlm.cli import app
from genlm.cli.demo import Report

OPTIONS = ["demo", "--backend", "reference", "--particles", "12", "--max-tokens", "15"]
TIMES = {"seconds", "tokens_per_second"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def report(*arguments: str) -> dict[str, Any]:
    result = invoke(*OPTIONS, "--json", *arguments)
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_the_json_has_the_fields_of_the_report_and_true_sums() -> None:
    found = report("--prompt", "The ")
    assert set(found) == set(Report.__dataclass_fields__)
    assert (found["backend"], found["model"], found["seed"]) == ("reference", "demo", 0)
    assert len(found["samples"]) == 3
    assert len(found["particles"]) == 12
    weights = [particle["weight"] for particle in found["particles"]]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1)
    assert found["effective_sample_size"] == pytest.approx(1 / sum(w * w for w in weights))
    assert math.isfinite(found["log_evidence"])
    assert found["log_evidence"] < 0
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])


def test_every_text_begins_with_the_prompt_and_particles_keep_to_the_constraint() -> None:
    found = report("--max-letters", "3", "--prompt", "The sea")
    assert found["constraint"] == "no word has more than 3 letters"
    for particle in found["particles"]:
        assert particle["text"].startswith("The sea")
        assert max(map(len, re.findall("[a-zA-Z]+", particle["text"]))) <= 3
        assert "<|endoftext|>" not in particle["text"]
    assert all(sample.startswith("The sea") for sample in found["samples"])


def test_the_figures_account_for_every_request() -> None:
    found = report()
    figures = found["statistics"]
    # No finished text is longer than the prompt and 15 tokens; its end is a token as well.
    assert 12 <= found["tokens"] <= 12 * 15
    assert found["tokens"] < figures["requests"] <= found["tokens"] + 3 * 15
    evaluated = figures["batches"] * figures["mean_batch_size"]
    assert figures["requests"] == pytest.approx(
        figures["joined"] + figures["cache_hits"] + evaluated
    )
    assert 1 <= figures["largest_batch"] <= 12


def test_a_seed_reproduces_everything_but_the_time() -> None:
    first, again, other = report("--seed", "3"), report("--seed", "3"), report("--seed", "4")
    assert set(first) >= TIMES
    for key in set(first) - TIMES - {"statistics"}:
        assert first[key] == again[key], key
    assert first["samples"] != other["samples"]
    assert first["particles"] != other["particles"]


def test_people_read_each_text_once_with_its_summed_weight() -> None:
    short = ("--max-tokens", "2")
    found, result = report(*short), invoke(*OPTIONS, *short)
    assert result.exit_code == 0
    texts = {particle["text"] for particle in found["particles"]}
    assert len(texts) < len(found["particles"]), "no text came twice"
    for sample in found["samples"]:
        assert repr(sample) in result.stdout
    for text in texts:
        copies = [p["weight"] for p in found["particles"] if p["text"] == text]
        line = rf"{sum(copies):.4f} +{len(copies)} +{re.escape(repr(text))} *\n"
        assert len(re.findall(line, result.stdout)) == 1
    assert f"log-evidence {found['log_evidence']:.3f}" in result.stdout


def test_a_prompt_that_breaks_the_constraint_is_a_usage_error() -> None:
    result = invoke(*OPTIONS, "--prompt", "An elephant")
    assert result.exit_code == 2
    assert "more than 5" in " ".join(result.stderr.split())


def test_the_environment_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENLM_BACKEND", "reference")
    result = invoke("demo", "--json", "--particles", "2", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["backend"] == "reference"
