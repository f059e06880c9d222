"""The reference engine passes every check."""

from genlm.testing import conformance_tests

test_reference = conformance_tests("reference", no_skips=True)
