"""`import genlm` is light, and its list of public names is true."""

import ast
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import run_code

import genlm
import genlm.plugin
from genlm.core import errors


def run(code: str) -> None:
    assert run_code(code).stderr == ""


def test_importing_genlm_loads_nothing_but_itself_and_the_standard_library():
    run(
        "import sys; before = set(sys.modules); import genlm\n"
        "new = {name for name in set(sys.modules) - before}\n"
        "foreign = {n for n in new if n.partition('.')[0] not in sys.stdlib_module_names}\n"
        "assert foreign == {'genlm'}, foreign"
    )


def test_listing_the_public_names_loads_nothing_either():
    run(
        "import sys, genlm\n"
        "assert set(genlm.__all__) <= set(dir(genlm))\n"
        "assert not [n for n in sys.modules if n.startswith(('genlm.', 'torch'))]"
    )


@pytest.mark.parametrize(
    ("package", "name"),
    [(package, name) for package in (genlm, genlm.plugin) for name in package._MODULE_OF],
)
def test_every_public_name_is_the_object_of_the_module_that_lists_it(package, name):
    module = import_module(package._MODULE_OF[name])
    assert getattr(package, name) is getattr(module, name)
    assert name in module.__all__ or name == "UnsupportedCapability"  # an alias


def test_the_version_is_that_of_the_distribution():
    assert genlm.__version__ == version("genlm-core")


def test_names_for_plugin_authors_stay_where_they_were_published():
    assert {"BatchEngine", "BackendSpec", "hookimpl", "refresh"} <= set(genlm.plugin.__all__)
    assert "BatchEngine" not in {*genlm.__all__, *dir(genlm)} - {*vars(genlm)}
    assert genlm.UnsupportedCapabilityError is genlm.UnsupportedCapabilityError
    assert genlm.load_model_by_name == genlm.load_model


def test_importing_the_names_of_a_hook_loads_no_torch():
    run(
        "import sys; from genlm.plugin import BackendSpec, hookimpl\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )


def test_a_star_import_gives_exactly_the_public_names():
    names: dict[str, object] = {}
    exec("from genlm import *", names)
    assert set(names) - {"__builtins__"} == set(genlm.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = genlm.load_modle


@pytest.mark.parametrize("package", [genlm, genlm.plugin])
def test_type_checkers_see_the_names_that_programs_see(package):
    tree = ast.parse(Path(package.__file__).read_text())
    seen = {
        alias.asname or alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == package._MODULE_OF


def test_every_error_is_public():
    public = {*genlm.__all__, *genlm.plugin.__all__}
    assert set(errors.__all__) <= public
