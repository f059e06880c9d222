"""`import genlm` is light, and its list of public names is true."""

import ast
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import run_code

import genlm
import genlm.plugin
import genlm.prefix
from genlm.core.base import errors
from genlm.lazy_exports import lazy_exports


def run(code: str) -> None:
    assert run_code(code).stderr == ""


def test_importing_genlm_loads_nothing_but_itself_and_the_standard_library():
    run(
        "import sys; before = set(sys.modules); import genlm\n"
        "new = {name for name in set(sys.modules) - before}\n"
        "foreign = {n for n in new if n.partition('.')[0] not in sys.stdlib_module_names}\n"
        "assert foreign == {'genlm', 'genlm.lazy_exports'}, foreign"
    )


def test_listing_the_public_names_loads_nothing_either():
    run(
        "import sys, genlm\n"
        "assert set(genlm.__all__) <= set(dir(genlm))\n"
        "loaded = [n for n in sys.modules if n.startswith(('genlm.', 'torch'))]\n"
        "assert loaded == ['genlm.lazy_exports'], loaded"
    )


PACKAGES = (genlm, genlm.plugin, genlm.prefix)


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PACKAGES for name in package.__all__]
)
def test_every_public_name_is_that_of_the_module_that_it_comes_from(package, name):
    [module] = {
        node.module
        for node in ast.walk(ast.parse(Path(package.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}
    }
    assert getattr(package, name) is getattr(import_module(module), name)


def test_the_version_is_that_of_the_distribution():
    assert genlm.__version__ == version("genlm-core")


def test_names_for_plugin_authors_stay_where_they_were_published():
    assert {"BatchEngine", "BackendSpec", "hookimpl", "refresh"} <= set(genlm.plugin.__all__)
    assert not {"BatchEngine", "hookimpl"} & {*genlm.__all__, *dir(genlm)}
    assert genlm.BatchEngine is genlm.plugin.BatchEngine
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


def test_a_subpackage_that_was_not_imported_is_named():
    run(
        "import genlm, genlm.plugin\n"
        "for module, name in ((genlm, 'smc'), (genlm, 'typo'), (genlm.plugin, 'smc')):\n"
        "    try: getattr(module, name)\n"
        "    except AttributeError as error:\n"
        "        assert ('write `import genlm.smc`' in str(error)) == (module is genlm) * "
        "(name == 'smc'), error\n"
        "    else: assert False\n"
        "import genlm.smc; genlm.smc.steer"
    )


def test_a_package_without_its_source_is_refused():
    spec = ModuleSpec("compiled", loader=None)
    with pytest.raises(ImportError, match="compiled was installed without its source"):
        lazy_exports(spec)


def test_every_error_is_public():
    public = {*genlm.__all__, *genlm.plugin.__all__}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = {each.__name__ for each in classes if each.__module__ == errors.__name__}
    assert ours
    assert ours <= public
