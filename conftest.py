"""How Hypothesis runs in all tests: no example fails because the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("genlm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("genlm")
