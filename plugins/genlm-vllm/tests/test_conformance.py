"""The engine passes every check, in this process and with workers in other processes."""

from genlm.testing import conformance_tests

test_vllm = conformance_tests("vllm", no_skips=True)
