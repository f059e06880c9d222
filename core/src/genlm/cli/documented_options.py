"""Options of a backend from its source, which is read without importing it.

An engine whose library is missing cannot be imported, and importing others takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Option:
    """A keyword argument of a backend.

    Attributes:
        name: Name of the argument.
        default: The default in the source; `""` for a required argument.
        meaning: The description in the docstring, on one line.
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
        The options; None if they are not in the source, because it cannot be parsed or the
        class inherits its `__init__`.
    """
    module, _, name = target.partition(":")
    definition = _definition(module, name)
    if definition is None:
        return None
    function, skipped = definition, 1
    docstrings = [ast.get_docstring(definition) or ""]
    if isinstance(definition, ast.ClassDef):
        methods = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
        init = next((method for method in methods if method.name == "__init__"), None)
        if init is None:
            return None if definition.bases else []
        function, skipped = init, 2
        docstrings.append(ast.get_docstring(init) or "")
    meanings = {key: text for docstring in docstrings for key, text in _arguments(docstring)}
    return [
        Option(name, default, meanings.get(name, ""))
        for name, default in list(_parameters(function))[skipped:]
    ]


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return a class or function from the source of a module, or of one it imports from."""
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
