"""The check of private names reports unlisted, unused and removed names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from private_names import check

SOURCE = """
from json.decoder import JSONDecoder
from cachetools.keys import hashkey
import torch.nn.functional as F

class Own:
    _mine = 0

    def __init__(self, model, engine):
        self._kept = model._parameters
        other = Own(model, engine)._kept, Own._mine, tuple()._replace
        getattr(model, "_buffers")
        engine.step(engine.running, f"{model}_words")
"""
LIST = """
cachetools.keys hashkey  # a comment
torch.nn.Module _parameters
torch.nn.Module _buffers
"""


@pytest.fixture
def problems(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Checks a list against the package above; returns what is wrong, line by line."""
    folder = tmp_path / "sampled_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "module.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(folder.name, folder / "__init__.py")
    assert spec is not None
    package: ModuleType = importlib.util.module_from_spec(spec)

    def found(listed: str) -> list[str]:
        (tmp_path / "names.txt").write_text(listed)
        try:
            check(package, tmp_path / "names.txt")
        except AssertionError as error:
            return str(error).splitlines()[1:]
        return []

    yield found
    sys.modules.pop(folder.name, None)


def test_a_complete_list_is_accepted(problems: Callable[[str], list[str]]) -> None:
    assert problems(LIST) == []


def test_each_name_that_is_not_listed_is_found(problems: Callable[[str], list[str]]) -> None:
    for line in LIST.strip().splitlines():
        (problem,) = problems(LIST.replace(line, ""))
        assert problem.startswith("is used and not listed; add the line of the list: ")
        assert line.split()[1] in problem


def test_names_that_are_not_used_are_found(problems: Callable[[str], list[str]]) -> None:
    more = "\ntorch.nn.Module _modules\ntorch.nn.Module *.runner\njson.decoder\njson.scanner\n"
    assert problems(LIST + more) == [
        "is listed and not used; take out the line of the list: torch.nn.Module _modules",
        "is listed and not used; take out the line of the list: torch.nn.Module *.runner",
        "is listed and not used; take out the line of the list: json.scanner",
    ]


def test_names_that_a_new_version_drops_are_found(
    problems: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cachetools.keys

    monkeypatch.delattr(cachetools.keys, "hashkey")
    assert problems(LIST) == ["cachetools.keys no longer has hashkey"]
    gone = "\nno_library.module step\ncachetools.keys.NoClass step\ncachetools.no_module step\n"
    assert [
        line.split(" (")[0]
        for line in problems(LIST.replace("cachetools.keys hashkey", "") + gone)
    ][1:] == [
        "no_library.module is gone",
        "cachetools.keys.NoClass is gone",
        "cachetools.no_module is gone",
    ]


def test_a_marked_name_may_be_absent(
    problems: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cachetools.keys

    marked = LIST.replace("hashkey", "hashkey?")
    assert problems(marked) == []
    monkeypatch.delattr(cachetools.keys, "hashkey")
    assert problems(marked) == []


def test_every_attribute_of_an_expression_is_looked_for_in_its_class(
    problems: Callable[[str], list[str]],
) -> None:
    assert problems(f"{LIST}\nunittest.mock.Mock *.engine") == [
        "unittest.mock.Mock no longer has running",
        "unittest.mock.Mock no longer has step",
    ]
    # `training` is set in the class's source only; `forward` is an attribute of the class.
    assert problems(f"{LIST}\ntorch.nn.Module *.model") == []
