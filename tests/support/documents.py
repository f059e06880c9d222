"""Extracts and runs the programs shown in the repository's pages."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def blocks(page: str, language: str = "python") -> list[str]:
    """What a page, named from the repository's root, shows in a language."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


async def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute as a notebook does, with `await` at the top level; returns the names."""
    code = compile(source, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.isawaitable(result):
        await result
    return names
