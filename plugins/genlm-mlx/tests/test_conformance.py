"""The engine passes every check in both tiers; the oracle is transformers' forward pass."""

from genlm.testing import conformance_tests

test_mlx = conformance_tests("mlx", models=["llama", "gemma3_text", "mamba"], no_skips=True)
