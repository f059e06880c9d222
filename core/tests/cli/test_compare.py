"""`genlm compare`: agreement, differences and failures of engines."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import genlm
from genlm import ModelFacts
from genlm.cli import app, engine_process
from genlm.cli.engine_process import EngineRows, Request, compute_here, limits_of, longest_of
from genlm.plugin import refresh
from genlm.testing.comparison import contexts_of, differences

ENGINES = '''
import os
import threading
from genlm import ModelLoadError, Token, Vocabulary
from genlm.core.reference.engine import ReferenceEngine

class Same(ReferenceEngine):
    pass

class Windowed(ReferenceEngine):
    """Sharpens the rows of sequences of more than 20 tokens."""
    def evaluate(self, queries):
        rows = super().evaluate(queries)
        long = [i for i, query in enumerate(queries) if len(query.token_ids) > 20]
        rows[long] = (1.5 * rows[long]).log_softmax(-1)
        return rows

class Stale(ReferenceEngine):
    """Gives another row the second time."""
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._asked = set()
    def evaluate(self, queries):
        rows = super().evaluate(queries)
        for row, query in zip(rows, queries):
            if query.token_ids in self._asked:
                row.copy_((1.5 * row).log_softmax(-1))
            self._asked.add(query.token_ids)
        return rows

class Abstract(ReferenceEngine):
    """Tokens of bytes that no text of ours has, and no tokenizer."""
    def __init__(self, *args):
        super().__init__(*args)
        tokens = [Token(i, bytes([255, i])) for i in range(self.vocabulary.size - 1)]
        tokens.append(Token(len(tokens), b"end"))
        self.vocabulary = Vocabulary(None, tokens, list(map(repr, tokens)))

class Printing(ReferenceEngine):
    def __init__(self, *args):
        super().__init__(*args)
        print("loaded")

class Short(ReferenceEngine):
    def __init__(self, *args):
        super().__init__(*args, max_context=50)

def crash(*args):
    os._exit(3)

def wait(path, **options):
    with open(path, "wb"):
        threading.Event().wait()

def refuse(*args):
    raise ModelLoadError("no kernel for this model")
'''
PLUGIN = """
import genlm
@genlm.hookimpl
def genlm_backends():
    yield genlm.BackendSpec({name!r}, "engine", "compared_engines:{target}")
"""
TARGETS = {
    "same": "Same",
    "windowed": "Windowed",
    "stale": "Stale",
    "short": "Short",
    "printing": "Printing",
    "abstract": "Abstract",
    "crash": "crash",
    "wait": "wait",
    "refuse": "refuse",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Engines for `PYTHONPATH`, beside those that are installed."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "compared_engines.py").write_text(ENGINES)
    for name, target in TARGETS.items():
        (folder / f"{name}_plugin.py").write_text(PLUGIN.format(name=name, target=target))
        info = folder / f"their_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: their-{name}\nVersion: 1\n"
        )
        (info / "entry_points.txt").write_text(f"[genlm]\n{name} = {name}_plugin\n")
    return str(folder)


def run(folder: str, *arguments: str, here: bool = True) -> Result:
    """Run the command, with the engines in this process or each in one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder + os.pathsep + os.environ.get("PYTHONPATH", ""))
        patch.syspath_prepend(folder)
        if here:
            patch.setattr(
                engine_process, "compute_in_process", lambda request, _: compute_here(request)
            )
        refresh()
        result = CliRunner().invoke(app, ["compare", *arguments])
    refresh()
    return result


def engines(result: Result) -> dict[str, Any]:
    report = json.loads(result.stdout)
    return {engine["backend"]: engine for engine in report["engines"]}


def test_equal_engines_agree_and_the_table_says_what_it_took(
    folder: str, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("A first text of more than twenty bytes.\n\nAnother.\n")
    options = "--texts", str(texts), "--bound", "50"
    result = run(folder, "demo", "--backends", "reference,same,windowed", *options)
    assert result.exit_code == 0, result.output
    first, heading, reference, same, windowed = result.stdout.splitlines()
    assert first.startswith("demo (of an unknown architecture), float32: ")
    assert "contexts of up to 256 tokens, computed twice; bound 50" in first
    assert heading.split()[:4] == ["engine", "result", "largest", "at"]
    assert reference.split()[:2] == ["reference", "reference"]
    assert same.split()[:5] == ["same", "within", "the", "bound", "0.0e+00"]
    assert same.count("100.0%") == 2
    assert " MiB " in same
    assert windowed.split()[:4] == ["windowed", "within", "the", "bound"]
    assert float(windowed.split()[4]) > 0.1


def test_an_engine_that_ends_its_process_is_told_and_the_others_go_on(folder: str) -> None:
    names = "crash,printing"
    result = run(folder, "demo", "--backends", names, "--json", "--longest", "20", here=False)
    assert result.exit_code == 1
    outcomes = engines(result)  # the standard output is JSON, whatever an engine prints
    assert outcomes["crash"]["status"] == "failed"
    assert outcomes["crash"]["reason"] == "its process ended with exit code 3"
    assert outcomes["printing"]["status"] == "reference"
    assert outcomes["printing"]["figures"]["peak_memory_bytes"] > 2**20


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_an_engine_ends_with_the_command(folder: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = "from genlm.cli import main; main()"
    arguments = "compare", str(pipe), "--backends", "wait,same"
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": folder})
    with process, pipe.open("rb") as reader:  # waits for the engine
        process.terminate()
        process.wait()
        ended, _, _ = select.select([reader], [], [], 60)
    assert ended


def test_engines_that_differ_or_fail_are_told_and_the_others_go_on(folder: str) -> None:
    names = "reference,windowed,stale,refuse,short"
    result = run(folder, "demo", "--backends", names, "--json", "--longest", "100")
    assert result.exit_code == 1
    outcomes = engines(result)
    assert json.loads(result.stdout)["bound"] == 1e-4
    assert list(outcomes) == names.split(",")
    assert outcomes["refuse"]["status"] == "failed"
    assert outcomes["refuse"]["reason"] == "ModelLoadError: no kernel for this model"
    assert outcomes["reference"]["status"] == "reference"
    windowed = outcomes["windowed"]
    assert windowed["status"] == "beyond the bound"
    assert windowed["differences"]["largest"] > 0.1
    assert int(windowed["differences"]["where"].split()[-2]) > 20
    assert 0 < windowed["differences"]["total_variation"] < 1
    assert windowed["differences"]["same_greedy"] == 1
    assert 0.5 < windowed["differences"]["same_draw"] < 1
    assert windowed["differences"]["repeats"] == 0
    assert outcomes["stale"]["status"] == "beyond the bound"
    assert outcomes["stale"]["differences"]["repeats"] > 0.1
    short = outcomes["short"]
    assert (short["status"], short["differences"]["largest"]) == ("within the bound", 0)
    assert short["skipped"] > 0
    for name in ("reference", "windowed", "stale", "short"):
        figures = outcomes[name]["figures"]
        assert figures["peak_memory_bytes"] > 2**20
        assert figures["rows_per_s"] > 0


def test_no_engine_needs_a_tokenizer(folder: str) -> None:
    options = "--backends", "abstract,windowed", "--longest", "20", "--json"
    result = run(folder, "demo", *options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["longest"] == 20


def test_given_ids_are_requested_twice() -> None:
    sequences = [[1, 2, 3], [7, 7, 200, 9]]
    answer = compute_here(Request("demo", "reference", "float32", longest=20, ids=sequences))
    assert isinstance(answer, EngineRows)
    assert [ids for ids in map(tuple, sequences) if ids not in answer.contexts] == []
    assert {token for ids in answer.ids for token in ids} == {*sequences[0], *sequences[1]}
    with genlm.load_model("demo", "reference") as llm:
        row = llm.next_token_logprobs_sync(sequences[1])
    rows = [answer.rows[i] for i, ids in enumerate(answer.ids) if ids == tuple(sequences[1])]
    np.testing.assert_allclose(np.stack(rows), np.stack([row, row]), atol=1e-6)


def test_ids_outside_the_vocabulary_are_not_skipped(folder: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[1, 2]\n[3, 257]\n")
    options = "--backends", "reference,same", "--ids", str(tmp_path / "ids"), "--json"
    result = run(folder, "demo", *options)
    assert result.exit_code == 1
    for engine in engines(result).values():
        assert engine["status"] == "failed"
        assert (
            "id 257 of --ids is outside the vocabulary; valid ids are 0 to 256"
            in (engine["reason"])
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "reference"], "two or more"),
        (["--backends", "reference,reference"], "two or more"),
        (["--backends", "reference,nosuch"], "no engine named 'nosuch'"),
        (["--backends", "reference,hf", "--dtype", "int8"], "no dtype 'int8'"),
        (
            ["--backends", "reference,hf", "--dtype", "auto"],
            "no tolerance is defined for 'auto'",
        ),
        (["--backends", "reference,hf", "--bound", "0"], "expected a positive"),
        (["--backends", "reference,hf", "--bound", "nan"], "expected a positive"),
        (["--backends", "reference,hf", "--timeout", "0"], "expected a positive"),
        (["--backends", "reference,hf", "--timeout", "nan"], "expected a positive"),
        (["--backends", "reference,hf", "--timeout", "inf"], "expected a positive"),
        (["--backends", "reference,hf", "--timeout", "1e7"], "expected a positive"),
        (["--backends", "reference,hf", "--texts", "no/such"], "No such file"),
        (["--backends", "reference,hf", "--ids", "no/such"], "No such file"),
        (["--backends", "reference,hf", "--ids", __file__], "expected an array of token ids"),
        (["--backends", "reference,hf", "--ids", "x", "--texts", "x"], "not both"),
        (["--backends", "reference,hf", "--options", "{"], "--options"),
        (["--backends", "reference,hf", "--options", '{"hf": 1}'], "expected a JSON object"),
        (["--backends", "reference,hf", "--options", '{"mlx": {}}'], "not among"),
        ([], "--backends"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(arguments: list[str], message: str) -> None:
    result: Result = CliRunner().invoke(
        app, ["compare", "demo", *arguments], env={"COLUMNS": "400", "NO_COLOR": "1"}
    )
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_without_text_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    arguments = ["--backends", "reference,hf", "--texts", str(tmp_path / "empty")]
    result = CliRunner().invoke(app, ["compare", "demo", *arguments])
    assert result.exit_code == 2


def test_a_line_that_is_no_array_of_token_ids_is_named(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[1, 2]\n\n[3, -1]\n")
    arguments = ["--backends", "reference,hf", "--ids", str(tmp_path / "ids")]
    result = CliRunner().invoke(app, ["compare", "demo", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "line 3: expected an array of token ids" in result.output


# -- the parts ------------------------------------------------------------------------------


def test_limits_are_windows_chunks_and_unscaled_contexts() -> None:
    assert limits_of(None) == {}
    assert limits_of(ModelFacts("Llama")) == {}
    facts = ModelFacts(
        "M",
        sliding_windows=(16,),
        attention_chunk_size=8,
        rope_types=("yarn",),
        original_positions=32,
    )
    assert [*limits_of(facts).values()] == [16, 8, 32]
    dynamic = ModelFacts("M", rope_types=("dynamic",), original_positions=2048)
    assert limits_of(dynamic) == {"original context of 2048": 2048}


@pytest.mark.parametrize(
    ("requested", "limits", "max_context", "longest"),
    [
        (None, [], None, 256),
        (None, [1024], None, 1040),
        (None, [10**6], None, 8192),
        (None, [1024], 512, 512),
        (10_000, [1024], None, 10_000),
        (20, [1024], None, 20),
    ],
)
def test_contexts_go_beyond_limits_within_reason(
    requested: int | None, limits: list[int], max_context: int | None, longest: int
) -> None:
    assert longest_of(requested, dict(enumerate(limits)), max_context) == longest


def test_contexts_are_short_fork_and_surround_each_limit() -> None:
    contexts = contexts_of(
        list(b"some text, x"), [list(b"some text"), list(b"x")], {"window": 70}, 90
    )
    assert max(map(len, contexts)) == 90
    lengths = {len(ids) for ids, kind in contexts.items() if kind == "around the window"}
    assert lengths == {69, 70, 71, 72, 79}
    forks = [ids[:40] for ids, kind in contexts.items() if kind == "fork"]
    assert len(forks) > 4
    assert len({*forks}) == 1
    assert contexts[tuple(b"some text")] == "text"
    with pytest.raises(ValueError, match="no tokens"):
        contexts_of([], [], {}, 10)


def rows(*probabilities: list[float]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Answers to as many contexts, of one token each."""
    return [((i,), torch.tensor(row).log()) for i, row in enumerate(probabilities)]


def test_differences_are_those_of_the_probabilities() -> None:
    expected = dict(rows([0.5, 0.25, 0.25, 0.0])).__getitem__
    apart = differences(rows([0.25, 0.5, 0.25, 0.0]), expected, kinds={(0,): "short"})
    assert apart.largest == pytest.approx(np.log(2))
    assert apart.total_variation == apart.mean_total_variation == pytest.approx(0.25)
    assert (apart.same_greedy, apart.repeats, apart.rows) == (0, 0, 1)
    assert apart.where == "short, 1 tokens"
    same = differences(rows([0.5, 0.25, 0.25, 0.0]), expected)
    assert (same.largest, same.total_variation, same.same_greedy, same.same_draw) == (
        0,
        0,
        1,
        1,
    )


def test_another_second_row_of_one_context_is_told() -> None:
    first, second = rows([0.5, 0.5], [0.25, 0.75])
    apart = differences([first, (first[0], second[1])], lambda ids: first[1])
    assert apart.repeats == apart.largest == pytest.approx(np.log(2))


def test_an_impossible_token_that_becomes_possible_is_infinitely_far() -> None:
    expected = dict(rows([1.0, 0.0])).__getitem__
    assert differences(rows([0.9, 0.1]), expected).largest == np.inf
    assert differences(rows([0.9, np.nan]), expected).largest == np.inf


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 2 ids; expected 3"):
        differences(rows([0.5, 0.5]), dict(rows([0.5, 0.25, 0.25])).__getitem__)


def test_draws_with_one_number_differ_as_often_as_the_distributions() -> None:
    count = 1000
    expected = dict(rows(*[[0.5, 0.5]] * count)).__getitem__
    apart = differences(rows(*[[0.4, 0.6]] * count), expected, seed=3)
    assert apart.same_draw == pytest.approx(0.9, abs=0.03)


def test_the_config_is_read_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def from_pretrained(source: str, **options: Any) -> None:
        calls.append(options)
        raise OSError

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    result = compute_here(Request("demo", "reference", "float32", longest=16))
    assert isinstance(result, EngineRows)
    assert result.about["family"] is None
    assert calls == [{"local_files_only": True}]
