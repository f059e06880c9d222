"""Replicas pass the checks of the reference engine; `genlm check ray` runs all of them.

A program sends the same messages to its own and to served replicas. Served ones have sessions
with limits, reduce rows apart from the engine, and continue to run.
"""

from population_programs import run_population_programs

from genlm.testing import conformance_tests

OF_SESSIONS = [
    "a-cancelled-continuation-changes-no-other",
    "a-failing-reduction-fails-alone",
    "adapters-answer-as-themselves",
    "adapters-mix-in-a-batch",
    "batch-equals-map",
    "cancelled-requests-change-no-other",
    "capabilities-are-implemented",
    "closing-ends-every-request",
    "concurrent-requests-share-steps",
    "contexts-may-be-dropped",
    "contexts-outlast-what-ends-requests",
    "draws-are-those-of-the-seed",
    "loading-an-adapter-changes-no-row",
    "populations-equal-lists",
    "populations-share-the-engine",
    "random-populations-agree-with-the-oracle",
    "random-programs-agree-with-the-oracle",
    "reductions-are-of-the-row",
    "reductions-use-the-adapter",
    "removed-adapters-are-gone",
    "rows-belong-to-the-caller",
    "rows-hold-no-more-than-themselves",
    "scores-equal-the-loop-over-rows",
    "wrong-adapters-are-refused",
]

test_conformance = conformance_tests("ray", models=["private"])
test_served_replicas = conformance_tests("ray", models=["served"], only=OF_SESSIONS)


def test_random_programs_on_populations(pair, reference):
    run_population_programs(pair, reference.next_token_logprobs_sync)
