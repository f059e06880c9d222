"""What a batch of segments sees, against a loop over tokens; arrays that grow."""

from __future__ import annotations

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from genlm.prefix import PassLayout, TokenBatch
from genlm_mlx.cache import slot_caches
from genlm_mlx.forward import as_tensor, select_logits
from genlm_mlx.storage import KVStorage, LayerShape

LAYER = LayerShape(heads=2, key_width=3, value_width=5, dtype=mx.float32)


def layout_of(*sequences: tuple[int, int, int], **options: list[bool]) -> PassLayout:
    """Return the layout of sequences: numbers of past and new tokens, and the first slot."""
    paths = [np.arange(first, first + past + new) for past, new, first in sequences]
    tokens = [range(new) for _, new, _ in sequences]
    batch = TokenBatch.of_paths(None, paths, tokens, **options)
    return PassLayout(batch, batch.segments)


shapes = st.tuples(st.integers(0, 12), st.integers(1, 6))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(shapes, min_size=1, max_size=5), st.sampled_from([None, 1, 3, 40]), st.booleans()
)
def test_a_token_sees_its_past_and_window(
    segment_shapes: list[tuple[int, int]], window: int | None, by_model: bool
) -> None:
    batch = layout_of(*((*shape, 1 + 20 * i) for i, shape in enumerate(segment_shapes)))
    storage = KVStorage([LAYER], 1 + 20 * len(segment_shapes))
    (cache,) = slot_caches(storage, batch, [None if by_model else window])
    new = batch.tokens.shape[1]
    mask = cache.make_mask(new, window_size=window if by_model else None)
    full_mask = np.ones((len(segment_shapes), 1, new, batch.reads.shape[1]), bool)
    visible = full_mask if mask is None else np.array(mask)
    assert mask is None or mask.shape == full_mask.shape
    for row, (past, count) in enumerate(segment_shapes):
        assert cache.offset[row] == past
        for place in range(count):
            visible_slots = batch.reads[row][visible[row, 0, place]] - (1 + 20 * row)
            position = past + place
            first = 0 if window is None else max(0, position + 1 - window)
            assert visible_slots.tolist() == list(range(first, position + 1))


def test_keys_and_values_come_back_for_whole_sequences() -> None:
    storage = KVStorage([LAYER, LAYER], 100)
    generator = np.random.default_rng(0)
    past = layout_of((0, 4, 1), (0, 4, 30))
    written: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for batch in (past, layout_of((3, 2, 1), (1, 2, 30))):
        rows, new = batch.tokens.shape
        keys = generator.normal(size=(rows, 2, new, 3)).astype(np.float32)
        values = generator.normal(size=(rows, 2, new, 5)).astype(np.float32)
        for row in range(rows):
            for place, slot in enumerate(batch.writes[row]):
                written[int(slot)] = keys[row, :, place], values[row, :, place]
        _, cache = slot_caches(storage, batch, [None, None])
        fetched = cache.update_and_fetch(mx.array(keys), mx.array(values))
        assert cache.keys_and_values() is fetched
        for index, states in enumerate(fetched):
            for row in range(rows):
                for column, slot in enumerate(batch.reads[row]):
                    if not batch.is_token[row, column]:
                        continue
                    expected = written[int(slot)][index]
                    assert np.array_equal(np.array(states[row, :, column]), expected)


def test_what_fails_to_grow_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = KVStorage([LAYER], 10**6)
    of_mlx, calls = mx.eval, []

    def failing(*arrays: object) -> None:
        calls.append(arrays)
        if len(calls) == 2:
            raise RuntimeError("[malloc] Unable to allocate")
        of_mlx(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", failing)
        with pytest.raises(RuntimeError, match="allocate"):
            storage.make_room(3000)
    assert storage.is_corrupt
    storage.reset()
    assert not storage.is_corrupt
    storage.make_room(3000)
    assert not storage.is_corrupt


@pytest.mark.parametrize("max_slots", [3, 5000, 10**6])
def test_growing_keeps_what_was_written(max_slots: int) -> None:
    storage = KVStorage([LAYER], max_slots)
    slot = min(max_slots, 1024) - 1
    batch = layout_of((0, 1, slot))
    keys, values = mx.ones((1, 2, 1, 3)), mx.ones((1, 2, 1, 5)) * 2
    slot_caches(storage, batch, [None])[0].update_and_fetch(keys, values)
    storage.settle()
    storage.make_room(max_slots - 1 if max_slots < 10**6 else 3000)
    assert storage.slots == min(max_slots, max(3001, 2048)) or storage.slots == max_slots
    again = layout_of((1, 1, slot), is_cached=[True])
    fetched = slot_caches(storage, again, [None])[0].update_and_fetch(keys * 5, values * 5)
    assert np.array_equal(np.array(fetched[0][0, :, 0]), np.ones((2, 3)))
    assert np.array_equal(np.array(fetched[1][0, :, 0]), np.full((2, 5), 2))


def test_the_logits_of_a_step_are_not_copied() -> None:
    logits = mx.arange(6.0).reshape(3, 1, 2)
    address = np.asarray(logits).ctypes.data
    rows, places = np.arange(3), np.zeros(3, np.int64)
    values = as_tensor(select_logits(logits, rows, places))
    assert values.data_ptr() == address
    del logits
    assert values.tolist() == [[0, 1], [2, 3], [4, 5]]
    several = mx.arange(12.0).reshape(3, 2, 2)
    assert as_tensor(select_logits(several, rows, places + 1)).tolist() == [
        [2, 3],
        [6, 7],
        [10, 11],
    ]
