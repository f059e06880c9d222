"""Reads the texts of a file for a command: one a line, or JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import typer

from genlm.cli.arguments import json_object

__all__ = ["LineOfText", "bad_file", "read_lines", "texts_of"]


_JSON_LINES = ".jsonl", ".ndjson"


class LineOfText(NamedTuple):
    """A text, the number of its line from 1, and what comes before it, if anything."""

    line: int
    text: str
    prompt: str | None


def texts_of(file: str, form: str) -> list[LineOfText]:
    """Read a file.

    Args:
        file: Its path; `"-"` for standard input.
        form: `"text"`, `"jsonl"`, or `"auto"`: JSON lines if the name ends in `.jsonl` or the
            first line begins with a brace.

    Returns:
        The texts; empty lines at the end of the file are left out.

    Raises:
        typer.BadParameter: The file cannot be read, or a line is empty or malformed.
    """
    lines = read_lines(file)
    hint = ""
    if form == "auto" and (file.endswith(_JSON_LINES) or lines[0].lstrip().startswith("{")):
        form, hint = "jsonl", ". If the file is plain text, pass --format text"
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise bad_file(f"line {number} is empty")
        found.append(
            _of_json(number, line, hint) if form == "jsonl" else LineOfText(number, line, None)
        )
    return found


def read_lines(file: str, hint: str = "FILE") -> list[str]:
    """Return the lines of a file without empty ones at its end.

    Args:
        file: Its path; `"-"` for standard input.
        hint: The argument or option that names it.

    Raises:
        typer.BadParameter: The file cannot be read or contains no text.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        content = data.decode("utf-8-sig")
    except OSError as error:
        raise bad_file(f"{file!r}: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise bad_file(f"{file!r}, line {line}: not UTF-8", hint) from error
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise bad_file(f"{file!r} contains no text", hint)
    return lines


def _of_json(number: int, line: str, hint: str) -> LineOfText:
    found = json_object(line)
    if found is None:
        raise bad_file(f"line {number} is not a JSON object: {line[:60]!r}{hint}")
    text, prompt = found.get("text"), found.get("prompt")
    if not isinstance(text, str) or not text:
        raise bad_file(f'line {number}: expected a string that is not empty as "text"')
    if not (prompt is None or isinstance(prompt, str)):
        raise bad_file(f'line {number}: expected a string as "prompt"')
    if any("\ud800" <= letter <= "\udfff" for letter in text + (prompt or "")):
        raise bad_file(f"line {number} has half of a surrogate pair, which is not a character")
    return LineOfText(number, text, prompt)


def bad_file(message: str, hint: str = "FILE") -> typer.BadParameter:
    """Return an error that names the argument."""
    return typer.BadParameter(message, param_hint=hint)
