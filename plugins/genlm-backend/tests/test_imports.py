"""The package is a namespace portion and uses public names only: imports, attributes."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from programs import run_code

import genlm
import genlm.plugin

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def tree(path):
    return ast.parse(path.read_text())


def type_checking_only(module):
    return {
        id(node)
        for block in ast.walk(module)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }


def imported():
    """Yield each module's imports, those for type checkers left out, with what is imported."""
    for name, path in MODULES.items():
        module = tree(path)
        types = type_checking_only(module)
        for node in ast.walk(module):
            if id(node) in types:
                continue
            if isinstance(node, ast.Import):
                yield from ((name, alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((name, node.module, alias.name) for alias in node.names)


def private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(module):
    """Private names that a module defines: methods, functions, constants and attributes."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if private(name)}


def test_the_package_genlm_is_the_cores():
    assert not (SOURCE / "genlm" / "__init__.py").exists()


def test_it_imports_public_names_of_the_core_and_of_one_plugin():
    foreign = {name for _, name, _ in imported() if name.partition(".")[0].startswith("genlm")}
    modules = {name for name in foreign if not name.startswith("genlm.backend")}
    assert modules == {"genlm", "genlm.plugin", "genlm_hf.engine", "genlm_hf.loading"}
    users = {module for module, name, _ in imported() if name.startswith("genlm_")}
    assert users == {"genlm.backend.llm.hf"}
    for _, module, name in imported():
        if module in {"genlm", "genlm.plugin"} and name is not None:
            assert name in importlib.import_module(module).__all__


def test_it_uses_documented_names_of_the_package_genlm():
    for path in MODULES.values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "genlm":
                assert node.attr in genlm.__all__, f"{path.name}: genlm.{node.attr}"


def test_it_uses_no_private_attribute_of_others():
    own = set().union(*(private_names(tree(path)) for path in MODULES.values()))
    for path in MODULES.values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and private(node.attr):
                allowed = own | {"_replace"}  # of named tuples, where it is public
                assert node.attr in allowed, f"{path.name}: {ast.unparse(node)}"


def classes(module):
    """The public classes that a module of this package defines."""
    return [
        c
        for c in vars(module).values()
        if isinstance(c, type) and c.__module__ == module.__name__
    ]


def names_in_class(cls):
    """Private names that a class defines: methods and attributes of itself."""
    module = tree(Path(importlib.import_module(cls.__module__).__file__))
    nodes = [
        n for n in ast.walk(module) if isinstance(n, ast.ClassDef) and n.name == cls.__name__
    ]
    return set().union(*map(private_names, nodes)) - {cls.__name__}


def test_no_class_overrides_a_private_name_of_the_core():
    seen = 0
    for cls in [each for name in MODULES for each in classes(importlib.import_module(name))]:
        for base in cls.__mro__:
            if base.__module__.startswith("genlm.core"):
                seen += 1
                shared = names_in_class(cls) & names_in_class(base)
                assert not shared, f"{cls.__qualname__} and {base.__qualname__}: {shared}"
    assert seen > 5


def test_importing_it_loads_no_engine():
    code = (
        "import sys, genlm.backend, genlm.backend.llm\n"
        "print([m for m in ('transformers', 'vllm', 'sglang', 'peft') if m in sys.modules])"
    )
    assert run_code(code).stdout == "[]\n"
