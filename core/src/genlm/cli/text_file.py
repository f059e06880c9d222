"""Reads the texts of a file for a command: one per line, or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from genlm.cli.arguments import bad_value, json_object
from genlm.cli.output import finite

_JSON_LINES = ".jsonl", ".ndjson"


class LineOfText(NamedTuple):
    """A text of a file.

    Attributes:
        line: Line number from 1.
        text: The text.
        prompt: The prompt before it, if there is one.
        other_fields: Further fields of a JSON line, with names in place of infinities and NaN.
    """

    line: int
    text: str
    prompt: str | None
    other_fields: Mapping[str, Any]


def texts_of(file: str, form: str) -> list[LineOfText]:
    """Read a file.

    Args:
        file: Path of the file; `"-"` for standard input.
        form: `"text"`, `"jsonl"`, or `"auto"`: JSON lines if the name ends in `.jsonl` or the
            first line begins with a brace.

    Returns:
        The texts, without empty lines at the end of the file.

    Raises:
        typer.BadParameter: The file cannot be read, or a line is empty or malformed.
    """
    lines = read_lines(file)
    hint = ""
    if form == "auto" and (file.endswith(_JSON_LINES) or lines[0].lstrip().startswith("{")):
        form, hint = "jsonl", ". If the file is plain text, pass --format text"
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise bad_value("FILE", f"line {number} is empty; remove empty lines")
        if form == "jsonl":
            texts.append(_parse_json_line(number, line, hint))
        else:
            texts.append(LineOfText(number, line, None, {}))
    return texts


def read_lines(file: str, argument: str = "FILE") -> list[str]:
    """Return the lines of a file, without empty lines at its end.

    Args:
        file: Path of the file; `"-"` for standard input.
        argument: The argument or option that names the file.

    Raises:
        typer.BadParameter: The file cannot be read or contains no text.
    """
    if file == "-" and sys.stdin is None:
        raise bad_value(argument, f"{file!r}: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        content = data.decode("utf-8-sig")
    except OSError as error:
        raise bad_value(argument, f"{file!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise bad_value(argument, f"{file!r}, line {line}: not UTF-8") from error
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise bad_value(argument, f"{file!r} contains no text")
    return lines


def _parse_json_line(number: int, line: str, hint: str) -> LineOfText:
    fields = json_object(line)
    if fields is None:
        raise bad_value("FILE", f"line {number} is not a JSON object: {line[:60]!r}{hint}")
    text, prompt = fields.pop("text", None), fields.pop("prompt", None)
    if not isinstance(text, str) or not text:
        raise bad_value("FILE", f'line {number}: expected a string that is not empty as "text"')
    if not (prompt is None or isinstance(prompt, str)):
        raise bad_value("FILE", f'line {number}: expected a string as "prompt"')
    if any("\ud800" <= letter <= "\udfff" for letter in text + (prompt or "")):
        raise bad_value(
            "FILE", f"line {number} has half of a surrogate pair, which is not a character"
        )
    try:
        fields = finite(fields)
    except RecursionError as error:
        raise bad_value(
            "FILE", f"line {number} has a field that is nested too deeply"
        ) from error
    return LineOfText(number, text, prompt, fields)
