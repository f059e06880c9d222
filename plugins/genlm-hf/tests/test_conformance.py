"""The engine keeps every law, with an attention model and with a recurrent one.

`genlm check hf` runs the other architectures too.
"""

from genlm.testing import conformance_tests

test_hf = conformance_tests("hf", models=["llama", "mamba"], no_skips=True)
