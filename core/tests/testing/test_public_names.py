"""`genlm.testing` is light to import, and its list of public names is true."""

from __future__ import annotations

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
def test_every_public_name_is_found(name):
    assert getattr(genlm.testing, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'EngineTraget'"):
        _ = genlm.testing.EngineTraget
