"""`RecentSequences` finds lists that it was given, and those longer by an id, and no others."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from genlm.core.queries import recent_sequences
from genlm.core.queries.recent_sequences import SHORTEST, RecentSequences
from genlm.core.queries.sequence import TokenSequence

VOCAB_SIZE = 1000


def ids_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.fixture
def stored() -> tuple[RecentSequences, list[int]]:
    """The sequences of recent lists, and a stored list."""
    recent, ids = RecentSequences(), ids_of(SHORTEST + 40)
    recent.add(list(ids), TokenSequence.of(ids))
    return recent, ids


def test_a_list_grows_in_place_and_its_siblings_are_found(stored: Any) -> None:
    recent, ids = stored
    grown = list(ids)
    for token_id in ids_of(50, seed=1):
        grown.append(token_id)
        assert recent.find(grown, VOCAB_SIZE) == TokenSequence.of(grown)
    for length in (len(ids) + 1, len(ids) + 30):
        sibling = [*grown[:length], (grown[length] + 1) % VOCAB_SIZE]
        for _ in range(2):
            assert recent.find(sibling, VOCAB_SIZE) == TokenSequence.of(sibling)
        assert recent.find(grown[:length], VOCAB_SIZE) == TokenSequence.of(grown[:length])
    assert recent.find(grown, VOCAB_SIZE) == TokenSequence.of(grown)
    assert recent.find(ids, VOCAB_SIZE) == TokenSequence.of(ids)


def test_what_was_found_is_the_callers_list_at_that_time(stored: Any) -> None:
    recent, ids = stored
    longer = [*ids, 1]
    assert recent.find(longer, VOCAB_SIZE) == TokenSequence.of(longer)
    longer[3] += 1  # the caller's own list, changed after the request
    assert recent.find([*ids, 1], VOCAB_SIZE) == TokenSequence.of([*ids, 1])
    assert recent.find(longer, VOCAB_SIZE) in {None, TokenSequence.of(longer)}
    sibling = [*ids, 2]  # its list is not that of the first extension
    assert recent.find(sibling, VOCAB_SIZE) == TokenSequence.of(sibling)
    sibling[3] += 1
    assert recent.find(sibling, VOCAB_SIZE) in {None, TokenSequence.of(sibling)}
    assert recent.find([*ids, 2], VOCAB_SIZE) == TokenSequence.of([*ids, 2])


@pytest.mark.parametrize("place", [0, 1, 50, -9, -2])
def test_a_list_that_differs_in_one_place_is_not_found(stored: Any, place: int) -> None:
    recent, ids = stored
    other = list(ids)
    other[place] = (other[place] + 1) % VOCAB_SIZE
    assert recent.find(other, VOCAB_SIZE) is None
    assert recent.find([*other, 5], VOCAB_SIZE) is None
    assert recent.find([*ids, 5], VOCAB_SIZE) == TokenSequence.of([*ids, 5])


@pytest.mark.parametrize(
    "last",
    [VOCAB_SIZE, -1, 1.0, None, "a", [1], True, np.int64(3), torch.tensor(3), np.ones(2)],
    ids=repr,
)
def test_what_needs_another_check_is_left_to_it(stored: Any, last: Any) -> None:
    recent, ids = stored
    assert recent.find([*ids, last], VOCAB_SIZE) is None
    assert recent.find([*ids[:-1], last], VOCAB_SIZE) is None
    assert recent.find([*ids[:60], last, *ids[61:]], VOCAB_SIZE) is None
    assert recent.find([*ids, 5], VOCAB_SIZE) == TokenSequence.of([*ids, 5])


@pytest.mark.parametrize("place", [0, 3, 50, -9, -2, -1])
@pytest.mark.parametrize("kind", [float, np.int64, np.float32, torch.tensor])
def test_an_equal_object_of_another_type_is_left_to_another_check(
    stored: Any, kind: Any, place: int
) -> None:
    recent, ids = stored
    other: list[Any] = list(ids)
    other[place] = kind(ids[place])
    assert recent.find(other, VOCAB_SIZE) is None
    assert recent.find([*other, 5], VOCAB_SIZE) is None
    assert recent.find([*ids, 5], VOCAB_SIZE) == TokenSequence.of([*ids, 5])


@pytest.mark.parametrize("places", [[0], [7], [-1], range(SHORTEST)])
def test_a_mask_is_left_to_another_check(places: Any) -> None:
    recent, ids = RecentSequences(), [1, 0] * SHORTEST
    recent.add(list(ids), TokenSequence.of(ids))
    other: list[Any] = list(ids)
    for place in places:
        other[place] = bool(ids[place])
    assert recent.find(other, VOCAB_SIZE) is None


def test_lists_that_are_not_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_sequences, "_MAX_IDS", 2000)
    recent, used = RecentSequences(), ids_of(100, seed=-1)
    recent.add(list(used), TokenSequence.of(used))
    for seed in range(300):
        ids = ids_of(100, seed)
        recent.add(list(ids), TokenSequence.of(ids))
        assert recent.find(used, VOCAB_SIZE) is not None
        lengths = {id(entry.ids): len(entry.ids) for entry in recent._young.values()}
        lengths |= {id(entry.ids): len(entry.ids) for entry in recent._old.values()}
        assert sum(lengths.values()) < 3 * 2000
    assert recent.find(ids_of(100, 0), VOCAB_SIZE) is None
    assert recent.find(ids, VOCAB_SIZE) == TokenSequence.of(ids)


@pytest.mark.parametrize("grows", [False, True])
def test_a_list_that_is_used_often_does_not_displace_others(
    stored: Any, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    monkeypatch.setattr(recent_sequences, "_MAX_IDS", 2000)
    recent, used = stored
    other = ids_of(100, seed=1)
    recent.add(list(other), TokenSequence.of(other))
    for token_id in ids_of(30 if grows else 500, seed=2):
        if grows:
            used.append(token_id)
        assert recent.find(used, VOCAB_SIZE) == TokenSequence.of(used)
    assert recent.find(other, VOCAB_SIZE) == TokenSequence.of(other)


def test_the_ids_of_lists_that_grow_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_sequences, "_MAX_IDS", 4000)
    recent = RecentSequences()
    lists = [ids_of(SHORTEST, seed) for seed in range(30)]
    found = []
    for token_id in ids_of(400, seed=-1):
        for grown in lists:
            grown.append(token_id)
            found.append(recent.find(grown, VOCAB_SIZE))
            if found[-1] is None:
                recent.add(list(grown), TokenSequence.of(grown))
        entries = [*recent._young.values(), *recent._old.values()]
        stored = {id(entry.ids): len(entry.ids) for entry in entries}
        assert sum(stored.values()) < 2 * 4000 + 3 * len(grown)
    assert any(found[:600])


def test_threads_get_the_sequences_of_their_lists(stored: Any) -> None:
    recent, ids = stored
    wrong: list[list[int]] = []

    def grow(seed: int) -> None:
        grown = list(ids)
        for token_id in ids_of(300, seed):
            grown.append(token_id)
            sequence = recent.find(grown, VOCAB_SIZE)
            if sequence is None:
                recent.add(list(grown), TokenSequence.of(grown))
            elif sequence.token_ids != tuple(grown):
                wrong.append(grown)

    threads = [threading.Thread(target=grow, args=(seed,)) for seed in (1, 1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
