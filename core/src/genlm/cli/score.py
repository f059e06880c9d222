"""`genlm score`: log-probabilities and perplexities of the texts of a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from genlm.cli.arguments import (
    EngineOption,
    LoadOptions,
    ModelOption,
    checked_options,
    load,
    require_writable,
)
from genlm.cli.output import borderless_table, finite, output_console
from genlm.cli.text_file import LineOfText, bad_file, texts_of
from genlm.core.base.errors import GenlmError

if TYPE_CHECKING:
    from genlm.core.model.lm import AsyncLM
    from genlm.core.vocab import Vocabulary

__all__ = ["TextScore", "score"]

_SHOWN = 20
"""Maximum number of texts in the table."""


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The score of one text; `--output` writes one per line.

    Attributes:
        line: Line number in the file, from 1.
        text: The text.
        prompt: Text before it, which is not scored; None without a prompt.
        logprob: Natural-log probability of its tokens.
        tokens: Number of scored tokens: all tokens of the text, except the first one if neither
            a prompt nor a BOS token precedes it.
        bytes: Number of scored bytes in UTF-8.
        perplexity: Perplexity per token: `exp(-logprob / tokens)`.
        bits_per_byte: `-logprob / log(2) / bytes`.
        token_logprobs: With `--tokens`, each token's bytes, as text, and log-probability.
    """

    line: int
    text: str
    prompt: str | None
    logprob: float
    tokens: int
    bytes: int
    perplexity: float
    bits_per_byte: float
    token_logprobs: list[tuple[str, float]] | None = None

    def as_json(self) -> str:
        """One line of JSON without fields that are None; infinities are strings."""
        found = {key: value for key, value in vars(self).items() if value is not None}
        return json.dumps(finite(found))


class _Encoded(NamedTuple):
    """Token ids of a text, the index of the first scored id, and the number of scored bytes."""

    ids: list[int]
    start: int
    size: int


def score(
    file: Annotated[
        str,
        typer.Argument(
            help="File with one text per line, or JSON lines with `text` and optionally "
            "`prompt`; - for standard input."
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
        bool, typer.Option("--tokens", help="Include the log-probability of each token.")
    ] = False,
    form: Annotated[
        Literal["auto", "text", "jsonl"],
        typer.Option(
            "--format",
            help="Format of FILE: auto, text or jsonl. auto is jsonl if its name ends in "
            ".jsonl or its first line begins with a brace, else text.",
        ),
    ] = "auto",
    options: LoadOptions = "{}",
) -> None:
    """Compute the log-probability, perplexity and bits per byte of texts."""
    chosen = checked_options(options)
    texts = texts_of(file, form)
    if output not in (None, "-"):
        require_writable("--output", Path(output))  # a run may take an hour
    with load(model, backend, chosen) as llm:
        encoded = _encoded(llm, texts)
        found = llm.batch_score_sync(
            [each.ids for each in encoded],
            [each.start for each in encoded],
            progress=Console(stderr=True).is_terminal,
        )
        scores = [
            _scored(text, of, logprobs.tolist(), llm.vocabulary if tokens else None)
            for text, of, logprobs in zip(texts, encoded, found, strict=True)
        ]
    if output is not None:
        lines = "".join(f"{each.as_json()}\n" for each in scores)
        if output == "-":
            typer.echo(lines, nl=False)
            return
        Path(output).write_text(lines, "utf-8")
    _print(scores, f"{backend}, model {model!r}")


# -- scores ---------------------------------------------------------------------------------


def _encoded(llm: AsyncLM, texts: Sequence[LineOfText]) -> list[_Encoded]:
    """Encode all texts; raise an error if one is too long or has no token to score."""
    begin = _begin(llm.vocabulary)
    encoded = []
    for text in texts:
        try:
            of = _ids(llm.vocabulary, begin, text)
        except GenlmError as error:
            raise bad_file(f"line {text.line}: {error}") from error
        if len(of.ids) <= of.start:
            raise bad_file(
                f"line {text.line}: {text.text!r} has no token to score: the first needs one "
                f"before it, and the vocabulary names none that begins a text; give a prompt"
            )
        encoded.append(of)
    most = math.inf if llm.max_context is None else llm.max_context + 1
    long = [text.line for text, of in zip(texts, encoded) if len(of.ids) > most]
    if long:
        length = next(len(of.ids) for of in encoded if len(of.ids) > most)
        others = f"; lines that are too long: {len(long)}" if long[1:] else ""
        raise bad_file(
            f"line {long[0]} has {length:,} tokens, and the model scores {most:,} at most"
            f"{others}. Split the text"
        )
    return encoded


def _begin(vocabulary: Vocabulary) -> list[int]:
    """Return the ids before the first token of a text: BOS, or else the end-of-text token."""
    from genlm.cli.text_ids import text_ids

    begin = text_ids(vocabulary, "")
    ends = vocabulary.eos_token_id
    return begin if begin or ends is None else [ends]


def _ids(vocabulary: Vocabulary, begin: list[int], text: LineOfText) -> _Encoded:
    """Encode a text and its prompt together if a token boundary lies between them."""
    from genlm.cli.text_ids import text_ids

    def begun(of: str) -> list[int]:
        ids = text_ids(vocabulary, of)
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    size = len(text.text.encode())
    if not text.prompt:
        ids = begun(text.text)
        if begin:
            return _Encoded(ids, len(begin), size)
        return _Encoded(ids, 1, size - sum(len(vocabulary.byte_vocab[i]) for i in ids[:1]))
    before, whole = begun(text.prompt), begun(text.prompt + text.text)
    if whole[: len(before)] != before:
        whole = [*before, *text_ids(vocabulary, text.text, begin=False)]
    return _Encoded(whole, len(before), size)


def _scored(
    text: LineOfText, of: _Encoded, logprobs: list[float], names: Vocabulary | None
) -> TextScore:
    """Sum the log-probabilities; with `names`, list them by token as well."""
    each = None
    if names is not None:
        tokens = (names.byte_vocab[i].byte_string for i in of.ids[of.start :])
        each = [(token.decode(errors="replace"), at) for token, at in zip(tokens, logprobs)]
    return _text_score(text, math.fsum(logprobs), len(logprobs), of.size, each)


def _text_score(
    text: LineOfText,
    logprob: float,
    tokens: int,
    size: int,
    each: list[tuple[str, float]] | None,
) -> TextScore:
    bits = -logprob / math.log(2) / size if size else math.inf
    return TextScore(*text, logprob, tokens, size, _exp(-logprob / tokens), bits, each)


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


# -- output ---------------------------------------------------------------------------------


def _print(scores: Sequence[TextScore], title: str) -> None:
    console = output_console()
    console.print(Text(title, "bold"))
    figures = ("line", "log-probability", "tokens", "perplexity", "bits per byte")
    table = borderless_table(*figures, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    for each in scores[:_SHOWN]:
        table.add_row(str(each.line), *_figures(each), Text(each.text))
    if len(scores) > _SHOWN:
        table.add_row("...", *[""] * 4, f"{len(scores) - _SHOWN:,} more; --output has all")
    if len(scores) > 1:
        table.add_row("all", *_figures(_sum(scores)), f"{len(scores):,} texts")
    console.print(table)


def _sum(scores: Sequence[TextScore]) -> TextScore:
    """Score all texts as one."""
    logprob = math.fsum(each.logprob for each in scores)
    tokens, size = sum(each.tokens for each in scores), sum(each.bytes for each in scores)
    return _text_score(LineOfText(0, "", None), logprob, tokens, size, None)


def _figures(score: TextScore) -> Iterator[str]:
    yield f"{score.logprob:,.3f}"
    yield f"{score.tokens:,}"
    yield f"{score.perplexity:,.2f}"
    yield f"{score.bits_per_byte:.3f}"
