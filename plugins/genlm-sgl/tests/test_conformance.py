"""The engine passes every check, with plain and with tight options, and calls no stub."""

from __future__ import annotations

from genlm.testing import conformance_tests
from genlm_sgl.cpu import stubs

test_sgl = conformance_tests("sgl", no_skips=True)


def test_no_stub_was_called() -> None:
    assert stubs.CALLED == []
