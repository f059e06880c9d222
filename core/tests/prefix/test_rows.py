"""Rows from a prefix tree, computed by a model whose keys tell every prefix apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from genlm import EvaluationError, Token, Vocabulary
from genlm.prefix import Computed, PrefixRows, TreeBatch, waves_of

SIZE, TOKEN_BYTES = 7, 10


def row_after(state: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(state)
    return torch.randn(SIZE, generator=generator)


def next_state(state: int, token: int) -> int:
    return (state * 31 + token + 1) % 1_000_003


def expected(adapter: str | None, sequence: tuple[int, ...]) -> torch.Tensor:
    state = len(adapter or "")
    for token in sequence:
        state = next_state(state, token)
    return row_after(state).log_softmax(0)


class Model:
    """Keeps a state in each slot, made from the state of the token before it."""

    def __init__(self, capacity: int) -> None:
        self.slots: list[int | None] = [None] * (capacity + 1)
        self.largest = (0, 0)
        self.fail = False

    def __call__(self, batch: TreeBatch) -> Computed:
        tokens = 0
        waves = waves_of(batch)
        states: dict[int, int] = {}
        for wave in waves:
            for segment in wave:
                past = segment.slots[: segment.past]
                state = self.slots[past[-1]] if len(past) else len(batch.adapter or "")
                for token, slot, write in zip(
                    segment.tokens, segment.slots[segment.past :], segment.writes, strict=True
                ):
                    assert state is not None
                    state = next_state(state, token)
                    states[int(slot)] = state
                    self.slots[write] = state
                    if self.fail:
                        raise RuntimeError("no memory")
                tokens += len(segment.tokens)
        self.largest = max(self.largest[0], tokens), max(self.largest[1], len(batch.sequences))
        logits = torch.stack([row_after(states[slot]) for slot in batch.last_slots])
        return Computed(logits, tokens, forwards=len(waves))


def serve(capacity: int, **limits: int) -> tuple[PrefixRows, Model]:
    tokens = [Token(i, bytes([65 + i])) for i in range(SIZE)]
    model = Model(capacity)
    rows = PrefixRows(
        model,
        without_cache=lambda sequence: expected(None, sequence)[None],
        vocabulary=Vocabulary(None, tokens, [str(token) for token in tokens]),
        budget_bytes=(capacity + 1) * TOKEN_BYTES + 3,
        bytes_per_token=TOKEN_BYTES,
        **{"max_tokens": 64, "max_rows": 8} | limits,
    )
    return rows, model


def used(rows: PrefixRows, name: str) -> int:
    return int(rows.statistics()[name])


def assert_right(rows: PrefixRows, adapter: str | None, step: list[Any]) -> None:
    found = rows.rows(adapter, step)
    wanted = torch.stack([expected(adapter, sequence) for sequence in step])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("capacity", [0, 3, 40, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_what_else_is_kept(capacity: int, seed: int) -> None:
    program = random.Random(seed)
    rows, model = serve(capacity)
    population: list[tuple[int, ...]] = [(1,)]
    for step in range(60):
        population = [(*program.choice(population), program.randrange(SIZE)) for _ in range(12)]
        if step % 15 == 14:
            population = [ids[:2] for ids in population]
        assert_right(rows, None, list(dict.fromkeys(population)))
        assert used(rows, "kv_tokens") <= capacity
        assert used(rows, "kv_bytes_used") <= used(rows, "kv_budget_bytes")
    assert model.largest[0] <= 64
    assert model.largest[1] <= 8
    assert (used(rows, "contexts_without_cache") > 0) == (capacity < 20)
    assert (used(rows, "tokens_evicted") > 0) == (0 < capacity < 2000)


def test_every_token_is_computed_once() -> None:
    rows, _ = serve(500)
    prompt = (1, 2, 3, 4, 5)
    assert_right(rows, None, [(*prompt, i) for i in range(SIZE)])
    assert used(rows, "tokens_computed") == 5 + SIZE
    assert_right(rows, None, [(*prompt, i, 6) for i in range(SIZE)])
    assert used(rows, "tokens_computed") == 5 + 2 * SIZE


def test_adapters_share_nothing() -> None:
    rows, _ = serve(500)
    for adapter in ("", "red", "scarlet"):
        assert_right(rows, adapter, [(1, 2, 3), (1, 2)])
    assert used(rows, "kv_tokens") == 9


def test_a_context_longer_than_a_pass_is_computed_in_pieces() -> None:
    rows, model = serve(500, max_tokens=10)
    assert_right(rows, None, [tuple(i % SIZE for i in range(95)), (1, 2)])
    assert model.largest[0] == 10


def test_what_raises_leaves_computed_tokens_only() -> None:
    rows, model = serve(500)
    assert_right(rows, None, [(1, 2, 3)])
    model.fail = True
    with pytest.raises(RuntimeError, match="no memory"):
        rows.rows(None, [(1, 2, 3, 4, 5), (2,)])
    assert used(rows, "kv_tokens") == 3
    model.fail = False
    assert_right(rows, None, [(1, 2, 3, 4, 5), (2,), (1, 2)])


def test_a_kept_prefix_outlives_others_and_must_fit() -> None:
    rows, _ = serve(20)
    kept = (6, 5, 4, 3, 2, 1)
    rows.keep(None, kept)
    for i in range(SIZE):
        assert_right(rows, None, [(i,) * 12])
    before = used(rows, "tokens_computed")
    assert_right(rows, None, [(*kept, 0)])
    assert used(rows, "tokens_computed") == before + 1
    with pytest.raises(EvaluationError, match="does not fit into the 20 tokens"):
        rows.keep(None, (1,) * 19)
    rows.clear()
    assert used(rows, "kv_tokens") == 0
