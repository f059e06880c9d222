"""Two private and two served replicas pass every check."""

from genlm.testing import conformance_tests

test_conformance = conformance_tests("ray")
