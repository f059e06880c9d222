"""The engine passes every check with attention and with a recurrent state; the oracle is
transformers. `genlm check llamacpp` runs a model with windows too.
"""

from genlm.testing import conformance_tests

test_llamacpp = conformance_tests("llamacpp", models=["llama", "mamba"], no_skips=True)
