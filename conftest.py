"""How Hypothesis and garbage collection run in all tests.

No example fails because the machine is busy.
"""

import gc

from hypothesis import HealthCheck, settings

settings.register_profile("genlm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("genlm")


def pytest_collection_finish() -> None:
    """Exclude all imported modules from later collections, which would take half a second."""
    gc.collect()
    gc.freeze()
