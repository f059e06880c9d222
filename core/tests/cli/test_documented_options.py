"""Options are read from the source, and agree with the signature and the docstring."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from genlm import get_backend, list_backends
from genlm.cli.documented_options import Option, options_of

SOURCE = '''
from {package}.other import Moved, moved as renamed

raise OSError("imported")

class Engine:
    """Serves.

    Args:
        model: The model.
        budget: How much,
            in bytes: at least one.
        mode: `"a"` or `"b"`.

    Raises:
        ValueError: mode: no.
    """

    def __init__(self, model, budget, *, mode="a", undocumented=(1, 2)):
        pass

def build(model, *, speed=3):
    """Build.

    Args:
        speed: How fast."""

class Bare:
    pass

class Derived(Engine):
    pass
'''
OTHER = '''
class Moved:
    def __init__(self, model, size=1):
        """Make it.

        Args:
            size: How large.
        """
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "documented_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "engine.py").write_text(SOURCE.format(package=folder.name))
    (folder / "other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


def test_defaults_and_meanings_are_read_without_importing(package: str) -> None:
    assert options_of(f"{package}.engine:Engine") == [
        Option("budget", "", "How much, in bytes: at least one."),
        Option("mode", "'a'", '`"a"` or `"b"`.'),
        Option("undocumented", "(1, 2)", ""),
    ]
    assert options_of(f"{package}.engine:build") == [Option("speed", "3", "How fast.")]
    assert options_of(f"{package}.engine:Moved") == [Option("size", "1", "How large.")]
    assert f"{package}.engine" not in sys.modules


@pytest.mark.parametrize(
    "target",
    ["{0}.engine:Derived", "{0}.engine:None", "{0}.no:E", "none.at.all:E", "math:sin", ""],
)
def test_options_that_cannot_be_read_are_unknown(package: str, target: str) -> None:
    assert options_of(target.format(package)) is None


def test_a_class_without_init_has_no_options(package: str) -> None:
    assert options_of(f"{package}.engine:Bare") == []


@pytest.mark.parametrize(
    "info",
    [
        info
        for info in list_backends("engine")
        if info.distribution in {"genlm-core", "genlm-hf"}
    ],
    ids=lambda info: info.name,
)
def test_every_option_of_an_engine_is_listed_with_its_meaning(info: Any) -> None:
    options = options_of(info.target)
    assert options is not None
    parameters = list(inspect.signature(get_backend(info.name)).parameters)
    assert [option.name for option in options] == parameters[1:]
    assert all(option.meaning for option in options)


@pytest.mark.parametrize("info", list_backends("engine"), ids=lambda info: info.name)
def test_defaults_of_engines_are_values_and_not_names(info: Any) -> None:
    for option in options_of(info.target) or ():
        if option.default:
            ast.literal_eval(option.default)
