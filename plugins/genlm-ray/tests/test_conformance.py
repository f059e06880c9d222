"""Two replicas pass every check, private and served."""

from genlm.testing import conformance_tests

test_conformance = conformance_tests("ray")
