"""Which names of other libraries, beyond their documented ones, a package uses.

A list beside the package's tests says where each is found. `check` fails with the name when
the installed version has it no longer, when the source uses one that is not listed, and when
one is listed that the source does not use. A line of the list is one of

    MODULE                an undocumented module
    WHERE NAME            a name in a module or class, or an attribute of its objects
    WHERE *.EXPRESSION    every attribute that the source reads or sets of what it calls
                          EXPRESSION: a variable, or an attribute of that name

WHERE is a module, or a class in one; "-" stands before names in files, which no library has.
A name with "?" at its end is absent in some of the supported versions.
What the source uses is found by these rules: whatever is imported from a submodule that is not
in `DOCUMENTED`; each attribute, and each string used as one, that begins with one underscore
and that the package does not define itself.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

DOCUMENTED = {
    "hypothesis",
    "mlx.core",
    "numpy.typing",
    "packaging",
    "rich",
    "torch.nn.functional",
}
DOCUMENTED |= {"torch.overrides", "triton.language"}
"""Modules below a library's own that its documentation tells users to import."""

_NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}
_LINE = "line of the list"


@dataclass
class Uses:
    """What a package's source uses.

    Attributes:
        imported: (module, name) of imports from undocumented modules; the name may be "".
        private: Attributes with one underscore that the package does not define.
        attributes: Those of each expression, by its last name.
        words: All identifiers, and strings that could be ones.
    """

    imported: set[tuple[str, str]] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    attributes: dict[str, set[str]] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)


def check(package: ModuleType, names: Path) -> None:
    """Compare the source of a package, a list, and the installed libraries.

    Raises:
        AssertionError: They differ; says in what, and what to change in the list.
    """
    lines = [line.split("#")[0].split() for line in names.read_text().splitlines()]
    marked = [(where, "".join(rest)) for where, *rest in filter(None, lines)]
    listed = [(where, name.removesuffix("?")) for where, name in marked]
    always = [(where, name) for where, name in marked if not name.endswith("?")]
    found = uses(Path(next(iter(package.__path__))))
    problems = [*_unlisted(found, listed), *_unused(found, listed), *_gone(found, always)]
    assert not problems, "\n".join([f"{names}:", *problems])


def uses(root: Path) -> Uses:
    """Read what the Python files below `root` use."""
    found, own = Uses(), set[str]()
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        # Parts of f-strings are not names.
        parts_of_text = {
            id(part)
            for n in ast.walk(tree)
            if isinstance(n, ast.JoinedStr)
            for part in n.values
        }
        for node in ast.walk(tree):
            if id(node) in parts_of_text:
                continue
            own.update(_defined(node))
            found.imported.update(_imported(node))
            if isinstance(node, ast.Attribute):
                found.words.add(node.attr)
                base = getattr(node.value, "id", getattr(node.value, "attr", None))
                found.attributes.setdefault(base, set()).add(node.attr)
            elif isinstance(node, ast.Name | ast.alias):
                name = node.id if isinstance(node, ast.Name) else node.name
                found.words.update(name.split("."))
            elif isinstance(node, ast.ImportFrom):
                found.words.update((node.module or "").split("."))
            elif isinstance(node, ast.keyword) and node.arg:
                found.words.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split(".")
                if all(map(str.isidentifier, parts)):
                    found.words.update(parts)
                    found.private.update(filter(_is_private, parts))
    for attributes in found.attributes.values():
        found.private.update(filter(_is_private, attributes))
    found.private -= own | _NAMEDTUPLE
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines in the package."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", None) in {"self", "cls"}
    ):
        yield node.attr


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a node imports from modules that libraries do not document."""
    if isinstance(node, ast.Import):
        pairs = [(alias.name, "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        pairs = [(str(node.module), alias.name) for alias in node.names]
    else:
        return
    for module, name in pairs:
        library = module.partition(".")[0]
        known = library in sys.stdlib_module_names or library.startswith("genlm")
        if "." in module and not known and not {library, module} & DOCUMENTED:
            yield module, name


def _unlisted(found: Uses, listed: list[tuple[str, str]]) -> Iterator[str]:
    for module, name in sorted(found.imported - set(listed)):
        yield f"is used and not listed; add the {_LINE}: {module} {name}".rstrip()
    names = {name or where.rpartition(".")[2] for where, name in listed}
    for _, name in listed:
        if name.startswith("*."):
            names |= found.attributes.get(name[2:], set())
    for name in sorted(found.private - names):
        yield f"is used and not listed; add the {_LINE}: WHERE-IT-IS-DEFINED {name}"


def _unused(found: Uses, listed: list[tuple[str, str]]) -> Iterator[str]:
    for where, name in listed:
        last = name.removeprefix("*.") or where.rpartition(".")[2]
        if last not in found.words:
            yield f"is listed and not used; take out the {_LINE}: {where} {name}".rstrip()


def _gone(found: Uses, listed: list[tuple[str, str]]) -> Iterator[str]:
    for where, name in listed:
        if where == "-":
            continue
        try:
            place = _resolved(where)
        except (ImportError, AttributeError) as error:
            yield f"{where} is gone ({error}), where {name or 'it'} was"
            continue
        names = found.attributes.get(name[2:], set()) if name.startswith("*.") else {name}
        for each in sorted(names - {""}):
            if not _has(place, each, imported=(where, each) in found.imported):
                yield f"{where} no longer has {each}"


def _resolved(where: str) -> Any:
    """Return a module, or a class or object in one."""
    parts = where.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            place: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        for name in parts[length:]:
            place = getattr(place, name)
        return place
    raise ModuleNotFoundError(f"No module named {parts[0]!r}", name=parts[0])


def _has(place: Any, name: str, *, imported: bool) -> bool:
    """Whether a module, class or object has a name.

    Args:
        place: The module, class or object.
        name: If it is not imported, it is enough that the source sets or reads it, as classes
            do with attributes of their objects.
        imported: Whether `place` is a module that the name is imported from.
    """
    if hasattr(place, name):
        return True
    if hasattr(place, "__path__") and importlib.util.find_spec(f"{place.__name__}.{name}"):
        return True
    kinds = place.__mro__ if isinstance(place, type) else [place]
    word = re.compile(rf"\b{re.escape(name)}\b")
    return not imported and any(
        word.search(inspect.getsource(kind))
        for kind in kinds
        if isinstance(kind, type | ModuleType) and getattr(kind, "__module__", "") != "builtins"
    )
