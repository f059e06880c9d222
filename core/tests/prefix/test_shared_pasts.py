"""Groups of sequences whose pasts begin with the same slots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm.prefix import PassLayout, TokenBatch, shared_pasts
from genlm.prefix.shared_pasts import groups_with_shared_pasts

texts = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12
)


def groups(
    paths: list[np.ndarray], pasts: list[int], trunk: int = 0
) -> list[tuple[list[int], int]]:
    return [
        (members.tolist(), shared)
        for members, shared in groups_with_shared_pasts(paths, np.array(pasts), trunk)
    ]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pasts, "_WORTH_SHARING", 1)
    monkeypatch.setattr(shared_pasts, "_WORTH_A_PASS", 3)
    monkeypatch.setattr(shared_pasts, "_LEAST_COMMON", 2)


@pytest.mark.parametrize(("common", "shared"), [(4095, 0), (4096, 4096)])
@pytest.mark.parametrize("trunk", [0, 100])
def test_slots_are_shared_if_enough_of_them_are_read_once(
    common: int, shared: int, trunk: int
) -> None:
    slots = np.arange(1, 5001)
    paths = [slots[trunk:], np.concatenate([slots[trunk:common], slots[common:] + 10_000])]
    assert groups(paths, [4999, 4999], trunk) == [([0, 1], shared)]


@pytest.mark.parametrize(("length", "is_separate"), [(2**15 - 1, False), (2**15, True)])
def test_a_group_is_separate_if_enough_slots_are_read_once(
    length: int, is_separate: bool
) -> None:
    common = np.arange(1, 101)
    branches = [np.arange(length + 1) + 100_000 * i for i in (1, 2)]
    paths = [np.concatenate([common, branches[i]]) for i in (0, 1, 0, 1)]
    one = [([0, 1, 2, 3], 0)]
    several = [([0, 2], 100 + length), ([1, 3], 100 + length)]
    assert groups(paths, [100 + length] * 4) == (several if is_separate else one)


@pytest.mark.usefixtures("eager")
@settings(max_examples=300, deadline=None)
@given(texts, st.integers(0, 4))
def test_groups_are_a_partition_in_which_pasts_have_their_first_slots_in_common(
    wanted: list[tuple[int, ...]], limit: int
) -> None:
    """Each prefix of a text has one slot, as in a prefix tree."""
    prefixes = {text[:end] for text in wanted for end in range(1, len(text) + 1)}
    numbers = {prefix: slot for slot, prefix in enumerate(sorted(prefixes), start=1)}
    paths = [
        np.array([numbers[text[:end]] for end in range(1, len(text) + 1)]) for text in wanted
    ]
    pasts = [len(text) - 1 for text in wanted]
    equal = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))
    trunk = min(limit, len(list(equal)))
    found = groups([path[trunk:] for path in paths], pasts, trunk)
    assert sorted(itertools.chain.from_iterable(g for g, _ in found)) == list(range(len(paths)))
    for members, shared in found:
        assert members == sorted(members)
        assert shared <= min(pasts[i] for i in members)
        assert len({tuple(paths[i][:shared]) for i in members}) == 1
    for (earlier, _), (later, _) in itertools.combinations(found, 2):
        new = {int(paths[i][pasts[i]]) for i in later}
        assert not any(new & set(paths[i][: pasts[i]].tolist()) for i in earlier)


def test_prompts_get_passes_of_their_own_if_those_save_more_than_they_cost() -> None:
    first, second, short = np.arange(1, 2000), np.arange(3000, 5000), np.arange(6000, 6030)
    paths = [*[first[:1000]] * 100, *[second[:1000]] * 100, *[short] * 10]
    found = groups(paths, [len(path) - 1 for path in paths])
    assert found == [
        (list(range(200, 210)), 0),
        (list(range(100)), 999),
        (list(range(100, 200)), 999),
    ]
    assert groups(paths[::10], [len(path) - 1 for path in paths[::10]]) == [
        (list(range(21)), 0)
    ]


def test_a_common_instruction_is_shared_by_the_groups_of_its_questions() -> None:
    instruction = np.arange(1, 201)
    questions = [np.arange(first, first + 600) for first in (1000, 2000)]
    paths = [np.concatenate([instruction, question]) for question in questions] * 80
    assert groups(paths, [700] * 160) == [
        (list(range(0, 160, 2)), 700),
        (list(range(1, 160, 2)), 700),
    ]
    assert groups(paths[:100], [700] * 100) == [(list(range(100)), 200)]


@pytest.mark.parametrize("shared", [0, 2, 3])
def test_a_layout_reads_the_slots_after_the_shared_ones(shared: int) -> None:
    paths = [np.array([1, 2, 3, 4, 5, 6]), np.array([1, 2, 3, 7])]
    ends = np.array([path[-1] for path in paths])
    slots = np.array([[3, 4, 5, 6], [3, 7, 0, 0]], np.int32)
    tokens, rows, trunk = np.array([8, 8]), np.arange(2), np.array([1, 2])
    for batch in (
        TokenBatch.of_paths(None, paths, [[8], [8]]),
        TokenBatch(None, tokens, np.array([5, 3]), ends, trunk, slots, rows, rows),
    ):
        layout = PassLayout(batch, batch.segments)
        layout.share(shared)
        assert layout.shared_slots.tolist() == [[1, 2, 3][:shared]]
        assert layout.past == 5 - shared
        assert layout.padding.tolist() == [0, 2]
        own = [
            row[used].tolist() for row, used in zip(layout.reads, layout.is_token, strict=True)
        ]
        assert own == [path[shared:].tolist() for path in paths]
        assert layout.past_ends.tolist() == [5, 3]
