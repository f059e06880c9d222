"""Reads the texts of a file for a command: one a line, or JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import typer

__all__ = ["LineOfText", "bad_file", "texts_of"]


class LineOfText(NamedTuple):
    """A text, the number of its line from 1, and what comes before it, if anything."""

    line: int
    text: str
    prompt: str | None


def texts_of(file: str, form: str) -> list[LineOfText]:
    """Read a file.

    Args:
        file: Its path; `"-"` for standard input.
        form: `"text"`, `"jsonl"`, or `"auto"`: JSON lines if the first line is an object.

    Raises:
        typer.BadParameter: It cannot be read, or a line is empty or not as it should be.
    """
    lines = _lines(file)
    if form == "auto":
        form = "jsonl" if _object(lines[0]) is not None else "text"
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise bad_file(f"line {number} is empty")
        found.append(
            _of_json(number, line) if form == "jsonl" else LineOfText(number, line, None)
        )
    return found


def _lines(file: str) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        content = data.decode("utf-8-sig")
    except OSError as error:
        raise bad_file(f"{file!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise bad_file(f"{file!r}, line {line}: not UTF-8") from error
    lines = [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    if lines == [""]:
        raise bad_file(f"{file!r} has no text")
    return lines


def _of_json(number: int, line: str) -> LineOfText:
    found = _object(line)
    if found is None:
        raise bad_file(f"line {number} is not a JSON object: {line[:60]!r}")
    text, prompt = found.get("text"), found.get("prompt")
    if not isinstance(text, str) or not text:
        raise bad_file(f'line {number}: expected a string that is not empty as "text"')
    if not (prompt is None or isinstance(prompt, str)):
        raise bad_file(f'line {number}: expected a string as "prompt"')
    return LineOfText(number, text, prompt)


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def bad_file(message: str) -> typer.BadParameter:
    """Return an error that names the argument."""
    return typer.BadParameter(message, param_hint="FILE")
