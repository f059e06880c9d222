"""The engine passes every check on both execution paths; the oracle is transformers."""

from genlm.testing import conformance_tests

test_mlx = conformance_tests("mlx", models=["llama", "gemma3_text", "mamba"], no_skips=True)
