"""The engine passes every check on both execution paths; the oracle is transformers.

A model with windows runs the checks of rows, whatever is cached; `genlm check mlx` runs all.
"""

from genlm.testing import conformance_tests

OF_ROWS = [
    "batch-equals-map",
    "populations-equal-lists",
    "prefixes-equal-fresh-evaluation",
    "random-populations-agree-with-the-oracle",
    "random-programs-agree-with-the-oracle",
    "rows-are-right",
    "scores-equal-the-loop-over-rows",
    "tight-budgets-change-nothing",
]

test_mlx = conformance_tests("mlx", models=["llama", "mamba"], no_skips=True)
test_mlx_windows = conformance_tests("mlx", models=["gemma3_text"], only=OF_ROWS)
