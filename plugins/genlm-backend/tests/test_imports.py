"""The package is thin and a portion: what it imports, and what importing it loads."""

from __future__ import annotations

import ast
from pathlib import Path

from programs import run_code

SOURCE = Path(__file__).parents[1] / "src"

INNER = {"genlm.core.sampling"}
"""Of the core beyond its public names: one rule of drawing tokens, for users' own models."""


def imported():
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        types = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if id(node) in types:
                continue
            if isinstance(node, ast.Import):
                yield from ((path.stem, name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield path.stem, node.module


def test_the_package_genlm_is_the_cores():
    assert not (SOURCE / "genlm" / "__init__.py").exists()


def test_it_uses_public_names_of_the_core_and_of_one_plugin():
    inner = {name for _, name in imported() if name.startswith("genlm.core")}
    assert inner == INNER
    plugins = {(stem, name) for stem, name in imported() if name.startswith("genlm_")}
    assert {name.partition(".")[0] for _, name in plugins} == {"genlm_hf"}
    assert {stem for stem, _ in plugins} <= {"hf", "cpu_rows"}


def test_importing_it_loads_no_engine():
    code = (
        "import sys, genlm.backend, genlm.backend.llm\n"
        "print([m for m in ('transformers', 'vllm', 'sglang', 'peft') if m in sys.modules])"
    )
    assert run_code(code).stdout == "[]\n"
