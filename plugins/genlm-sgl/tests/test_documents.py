"""The program of the README runs."""

from __future__ import annotations

from typing import Any

from documents import blocks

from genlm_sgl.conformance import TinyLlama

from .driving import TOLERANCE, largest_error


def test_the_readme_runs(tiny: TinyLlama) -> None:
    [program] = blocks("plugins/genlm-sgl/README.md")
    names: dict[str, Any] = {}
    exec(program.replace("path/to/model", str(tiny.path)), names)
    assert largest_error(tiny, list(map(tuple, names["prompts"])), names["rows"]) <= TOLERANCE
