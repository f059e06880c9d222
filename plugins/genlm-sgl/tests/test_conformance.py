"""The engine passes every check, with plain and with tight options; no stand-in was called."""

from __future__ import annotations

from genlm.testing import conformance_tests
from genlm_sgl.cpu import stubs

test_sgl = conformance_tests("sgl", no_skips=True)


def test_no_stand_in_was_called() -> None:
    assert stubs.CALLED == []
