"""How Hypothesis and garbage collection run in all tests.

No example fails because the machine is busy.
"""

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile("genlm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("genlm")


def pytest_collection_finish() -> None:
    """Freeze what the tests import."""
    # Hypothesis looks for the references to its random generator when it makes it, at the
    # first example. It would not find them among frozen objects and would warn.
    settings(max_examples=1, database=None)(given(st.none())(lambda _: None))()
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Freeze also what the tests of a file imported as they ran."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Exclude all imported modules from later collections, which would take half a second."""
    gc.collect()
    gc.freeze()
