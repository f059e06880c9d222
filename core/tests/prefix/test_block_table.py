"""Block tables have the rows of a table of lists, whatever remains after the ends of rows."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genlm.prefix.block_table import BlockTable
from genlm.prefix.node import SCRATCH_SLOT

Paths = list[list[int]]


def paths(table: BlockTable) -> Paths:
    trunk, ends = table.trunk.tolist(), zip(table.slots.tolist(), table.lengths, strict=True)
    return [[*trunk, *slots[:length]] for slots, length in ends]


def cut(table: BlockTable, expected: Paths, rows: list[int], count: int) -> BlockTable:
    """Free up to `count` last slots of each of some rows that no other row contains."""
    freed: list[int] = []
    for row in rows:
        path = expected[row]
        others = {slot for other in expected if other is not path for slot in other}
        own = next((n for n, slot in enumerate(reversed(path)) if slot in others), len(path))
        end = len(path) - min(count, own)
        freed += path[end:]
        expected[row] = path[:end]
    return table.without(np.array(freed, np.int64), np.array(rows))


@given(st.data())
def test_every_operation_returns_the_rows_of_lists(data: st.DataObject) -> None:
    slots = iter(range(1, 10_000))
    table, expected = BlockTable.empty(4), [[] for _ in range(4)]
    names = ["select", "replace", "extend", "cut", "with_trunk"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=12)):
        before, count = paths(table), len(table)
        if name == "select":
            chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
            table, expected = table.select(np.array(chosen)), [[*expected[i]] for i in chosen]
        elif name == "with_trunk":
            table = table.with_trunk(data.draw(st.integers(0, len(table.trunk))))
        else:
            rows = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
            width = data.draw(st.integers(1, 3))
            old = table
            if name == "cut":
                table = cut(table, expected, rows, width)
            else:
                added = [next(slots) for _ in range(width)]
                for place, row in enumerate(rows):
                    expected[row] = [*expected[row], *added, *islice(slots, place)]
                if name == "replace":
                    table = table.replace(
                        np.array(rows), [np.array(expected[row], np.int64) for row in rows]
                    )
                else:
                    ends = [expected[row][len(table.trunk) :] for row in rows]
                    lengths = np.array([len(end) for end in ends])
                    longest = int(lengths.max()) + data.draw(st.integers(0, 2))
                    padded = [[*end, *[777] * (longest - len(end))] for end in ends]
                    table = table.extend(np.array(rows), np.array(padded, np.int32), lengths)
            assert paths(old) == before
        assert paths(table) == expected
        assert table.tokens.tolist() == list(map(len, expected))
        assert table.last.tolist() == [row[-1] if row else SCRATCH_SLOT for row in expected]
        assert table.slots.dtype == np.int32
        assert table.trunk.dtype == np.int64


def test_stale_entries_after_the_end_of_a_row_are_not_its_own() -> None:
    entries = np.array([[1, 2, 3], [4, 5, 2]], np.int32)
    table = BlockTable(np.array([7]), entries, np.array([3, 2]))
    shorter = table.without(np.array([2, 3]), np.array([0, 1]))
    assert paths(shorter) == [[7, 1], [7, 4, 5]]
    assert paths(table) == [[7, 1, 2, 3], [7, 4, 5]]
    replaced = shorter.replace(np.array([0]), [np.array([7, 8])])
    assert paths(replaced) == [[7, 8], [7, 4, 5]]
    equal = BlockTable(np.array([7]), np.array([[1, 2, 3, 9]] * 2, np.int32), np.array([3, 3]))
    assert equal.select(np.arange(2)).trunk.tolist() == [7, 1, 2]  # without the last slots
    unequal = BlockTable(equal.trunk, equal.slots, np.array([4, 2]))
    assert unequal.select(np.arange(2)).trunk.tolist() == [7, 1]
