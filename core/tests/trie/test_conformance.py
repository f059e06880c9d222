"""The core's token trie keeps every law."""

from genlm.testing import conformance_tests

test_numpy = conformance_tests("numpy", no_skips=True)
