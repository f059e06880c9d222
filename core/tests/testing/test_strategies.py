"""Near misses are derived from a sequence and never equal it."""

from __future__ import annotations

import pytest

from genlm.testing.strategies import near_misses


def test_near_misses_are_what_careless_keys_confuse():
    assert near_misses((3, 1, 2)) == {
        "reversed": (2, 1, 3),
        "rotated": (1, 2, 3),
        "0 appended": (3, 1, 2, 0),
        "0 put in front": (0, 3, 1, 2),
        "first dropped": (1, 2),
        "last dropped": (3, 1),
        "sorted": (1, 2, 3),
        "doubled": (3, 1, 2, 3, 1, 2),
    }


@pytest.mark.parametrize("sequence", [(0,), (5,), (1, 1), (0, 0, 0), (1, 2)])
def test_none_is_empty_or_the_sequence_itself(sequence):
    misses = near_misses(sequence).values()
    assert () not in misses
    assert sequence not in misses
    assert len(misses) >= 2
