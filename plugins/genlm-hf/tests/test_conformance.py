"""The engine passes every check on every execution path: packed, slot_cache and padded.

`genlm check hf` runs the other architectures too.
"""

from genlm.testing import conformance_tests

test_hf = conformance_tests("hf", models=["llama", "gptj", "mamba"], no_skips=True)
