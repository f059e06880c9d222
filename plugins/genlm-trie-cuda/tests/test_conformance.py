"""The trie passes every check of the conformance suite, on each available path."""

from genlm.testing import conformance_tests

test_cuda = conformance_tests("cuda", no_skips=True)
