"""Options of a backend as its source documents them, read without importing it.

An engine whose library is missing cannot be imported, and others take seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Option", "options_of"]


@dataclass(frozen=True)
class Option:
    """A keyword argument of a backend.

    Attributes:
        name: Its name.
        default: As the source has it; `""` for a required one.
        meaning: Its description in the docstring, on one line.
    """

    name: str
    default: str
    meaning: str


def options_of(target: str) -> list[Option] | None:
    """List the options of a backend, in the order of its signature.

    Args:
        target: `"package.module:name"` of a class or function, whose first argument is the
            model or the vocabulary.

    Returns:
        Its options; None if they are not in its source, because that is no readable Python or
        it inherits its `__init__`.
    """
    module, _, name = target.partition(":")
    definition = _definition(module, name)
    if definition is None:
        return None
    called, skipped = definition, 1
    documents = [ast.get_docstring(definition) or ""]
    if isinstance(definition, ast.ClassDef):
        methods = [each for each in definition.body if isinstance(each, ast.FunctionDef)]
        found = next((each for each in methods if each.name == "__init__"), None)
        if found is None:
            return None if definition.bases else []
        called, skipped = found, 2
        documents.append(ast.get_docstring(found) or "")
    meanings = {key: text for each in documents for key, text in _arguments(each)}
    return [
        Option(name, default, meanings.get(name, ""))
        for name, default in list(_parameters(called))[skipped:]
    ]


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Find a class or function in the source of a module, or where it is imported from."""
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(spec.origin or "").read_text("utf-8")) if spec else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            origin = next((a.name for a in node.names if (a.asname or a.name) == name), None)
            if origin is not None:
                return _definition(node.module, origin)
    return None


def _parameters(function: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[str, str]]:
    if isinstance(function, ast.ClassDef):
        return
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults = [None] * required + list(arguments.defaults)
    pairs = [*zip(positional, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    for parameter, default in pairs:
        yield parameter.arg, "" if default is None else ast.unparse(default)


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Read the section `Args` of a docstring in Google's form."""
    _, _, section = f"\n{inspect.cleandoc(docstring)}\n".partition("\nArgs:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    for entry in re.split(r"^ {4}(?=\S)", section, flags=re.MULTILINE)[1:]:
        name, colon, meaning = entry.partition(":")
        if colon:
            yield name.strip("* "), " ".join(meaning.split())
