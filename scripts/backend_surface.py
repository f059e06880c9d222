"""List the public surface of a published genlm-backend, from its sources.

    python scripts/backend_surface.py FOLDER > plugins/genlm-backend/tests/surface.txt

FOLDER is an unpacked wheel. A line has a module, a dotted name and, for callables, the
kind and parameters. For classes with a placeholder for a missing library, the real class
is listed. Names that begin with an underscore are omitted, except constructors.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def main(folder: Path) -> None:
    """Print the surface of every module, the modules in order of their paths."""
    for path in sorted((folder / "genlm" / "backend").rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        # Of two entries the last stays: the real class comes after its placeholder.
        found = dict(members(ast.parse(path.read_text()).body))
        for name, line in found.items():
            print(f"{module} {name}{line}")


def members(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, str]]:
    """Yield the public names below a module or class, each with the rest of its line."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if public(node.name) or (owner and node.name == "__init__"):
                    yield owner + node.name, described(node)
            case ast.ClassDef() if public(node.name):
                yield node.name, " class"
                yield from members(node.body, f"{node.name}.")
            case ast.If() | ast.Try():
                yield from members([*node.body, *node.orelse], owner)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value) if not owner:
                for name in ast.literal_eval(value):
                    yield name, " exported"
            case _:
                continue


def described(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Say what kind of function it is and what it takes."""
    kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
    kind = next(iter(kinds & {"property", "classmethod", "staticmethod"}), "def")
    if isinstance(node, ast.AsyncFunctionDef):
        kind = "async"
    for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    return f" {kind} ({ast.unparse(node.args)})"


def public(name: str) -> bool:
    """Whether a name is meant for users."""
    return not name.startswith("_")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
