"""A malformed spec is refused where it is written."""

import pytest

from genlm import BackendSpec
from genlm.core.plugins.spec import API_VERSION


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "genlm-toy:toy"),
        ("kind", "model"),
        ("target", "genlm_toy.engine"),
        ("target", ":ToyEngine"),
        ("target", None),
        ("conformance", "genlm_toy.conformance"),
        ("requires", ("sglang.srt",)),
        ("requires", ("sglang>=1",)),
    ],
)
def test_a_malformed_field_is_a_value_error_that_shows_it(field, value):
    fields = {"name": "toy", "kind": "engine", "target": "genlm_toy.engine:ToyEngine"}
    with pytest.raises(ValueError, match=field):
        BackendSpec(**(fields | {field: value}))


@pytest.mark.parametrize("field", ["requires", "capabilities"])
@pytest.mark.parametrize("value", ["lora", ["lora"], (1,)])
def test_a_list_that_is_no_tuple_of_strings_is_a_type_error(field, value):
    with pytest.raises(TypeError, match=field):
        BackendSpec("toy", "engine", "a:b", **{field: value})


def test_a_spec_of_another_interface_is_left_to_the_registry():
    spec = BackendSpec("toy", "scorer", "somewhere", api=API_VERSION + 1)
    assert spec.api != API_VERSION
