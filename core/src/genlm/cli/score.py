"""`genlm score`: log-probabilities and perplexities of the texts of a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from genlm.cli.arguments import (
    EngineOption,
    LoadOptions,
    ModelOption,
    bad_value,
    checked_options,
    load,
    require_writable,
)
from genlm.cli.output import borderless_table, finite, output_console
from genlm.cli.text_file import LineOfText, texts_of
from genlm.core.base.errors import ContextLengthError, GenlmError

if TYPE_CHECKING:
    from genlm.core.model.lm import AsyncLM
    from genlm.core.vocab import Vocabulary

_MAX_ROWS = 20
"""Maximum number of texts in the table."""


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The score of one text, which is one line of `--output`.

    Attributes:
        line: Line number in the file, from 1.
        text: The text.
        prompt: Text before it, which is not scored; None without a prompt.
        logprob: Natural-log probability of the scored tokens.
        tokens: Number of scored tokens: all tokens of the text, except the first one if neither
            a prompt nor a BOS token precedes it.
        bytes: Number of scored bytes in UTF-8.
        token_logprobs: With `--tokens`, the bytes, as text, and the log-probability of every
            scored token. Bytes of an incomplete character are U+FFFD.
        token_ids: With `--tokens`, the scored token ids.
        token_bytes: With `--tokens`, the number of bytes of every scored token, from which
            tokens are assigned to characters and words.
        other_fields: Further fields of the JSON line, such as an id, which are copied.
    """

    line: int
    text: str
    prompt: str | None
    logprob: float
    tokens: int
    bytes: int
    token_logprobs: list[tuple[str, float]] | None = None
    token_ids: list[int] | None = None
    token_bytes: list[int] | None = None
    other_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Perplexity per token: `exp(-logprob / tokens)`."""
        try:
            return math.exp(-self.logprob / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """`-logprob / log(2) / bytes`."""
        return -self.logprob / math.log(2) / self.bytes if self.bytes else math.inf

    def as_json(self) -> str:
        """Return one line of JSON without fields that are None; infinities are strings."""
        results = vars(self) | {
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }
        copied = results.pop("other_fields")
        fields = {key: value for key, value in results.items() if value is not None}
        # A file of results may be scored again; its results are not copied.
        fields |= {key: value for key, value in copied.items() if key not in results}
        return json.dumps(finite(fields))


class _EncodedText(NamedTuple):
    """Token ids of a text, the index of the first scored id, and the number of scored bytes."""

    ids: list[int]
    start: int
    size: int


def score(
    file: Annotated[
        str,
        typer.Argument(
            help="File with one text per line, or JSON lines with `text` and optionally "
            "`prompt` and other fields, which are copied to --output; - for standard input."
        ),
    ],
    *,
    backend: EngineOption = "hf",
    model: ModelOption = "demo",
    output: Annotated[
        str | None,
        typer.Option(help="Output file with one JSON line per text; - for standard output."),
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Write the log-probability of each token to --output."),
    ] = False,
    form: Annotated[
        Literal["auto", "text", "jsonl"],
        typer.Option(
            "--format",
            help="Format of FILE: auto, text or jsonl. auto is jsonl if its name ends in "
            ".jsonl or its first line begins with a brace, else text.",
        ),
    ] = "auto",
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Score texts that are longer than the model's context in windows. Each window "
            "scores this number of tokens, given the tokens before them in the window.",
        ),
    ] = None,
    options: LoadOptions = "{}",
) -> None:
    """Compute the log-probability, perplexity and bits per byte of texts."""
    load_options = checked_options(options)
    if tokens and output is None:
        raise bad_value(
            "--tokens",
            "the table has one line for each text; pass a file, or - for standard output, "
            "as --output",
        )
    texts = texts_of(file, form)
    if output not in (None, "-"):
        require_writable("--output", Path(output))  # a run may take an hour
        if file != "-" and Path(output).exists() and Path(output).samefile(file):
            raise bad_value("--output", f"{output!r} is FILE, whose texts would be lost")
    with load(model, backend, load_options) as llm:
        encoded = _encode_texts(llm, texts)
        _warn_of_changed_texts(llm, encoded, texts)
        try:
            rows = llm.batch_score_sync(
                [item.ids for item in encoded],
                [item.start for item in encoded],
                stride=stride,
                progress=Console(stderr=True).is_terminal,
            )
        except ContextLengthError as error:
            raise bad_value("FILE", _length_problem(error, texts)) from error
        except GenlmError:
            raise
        except ValueError as error:
            raise bad_value("--stride", str(error)) from error
        vocabulary = llm.vocabulary if tokens else None
        scores = [
            _score_text(text, item, logprobs.tolist(), vocabulary)
            for text, item, logprobs in zip(texts, encoded, rows, strict=True)
        ]
    if output is not None:
        lines = "".join(f"{score.as_json()}\n" for score in scores)
        if output == "-":
            typer.echo(lines, nl=False)
            return
        Path(output).write_text(lines, "utf-8")
    _print(scores, f"{backend}, model {model!r}")


# -- scores ---------------------------------------------------------------------------------


def _encode_texts(llm: AsyncLM, texts: Sequence[LineOfText]) -> list[_EncodedText]:
    """Encode all texts; raise an error for a text that cannot be scored."""
    encoded = []
    for text in texts:
        try:
            item = _encode_text(llm.vocabulary, text)
        except GenlmError as error:
            raise bad_value("FILE", f"line {text.line}: {error}") from error
        if len(item.ids) <= item.start:
            raise bad_value(
                "FILE",
                f"line {text.line}: {text.text!r} has no token that can be scored, because the "
                f"vocabulary defines no BOS token; pass a prompt",
            )
        encoded.append(item)
    return encoded


def _warn_of_changed_texts(
    llm: AsyncLM, encoded: Sequence[_EncodedText], texts: Sequence[LineOfText]
) -> None:
    """Print a warning if the tokens of texts have other texts, as after a normalisation."""
    changed = []
    for text, item in zip(texts, encoded, strict=True):
        whole, decoded = (text.prompt or "") + text.text, llm.decode(item.ids)
        if decoded.strip(" ") != whole.strip(" "):  # marks of words are spaces at both ends
            changed.append((text.line, whole, decoded))
    if not changed:
        return
    line, whole, decoded = changed[0]
    typer.echo(
        f"warning: the tokenizer changes {len(changed):,} of {len(texts):,} texts, such as "
        f"that of line {line}, {_shortened(whole)}, to {_shortened(decoded)}. Their "
        f"log-probabilities are those of the changed texts",
        err=True,
    )


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _length_problem(error: ContextLengthError, texts: Sequence[LineOfText]) -> str:
    """Describe the texts that are too long for the model."""
    count = len(error.places)
    total = f"; lines that are too long: {count}" if count > 1 else ""
    return (
        f"line {texts[error.places[0]].line} has {error.length:,} tokens, and the model scores "
        f"{error.max_context + 1:,} at most{total}. Split the text, or pass --stride"
    )


def _encode_text(vocabulary: Vocabulary, text: LineOfText) -> _EncodedText:
    """Encode a text and its prompt; without a prompt and BOS, the first token is not scored."""
    from genlm.cli.text_ids import text_ids
    from genlm.core.vocab.text import encode_continuation

    ids, start = encode_continuation(vocabulary, text.prompt or "", text.text, text_ids)
    size = len(text.text.encode())
    if not text.prompt:
        unscored = (i for i in ids[:start] if i not in vocabulary.special_ids)
        size -= sum(len(vocabulary.byte_vocab[i]) for i in unscored)
    return _EncodedText(ids, start, size)


def _score_text(
    text: LineOfText,
    encoded: _EncodedText,
    logprobs: list[float],
    vocabulary: Vocabulary | None,
) -> TextScore:
    """Sum the log-probabilities; with `vocabulary`, also list them by token."""
    score = TextScore(
        line=text.line,
        text=text.text,
        prompt=text.prompt,
        logprob=math.fsum(logprobs),
        tokens=len(logprobs),
        bytes=encoded.size,
        other_fields=text.other_fields,
    )
    if vocabulary is None:
        return score
    ids = encoded.ids[encoded.start :]
    tokens = [vocabulary.byte_vocab[i].byte_string for i in ids]
    if b"".join(tokens) == b" " + text.text.encode():  # the tokenizer added the space
        tokens[0] = tokens[0][1:]
    names = (token.decode(errors="replace") for token in tokens)
    return dataclasses.replace(
        score,
        token_logprobs=list(zip(names, logprobs, strict=True)),
        token_ids=ids,
        token_bytes=list(map(len, tokens)),
    )


# -- output ---------------------------------------------------------------------------------


def _print(scores: Sequence[TextScore], title: str) -> None:
    console = output_console()
    console.print(title, style="bold")
    figures = ("line", "log-probability", "tokens", "perplexity", "bits per byte")
    table = borderless_table(*figures, justify="right", no_wrap=True)
    table.add_column("text")
    for score in scores[:_MAX_ROWS]:
        # A column without wrapping would take the width of the figures.
        text = Text(_printable(score.text), no_wrap=True, overflow="ellipsis")
        table.add_row(str(score.line), *_figures(score), text)
    if len(scores) > _MAX_ROWS:
        table.add_row("...", *[""] * 4, f"{len(scores) - _MAX_ROWS:,} more; --output has all")
    if len(scores) > 1:
        table.add_row("all", *_figures(_sum(scores)), f"{len(scores):,} texts")
    console.print(table)


def _printable(text: str) -> str:
    """Escape the characters that a terminal would interpret, such as tabs and NUL."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def _sum(scores: Sequence[TextScore]) -> TextScore:
    """Return the score of all texts together."""
    logprob = math.fsum(score.logprob for score in scores)
    tokens, size = sum(score.tokens for score in scores), sum(score.bytes for score in scores)
    return TextScore(0, "", None, logprob, tokens, size)


def _figures(score: TextScore) -> Iterator[str]:
    yield f"{score.logprob:,.3f}"
    yield f"{score.tokens:,}"
    yield f"{score.perplexity:,.2f}"
    yield f"{score.bits_per_byte:.3f}"
