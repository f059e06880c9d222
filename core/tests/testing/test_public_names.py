"""`genlm.testing` is light to import, and its list of public names is true."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest
from programs import run_code

import genlm.testing


def test_importing_targets_loads_neither_torch_nor_a_test_library():
    code = (
        "import sys; from genlm.testing import EngineTarget\n"
        "assert not {'torch', 'hypothesis', 'pytest'} & set(sys.modules)"
    )
    run_code(code)


@pytest.mark.parametrize("name", genlm.testing.__all__)
def test_every_public_name_is_the_object_of_the_module_that_lists_it(name):
    module = import_module(f"genlm.testing.{genlm.testing._MODULE_OF[name]}")
    assert getattr(genlm.testing, name) is getattr(module, name)
    assert name in module.__all__


def test_type_checkers_see_the_names_that_programs_see():
    tree = ast.parse(Path(genlm.testing.__file__).read_text())
    seen = {
        alias.asname: node.module.rpartition(".")[2]
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == genlm.testing._MODULE_OF


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'EngineTraget'"):
        _ = genlm.testing.EngineTraget
