"""The core's token trie passes every check."""

from genlm.testing import conformance_tests

test_numpy = conformance_tests("numpy", no_skips=True)
