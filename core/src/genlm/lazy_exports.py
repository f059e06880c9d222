"""`lazy_exports`: public names of a package, listed once and imported on first use."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    spec: ModuleSpec,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module that imports its names lazily.

    The names are read from the imports under `if TYPE_CHECKING:` in the module's source, so
    programs and type checkers use one list. There, `from other import *` makes the names of
    another such module accessible, but does not add them to `__all__`.

    Args:
        spec: The module's `__spec__`.

    Raises:
        ImportError: The module was installed without its source.
    """
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source and get_source(spec.name)
    if not source:
        raise ImportError(
            f"{spec.name} was installed without its source, which has the list of its names"
        )
    home: dict[str, str] = {}
    star_imports: list[str] = []
    for block in ast.parse(source).body:
        if isinstance(block, ast.If):
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [alias.name for alias in node.names]
                    if names == ["*"]:
                        star_imports.append(node.module)
                    else:
                        home |= dict.fromkeys(names, node.module)

    def find(name: str) -> Any:
        modules = [home[name]] if name in home else star_imports
        for module in map(import_module, modules):
            if name in home or name in module.__all__:
                value = getattr(module, name)
                setattr(sys.modules[spec.name], name, value)  # bypasses `__getattr__` later
                return value
        hint = ""
        if spec.submodule_search_locations and name[0] != "_":
            submodule = f"{spec.name}.{name}"
            hint = f"; write `import {submodule}`" if find_spec(submodule) else ""
        raise AttributeError(f"module {spec.name!r} has no attribute {name!r}{hint}")

    names = sorted(home)
    return find, lambda: names, names
