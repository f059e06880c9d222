"""The trie keeps every law that the conformance suite knows, on each path of the machine."""

from genlm.testing import conformance_tests

test_cuda = conformance_tests("cuda", no_skips=True)
