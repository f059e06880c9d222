"""Names of loaded adapters: `AdapterTable`."""

from pathlib import Path

import pytest

from genlm.plugin import AdapterError, AdapterTable, EvaluationError, UnknownAdapterError


class _Table(AdapterTable[Path]):
    def __init__(self) -> None:
        super().__init__()
        self.freed: list[Path] = []
        self.fails = False

    def _load(self, name: str, path: Path) -> Path:
        if self.fails:
            raise AdapterError(name)
        return path

    def _unload(self, name: str, adapter: Path) -> None:
        if self.fails:
            raise EvaluationError(name)
        self.freed.append(adapter)


def test_adapters_are_listed_in_the_order_of_loading_until_they_are_removed():
    table = _Table()
    table.load("red", "one")
    table.load("blue", "~/two")
    assert table.names == ("red", "blue")
    table.remove("red")
    assert table.names == ("blue",)
    table.remove("blue")
    assert table.freed == [Path("one"), Path.home() / "two"]


def test_a_name_is_taken_while_its_adapter_is_loaded():
    table = _Table()
    table.load("red", "one")
    with pytest.raises(AdapterError, match="'red' is loaded already"):
        table.load("red", "two")
    table.remove("red")
    table.load("red", "two")
    assert table.freed == [Path("one")]


def test_an_adapter_that_cannot_be_loaded_leaves_its_name_free():
    table = _Table()
    table.fails = True
    with pytest.raises(AdapterError):
        table.load("red", "one")
    assert table.names == ()


def test_unknown_adapters_are_neither_removed_nor_usable():
    table = _Table()
    table.load("red", "one")
    for call in (table.remove, table.check_loaded):
        with pytest.raises(UnknownAdapterError, match=r"no adapter named 'blue'\. Loaded: red"):
            call("blue")
    table.check_loaded("red")


def test_an_adapter_that_the_engine_did_not_free_stays_in_the_table():
    table = _Table()
    table.load("red", "one")
    table.fails = True
    with pytest.raises(EvaluationError):
        table.remove("red")
    assert table.names == ("red",)
