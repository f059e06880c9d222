"""`genlm demo` on the reference engine: what it prints is true and reproducible."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from genlm.cli import app
from genlm.plugin import refresh

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
    parsed = report("--prompt", "The ")
    assert (parsed["backend"], parsed["model"], parsed["seed"]) == ("reference", "demo", 0)
    assert len(parsed["samples"]) == 3
    assert len(parsed["particles"]) == 12
    weights = [particle["weight"] for particle in parsed["particles"]]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1)
    assert parsed["effective_sample_size"] == pytest.approx(1 / sum(w * w for w in weights))
    assert math.isfinite(parsed["log_evidence"])
    assert parsed["log_evidence"] < 0
    assert parsed["tokens_per_second"] == pytest.approx(parsed["tokens"] / parsed["seconds"])


def test_every_text_begins_with_the_prompt_and_particles_keep_to_the_constraint() -> None:
    parsed = report("--max-letters", "3", "--prompt", "The sea")
    assert parsed["constraint"] == "no word has more than 3 letters"
    for particle in parsed["particles"]:
        assert particle["text"].startswith("The sea")
        assert max(map(len, re.findall("[a-zA-Z]+", particle["text"]))) <= 3
        assert "<|endoftext|>" not in particle["text"]
    assert all(sample.startswith("The sea") for sample in parsed["samples"])


def test_the_figures_account_for_every_request() -> None:
    parsed = report()
    figures = parsed["statistics"]
    # No finished text is longer than the prompt and 15 tokens; its end is a token as well.
    assert 12 <= parsed["tokens"] <= 12 * 15
    # One for each distinct particle at each step, and one for each token of the samples.
    assert 1 < figures["requests"] <= parsed["tokens"] + 3 * 15
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


def test_the_table_has_each_text_once_with_its_total_weight() -> None:
    short = ("--max-tokens", "2")
    parsed, result = report(*short), invoke(*OPTIONS, *short)
    assert result.exit_code == 0
    texts = {particle["text"] for particle in parsed["particles"]}
    assert len(texts) < len(parsed["particles"]), "no text came twice"
    for sample in parsed["samples"]:
        assert repr(sample) in result.stdout
    for text in texts:
        copies = [p["weight"] for p in parsed["particles"] if p["text"] == text]
        line = rf"{sum(copies):.4f} +{len(copies)} +{re.escape(repr(text))} *\n"
        assert len(re.findall(line, result.stdout)) == 1
    assert f"log-evidence {parsed['log_evidence']:.3f}" in result.stdout


def test_a_prompt_that_breaks_the_constraint_is_a_usage_error() -> None:
    result = invoke(*OPTIONS, "--prompt", "An elephant")
    assert result.exit_code == 2
    assert "more than 5" in " ".join(result.stderr.split())


def test_the_environment_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENLM_BACKEND", "reference")
    result = invoke("demo", "--json", "--particles", "2", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["backend"] == "reference"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the path; its modules and plugins are those of this test alone."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GENLM_PLUGINS", "mine")
    yield tmp_path
    sys.modules.pop("mine", None)
    monkeypatch.undo()
    refresh()


def plugin(folder: Path, tokenizer: str, max_context: int | None = None) -> None:
    """An engine over bytes whose tokenizer is the value of an expression."""
    (folder / "mine.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from genlm.plugin import BackendSpec, BatchEngine, Token, Vocabulary, hookimpl\n"
        "class Engine(BatchEngine):\n"
        f"    max_context = {max_context}\n"
        "    def __init__(self, model):\n"
        "        tokens = [Token(i, bytes([i])) for i in range(256)]\n"
        f"        self.vocabulary = Vocabulary({tokenizer}, tokens, list(map(repr, tokens)))\n"
        "    def evaluate(self, queries):\n"
        "        weights = torch.ones(len(queries), 256)\n"
        "        weights[:, 32:127] += 100\n"
        "        return (weights / weights.sum(1, keepdim=True)).log()\n"
        "@hookimpl\n"
        "def genlm_backends():\n"
        "    yield BackendSpec('mine', 'engine', 'mine:Engine')\n"
    )
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[genlm]\nmine = mine\n")
    refresh()


def demo_of(*arguments: str) -> str:
    result = invoke("demo", "--backend", "mine", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "tokenizer",
    ["None", "object()", "SimpleNamespace(encode=lambda text: list(text.encode()))"],
)
def test_any_tokenizer_or_none_will_do(installed: Path, tokenizer: str) -> None:
    plugin(installed, tokenizer)
    parsed = json.loads(demo_of("--particles", "5", "--max-tokens", "6", "--json"))
    texts = [*parsed["samples"], *(particle["text"] for particle in parsed["particles"])]
    assert len(texts) == 8
    assert all(text.startswith("The") for text in texts)
    assert parsed["cut_by_context"] == 0


def test_texts_that_the_context_ends_are_counted_and_kept(installed: Path) -> None:
    plugin(installed, "None", max_context=10)
    options = ("--particles", "2", "--max-tokens", "1000")
    parsed = json.loads(demo_of(*options, "--json"))
    assert parsed["cut_by_context"] == 5
    assert all(len(particle["text"]) <= 11 for particle in parsed["particles"])
    output = demo_of(*options)
    assert "5 of 5 texts end where the model's context is full, before --max-tokens" in output
    cut = json.loads(demo_of("--max-tokens", "8", "--json"))["cut_by_context"]
    assert cut == 0, "--max-tokens ended them at the same place"
