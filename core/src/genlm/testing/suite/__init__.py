"""The conformance suite as tests.

pytest -p genlm.testing.plugin --pyargs genlm.testing.suite --genlm-backend=NAME
"""
