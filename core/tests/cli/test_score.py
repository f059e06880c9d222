"""`genlm score`: figures against rows, files of both kinds, errors that name the line."""

from __future__ import annotations

import json
import math
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import typer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import genlm
from genlm import AsyncLM, Token, Vocabulary
from genlm.cli import app
from genlm.cli.arguments import require_writable
from genlm.cli.text_file import texts_of
from genlm.core.model import lm

TEXTS = ["The cat sat.", "Ünicode, too ", "x"]


def score(*arguments: str, stdin: str | bytes | None = None) -> Result:
    command = ["score", *arguments, "--backend", "reference"]
    return CliRunner().invoke(app, command, input=stdin, env={"COLUMNS": "300"})


def scores(*arguments: str, stdin: str) -> list[dict[str, Any]]:
    result = score("-", "--output", "-", *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def logprob(ids: list[int], start: int) -> float:
    """Sum over the rows of the model."""
    with genlm.load_model("demo", "reference") as llm:
        places = range(start, len(ids))
        rows = llm.batch_next_token_logprobs_sync([ids[:place] for place in places])
        return sum(float(row[ids[place]]) for place, row in zip(places, rows, strict=True))


def encode(text: str, *, begin: bool = True) -> list[int]:
    with genlm.load_model("demo", "reference") as llm:
        return llm.encode(text, begin=begin)


def test_each_line_is_scored_by_the_rows_of_the_model() -> None:
    results = scores(stdin="\n".join(TEXTS) + "\n")
    assert [result["text"] for result in results] == TEXTS
    assert [result["line"] for result in results] == [1, 2, 3]
    for result in results:
        ids = encode(result["text"])
        total = logprob(ids, 1)
        size = len(result["text"].encode())
        assert result["logprob"] == pytest.approx(total, abs=1e-3)
        assert (result["tokens"], result["bytes"]) == (len(ids) - 1, size)
        assert result["perplexity"] == pytest.approx(
            math.exp(-total / (len(ids) - 1)), rel=1e-3
        )
        assert result["bits_per_byte"] == pytest.approx(-total / math.log(2) / size, rel=1e-3)


def test_a_prompt_is_not_scored_and_tokens_are_written_if_wanted() -> None:
    line = json.dumps({"text": " cat sat.", "prompt": "The", "other": 1})
    [result] = scores("--tokens", stdin=line)
    ids = encode("The cat sat.")
    assert result["logprob"] == pytest.approx(logprob(ids, len(encode("The"))), abs=1e-3)
    assert result["prompt"] == "The"
    texts, logprobs = zip(*result["token_logprobs"], strict=True)
    assert "".join(texts) == " cat sat."
    assert math.fsum(logprobs) == result["logprob"]
    assert result["token_ids"] == ids[len(encode("The")) :]


def test_other_fields_of_a_line_are_copied_but_replace_no_result() -> None:
    line = {"id": [1, None], "text": "a", "condition": "b", "logprob": 7, "other_fields": 8}
    [result] = scores(stdin=json.dumps(line))
    [alone] = scores(stdin=json.dumps({"text": "a"}))
    assert result == alone | {"id": [1, None], "condition": "b", "other_fields": 8}
    [with_tokens] = scores("--tokens", stdin=json.dumps(line))
    [again] = scores(stdin=json.dumps(with_tokens))
    assert again == result


def test_tokens_within_characters_are_assigned_by_their_bytes() -> None:
    text = "caf\u00e9 \U0001f600!"
    [result] = scores("--tokens", stdin=text)
    assert len(result["token_ids"]) == len(result["token_bytes"]) == result["tokens"]
    assert sum(result["token_bytes"]) == len(text.encode())
    data, place = text.encode(), 0
    with genlm.load_model("demo", "reference") as llm:
        for token, size in zip(result["token_ids"], result["token_bytes"], strict=True):
            assert llm.byte_vocab[token].byte_string == data[place : place + size]
            place += size


def test_the_table_escapes_what_a_terminal_would_interpret() -> None:
    result = score("-", stdin="a\x00b\tc\x1b[31m d\u2028e\u00e9\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("a\\x00b\\tc\\x1b[31m d\\u2028e\u00e9")


def test_a_long_text_is_cut_and_the_figures_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genlm.cli.output._PIPE_WIDTH", 80)
    _, head, first, *_ = score("-", stdin="a " * 100 + "\n").stdout.splitlines()
    assert " ".join(head.split()).startswith("line log-probability tokens perplexity bits per")
    assert len(first.rstrip()) == 80
    assert first.count("\N{HORIZONTAL ELLIPSIS}") == 1
    assert first.rstrip().endswith("\N{HORIZONTAL ELLIPSIS}")


def test_the_terminal_shows_a_table_and_the_output_is_a_file(tmp_path: Path) -> None:
    path, output = tmp_path / "texts.txt", tmp_path / "scores.jsonl"
    path.write_bytes("\r\n".join(TEXTS).encode())
    result = score(str(path), "--output", str(output))
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    title, heading, *lines, total_line = result.stdout.splitlines()
    assert title == "reference, model 'demo'"
    assert heading.split()[:3] == ["line", "log-probability", "tokens"]
    assert [line.split()[1] for line in lines] == [f"{w['logprob']:,.3f}" for w in written]
    total = math.fsum(line_result["logprob"] for line_result in written)
    assert total_line.split()[:3] == [
        "all",
        f"{total:,.3f}",
        str(sum(w["tokens"] for w in written)),
    ]


def test_long_files_are_shown_in_part() -> None:
    lines = score("-", stdin="ab\n" * 50).stdout.splitlines()
    assert len(lines) == 2 + 20 + 2
    assert "30 more" in lines[-2]
    assert "50 texts" in lines[-1]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", [], "contains no text"),
        ("a\n\nb\n", [], "line 2 is empty"),
        ("\na\n", [], "line 1 is empty"),
        ("\n \n", [], "contains no text"),
        (b"a\nb\xff\n", [], "line 2: not UTF-8"),
        ('{"text": "a"}\nb\n', [], "line 2 is not a JSON object"),
        ("a\n", ["--format", "jsonl"], "line 1 is not a JSON object"),
        ('{"text": "a"\n{"text": "b"}\n', [], "line 1 is not a JSON object"),
        ("{name} is a placeholder\n", [], "If the file is plain text, pass --format text"),
        ('{"text": "a"}\n\n{"text": "b"}\n', [], "line 2 is empty"),
        ('{"text": "a\\ud800"}\n', [], "line 1 has half of a surrogate pair"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}\n", [], "line 1 is not a JSON object"),
        ('{"text": "a"}\n{"prompt": "b"}\n', [], "line 2: expected a string that is not empty"),
        ('{"text": "a", "prompt": 1}\n', [], 'line 1: expected a string as "prompt"'),
        ("a\nbcdefgh\nbcdefghi\n", ["--options", '{"max_context": 5}'], "line 2 has 8 tokens"),
        ("a\n", ["--options", "[]"], "not a JSON object"),
        ("a\n", ["--options", '{"backend": "hf"}'], "'backend' is an argument of the command"),
        ("a\n", ["--output", "/no/such/folder/x"], "No such file"),
        ("a\n", ["--tokens"], "the table has one line for each text; pass a file"),
    ],
)
def test_errors_name_the_line(content: str | bytes, options: list[str], message: str) -> None:
    result = score("-", *options, stdin=content)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    result = score(str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "No such file" in result.output


def test_the_texts_are_not_replaced_by_their_scores(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a\n")
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    for output in "texts", "link":
        result = score(str(tmp_path / "texts"), "--output", str(tmp_path / output))
        assert result.exit_code == 2
        assert "whose texts would be lost" in result.output
    assert (tmp_path / "texts").read_text() == "a\n"


def test_an_object_on_each_line_may_be_text() -> None:
    line = '{"text": "a"}'
    [result] = scores("--format", "text", stdin=line)
    assert result["text"] == line


@pytest.mark.parametrize("line", ["a", '{"text": "a"}'])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n\r\n", "\n \n\n"])
def test_empty_lines_at_the_end_are_left_out(line: str, end: str) -> None:
    assert [result["text"] for result in scores(stdin=line + end)] == ["a"]


def test_the_name_of_a_file_says_that_it_has_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('["a"]\n{"text": "b"}\n')
    wrong = score(str(path))
    assert wrong.exit_code == 2
    assert "line 1 is not a JSON object" in wrong.output
    assert score(str(path), "--format", "text").exit_code == 0


def test_an_output_that_cannot_be_computed_leaves_no_file(tmp_path: Path) -> None:
    output = tmp_path / "scores.jsonl"
    arguments = ("-", "--output", str(output), "--options", '{"max_context": 2}')
    assert score(*arguments, stdin="long enough").exit_code == 2
    assert not output.exists()


@pytest.mark.parametrize("depth", [900, 100_000])
def test_a_field_that_is_nested_too_deeply_is_a_usage_error(depth: int) -> None:
    line = json.dumps({"text": "a", "id": 0}).replace("0", "[" * depth + "]" * depth)
    result = score("-", "--output", "-", stdin=f'{{"text": "b"}}\n{line}\n')
    if result.exit_code == 0:  # newer versions of Python have less deep stacks
        assert len(result.stdout.splitlines()) == 2
    else:
        assert result.exit_code == 2, result.exception
        assert "line 2" in result.output


def test_a_closed_standard_input_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(typer.BadParameter, match="standard input is closed"):
        texts_of("-", "auto")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_the_reader_of_a_named_pipe_waits_for_the_scores(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ends = select.poll()
    ends.register(reader, select.POLLHUP)
    require_writable("--output", pipe)
    assert ends.poll(0) == [], "a writer has closed the pipe"
    os.close(reader)


def test_texts_that_are_too_long_are_named_by_their_lines() -> None:
    lines = "bcdef\nbcdefg\nb\nbcdefgh"
    result = score("-", "--options", '{"max_context": 5}', stdin=lines)
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", "").split())
    assert "line 2 has 7 tokens, and the model scores 6 at most" in output
    assert "lines that are too long: 2. Split the text, or pass --stride" in output


def test_the_longest_text_that_the_model_scores_is_scored() -> None:
    [result] = scores("--options", '{"max_context": 5}', stdin="bcdef")
    assert result["tokens"] == 5


def windowed_logprobs(ids: list[int], start: int, limit: int, stride: int) -> list[float]:
    """Log-probabilities of `ids[start:]`, each from the row of its context in its window."""
    contexts = []
    for place in range(start, len(ids)):
        steps = max(math.ceil((place + 1 - max(limit, start)) / stride), 0)
        end = min(max(limit, start) + steps * stride, len(ids))
        contexts.append(ids[max(end - limit, 0) : place])
    with genlm.load_model("demo", "reference") as llm:
        rows = llm.batch_next_token_logprobs_sync(contexts)
    return [float(row[token]) for row, token in zip(rows, ids[start:], strict=True)]


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_long_texts_are_scored_in_windows(stride: int) -> None:
    options = "--tokens", "--stride", str(stride), "--options", '{"max_context": 5}'
    lines = [
        {"text": "short"},
        {"text": "A text of many words."},
        {"text": "cdefghijk", "prompt": "ab"},
        {"text": "ijkl", "prompt": "a prompt of several words"},
    ]
    results = scores(*options, stdin="\n".join(map(json.dumps, lines)))
    for line, result in zip(lines, results, strict=True):
        prompt = encode(line.get("prompt", ""))
        ids = encode(line.get("prompt", "") + line["text"])
        expected = windowed_logprobs(ids, len(prompt), 6, stride)
        assert result["token_ids"] == ids[len(prompt) :]
        measured = [logprob for _, logprob in result["token_logprobs"]]
        assert measured == pytest.approx(expected, abs=1e-5)


def test_a_stride_longer_than_the_context_is_an_error() -> None:
    result = score("-", "--stride", "6", "--options", '{"max_context": 5}', stdin="a\n")
    assert result.exit_code == 2
    assert "the context of the model is 5" in result.output


class Untokenized(genlm.BatchEngine):
    """Equal rows over a few tokens; no tokenizer, no token that begins a text."""

    def __init__(self, model: str) -> None:
        tokens = [Token(i, data) for i, data in enumerate([b"a", b"b", b"ab", b"c"])]
        self.vocabulary = Vocabulary(None, tokens, list("abXc"))

    def evaluate(self, queries: Any) -> Any:
        import torch

        return torch.full((len(queries), 4), 0.25).log()


@pytest.fixture
def untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `load_model` load it."""
    monkeypatch.setattr(lm, "load_model", lambda *_, **__: AsyncLM(lambda: Untokenized("")))


@pytest.mark.usefixtures("untokenized")
def test_engines_without_a_tokenizer_score_what_follows_the_first_token() -> None:
    result = score("-", "--output", "-", stdin="abc\n")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["tokens"], report["bytes"]) == (2, 2), "each byte is a token"
    assert report["bits_per_byte"] == pytest.approx(2)
    wrong = score("-", stdin="abc\nb\n")
    assert "line 2: 'b' has no token that can be scored" in " ".join(wrong.output.split())
    wrong = score("-", stdin="abc\nbd\n")
    assert "line 2: the engine has no tokenizer" in " ".join(wrong.output.split())


class Lowercasing(genlm.BatchEngine):
    """Every token has the same probability; the tokenizer changes upper case, and drops "x"."""

    def __init__(self, _: str) -> None:
        ids = {letter: i for i, letter in enumerate(["<unk>", *"abc "])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], unk_token="<unk>"))
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        tokenizer.decoder = tokenizers.decoders.Fuse()
        tokenizer.add_special_tokens(["<unk>"])
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer)

    def evaluate(self, queries: Any) -> Any:
        size = self.vocabulary.size
        return torch.full((len(queries), size), -math.log(size))


def test_texts_that_the_tokenizer_changes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm, "load_model", lambda *_, **__: AsyncLM(lambda: Lowercasing("")))
    result = score("-", "--output", "-", stdin="abc\nab C\nbxa\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 3
    assert (
        "warning: the tokenizer changes 2 of 3 texts, such as that of line 2, 'ab C', to "
        "'ab c'. Their log-probabilities are those of the changed texts"
    ) in result.stderr
    result = score("-", stdin='{"prompt": "ab", "text": " ca"}\n')
    assert result.exit_code == 0, result.output
    assert "warning" not in result.stderr


class Spaced(genlm.BatchEngine):
    """Every token has the same probability; the tokenizer adds a space before every text."""

    def __init__(self, _: str) -> None:
        pieces = {piece: i for i, piece in enumerate(["<s>", "▁", "a", "b", "▁a"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [("▁", "a")]))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        self.vocabulary = Vocabulary.from_tokenizer(
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>"
            )
        )

    evaluate = Lowercasing.evaluate


def test_a_space_that_the_tokenizer_adds_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lm, "load_model", lambda *_, **__: AsyncLM(lambda: Spaced("")))
    first, second, third = scores("--tokens", stdin="ab\nb a\n a\n")
    assert [token for token, _ in first["token_logprobs"]] == ["a", "b"]
    assert [token for token, _ in second["token_logprobs"]] == ["", "b", " a"]
    assert third["token_bytes"] == [2]
    assert (first["token_bytes"], second["token_bytes"]) == ([1, 1], [0, 1, 2])


@pytest.mark.parametrize("command", ["score", "bench"])
def test_wrong_options_are_one_line(command: str) -> None:
    arguments = ["score", "-", "--backend"] if command == "score" else ["bench"]
    arguments += ["reference", "--options", '{"dtyp": "bf16"}']
    result = CliRunner().invoke(app, arguments, input="a", env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert (
        "Invalid value for --options: backend 'reference' takes no option 'dtyp'"
        in result.stderr
    )
