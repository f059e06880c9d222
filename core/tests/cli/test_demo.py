"""`genlm demo` on the reference engine: what it prints is true and reproducible."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from genlm.cli import app
from genlm.plugin import refresh

OPTIONS = ["demo", "--backend", "reference", "--particles", "12", "--max-tokens", "15"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def printed(*arguments: str) -> str:
    result = invoke(*OPTIONS, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def samples_and_texts(output: str) -> tuple[list[str], list[str]]:
    """The unconstrained samples and the texts of the particles, without the prompt."""
    samples, _, table = output.partition("constrained: ")
    texts = re.findall(r"^\d\.\d{4} +\d+  (.+)$", table, re.MULTILINE)
    lines = [line for line in samples.splitlines()[1:] if line]
    return list(map(ast.literal_eval, lines)), list(map(ast.literal_eval, texts))


def test_samples_begin_with_the_prompt_and_particles_keep_to_the_constraint() -> None:
    output = printed("--max-letters", "3", "--prompt", "The sea")
    assert "constrained: no word has more than 3 letters" in output
    samples, texts = samples_and_texts(output)
    assert len(samples) == 3
    assert all(sample.startswith("The sea") for sample in samples)
    assert texts
    for text in texts:
        assert max(map(len, re.findall("[a-zA-Z]+", f"The sea{text}"))) <= 3
        assert "<|endoftext|>" not in text


def test_the_output_has_the_particles_and_the_number_of_tokens() -> None:
    output = printed()
    assert "12 particles after 15 steps" in output
    speed = re.search(r"^(\d+) tokens in \d+\.\d\d s: [\d,]+ a second$", output, re.MULTILINE)
    tokens = int(speed[1])
    # No text is longer than the prompt and 15 tokens.
    assert 12 <= tokens <= 12 * 15


def test_a_seed_reproduces_everything_but_the_time() -> None:
    first, again, other = printed("--seed", "3"), printed("--seed", "3"), printed("--seed", "4")
    assert first.splitlines()[:-1] == again.splitlines()[:-1]
    assert samples_and_texts(first)[0] != samples_and_texts(other)[0]
    assert samples_and_texts(first)[1] != samples_and_texts(other)[1]


def test_a_prompt_that_breaks_the_constraint_is_a_usage_error() -> None:
    result = invoke(*OPTIONS, "--prompt", "An elephant")
    assert result.exit_code == 2
    assert "more than 5" in " ".join(result.stderr.split())


@pytest.mark.parametrize("letters", ["0", "101", "99999999999999999999"])
def test_a_limit_without_a_table_of_its_states_is_a_usage_error(letters: str) -> None:
    result = invoke(*OPTIONS, "--max-letters", letters)
    assert result.exit_code == 2
    assert "--max-letters" in result.output


def test_a_prompt_of_undecodable_bytes_is_a_usage_error() -> None:
    result = invoke(*OPTIONS, "--prompt", "caf\udce9")
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


def test_the_environment_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENLM_BACKEND", "reference")
    result = invoke("demo", "--particles", "2", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("reference, model 'demo'")


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
    output = demo_of("--particles", "5", "--max-tokens", "6")
    samples, texts = samples_and_texts(output)
    assert len(samples) == 3
    assert all(sample.startswith("The") for sample in samples)
    assert texts


def test_texts_that_the_context_ends_are_kept(installed: Path) -> None:
    plugin(installed, "None", max_context=10)
    output = demo_of("--particles", "2", "--max-tokens", "1000")
    assert "2 particles after 8 steps, 0 finished" in output
    assert all(len(text) <= 8 for text in samples_and_texts(output)[1])
