"""The engine passes every check in every tier: packed, gathered and padded.

`genlm check hf` runs the other architectures too.
"""

from genlm.testing import conformance_tests

test_hf = conformance_tests("hf", models=["llama", "gptj", "mamba"], no_skips=True)
