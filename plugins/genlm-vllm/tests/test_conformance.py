"""The engine passes every check, in this process and in processes of its own."""

from genlm.testing import conformance_tests

test_vllm = conformance_tests("vllm", no_skips=True)
