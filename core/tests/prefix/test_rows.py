"""Rows from a prefix tree, computed by a model whose keys tell every prefix apart."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from genlm import EvaluationError, Query, Token, Vocabulary
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix import (
    BatchLimits,
    ForwardResult,
    Integers64,
    PrefixRows,
    TextResult,
    TokenBatch,
    UncachedPath,
)

SIZE, TOKEN_BYTES = 7, 10


def row_after(state: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(state)
    return torch.randn(SIZE, generator=generator)


def next_state(state: int, token: int) -> int:
    return (state * 31 + token + 1) % 1_000_003


def logits_after(adapter: str | None, sequence: Sequence[int]) -> torch.Tensor:
    state = len(adapter or "")
    for token in sequence:
        state = next_state(state, token)
    return row_after(state)


def expected(adapter: str | None, sequence: Sequence[int]) -> torch.Tensor:
    return logits_after(adapter, sequence).log_softmax(0)


def packed(sequences: Sequence[Sequence[int]]) -> list[TokenSequence]:
    return [TokenSequence.of(ids) for ids in sequences]


class Model:
    """Keeps a state in each slot, made from the state of the token before it."""

    def __init__(self, capacity: int) -> None:
        self.slots: list[int | None] = [None] * (capacity + 1)
        self.largest = (0, 0)
        self.passes = 0
        self.fail = False

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        states: dict[int, int] = {}  # by slot
        for token, position, write, row in zip(
            batch.tokens.tolist(), batch.positions.tolist(), batch.writes, batch.rows,
            strict=True,
        ):  # fmt: skip
            *past, slot = batch.path(row, position + 1).tolist()
            state = len(batch.adapter or "")
            if past:
                before = states.get(past[-1], self.slots[past[-1]])
                assert before is not None
                state = before
            assert slot not in states  # nothing is run twice in a pass
            states[slot] = self.slots[write] = next_state(state, token)
            if self.fail:
                raise RuntimeError("no memory")
        tokens, results = len(batch.tokens), batch.result_slots.tolist()
        self.passes += 1
        self.largest = max(self.largest[0], tokens), max(self.largest[1], len(results))
        logits = torch.stack([row_after(states[slot]) for slot in results])
        return ForwardResult(logits, tokens, forwards=len(batch.stages()))


class Alone(UncachedPath):
    """The reference: each sequence without a cache."""

    def __init__(self) -> None:
        tokens = [Token(i, bytes([65 + i])) for i in range(SIZE)]
        self.vocabulary = Vocabulary(None, tokens, [str(token) for token in tokens])
        super().__init__(self.vocabulary, BatchLimits(max_tokens=64, max_rows=1))
        self.adapter: str | None = None

    def run(
        self, sequences: Sequence[Sequence[int]], firsts: Integers64
    ) -> Iterator[tuple[Integers64, torch.Tensor]]:
        for row, (ids, first) in enumerate(zip(sequences, firsts.tolist(), strict=True)):
            ends = range(first, len(ids))
            logits = [logits_after(self.adapter, ids[: end + 1]) for end in ends]
            yield np.array([[row] * len(ends), ends]), torch.stack(logits)

    def logits_by_pass(
        self, adapter: str | None, sequences: Sequence[TokenSequence]
    ) -> Generator[torch.Tensor, None, None]:
        self.adapter = adapter
        return super().logits_by_pass(adapter, sequences)

    def scores_by_pass(
        self, adapter: str | None, texts: Sequence[Query]
    ) -> Generator[list[TextResult], None, None]:
        self.adapter = adapter
        return super().scores_by_pass(adapter, texts)


def serve(capacity: int, **limits: int) -> tuple[PrefixRows, Model]:
    model, uncached = Model(capacity), Alone()
    rows = PrefixRows(
        model,
        uncached=uncached,
        vocabulary=uncached.vocabulary,
        budget_bytes=(capacity + 1) * TOKEN_BYTES + 3,
        bytes_per_token=TOKEN_BYTES,
        **{"max_tokens": 64, "max_rows": 8} | limits,
    )
    return rows, model


def used(rows: PrefixRows, name: str) -> int:
    return int(rows.statistics()[name])


def assert_right(rows: PrefixRows, adapter: str | None, step: list[Any]) -> None:
    computed = rows.rows(adapter, packed(step))
    wanted = torch.stack([expected(adapter, sequence) for sequence in step])
    torch.testing.assert_close(computed, wanted, rtol=0, atol=0)


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


def test_rows_are_right_with_less_memory_than_that_of_a_token() -> None:
    uncached = Alone()
    rows = PrefixRows(
        Model(0),
        uncached=uncached,
        vocabulary=uncached.vocabulary,
        budget_bytes=TOKEN_BYTES - 1,
        bytes_per_token=TOKEN_BYTES,
        max_tokens=64,
        max_rows=8,
    )
    assert_right(rows, None, [(1, 2), (3,)])
    assert used(rows, "kv_tokens") == used(rows, "kv_bytes_used") == 0
    assert used(rows, "contexts_without_cache") == 2


def test_every_token_is_computed_once() -> None:
    rows, _ = serve(500)
    prompt = (1, 2, 3, 4, 5)
    assert_right(rows, None, [(*prompt, i) for i in range(SIZE)])
    assert used(rows, "tokens_computed") == 5 + SIZE
    assert_right(rows, None, [(*prompt, i, 6) for i in range(SIZE)])
    assert used(rows, "tokens_computed") == 5 + 2 * SIZE


def test_a_batch_that_exceeds_the_cache_computes_again_only_what_was_evicted() -> None:
    rows, _ = serve(200, max_tokens=400)
    batch: list[Any] = [text(30, i) for i in range(10)]
    for step in range(4):
        before = used(rows, "tokens_computed")
        assert_right(rows, None, batch)
        batch = [(*ids, 1) for ids in batch]
        # 300 tokens in 200 slots, and the last token of each sequence.
        assert step == 0 or used(rows, "tokens_computed") - before <= 110 + 10 * step + 30


def test_contexts_are_evicted_in_the_order_of_their_last_use() -> None:
    rows, _ = serve(6)
    for ids in ((1, 2), (2, 3), (3, 4), (1, 2), (5, 6)):
        assert_right(rows, None, [ids])
    for ids, count in (((1, 2), 1), ((3, 4), 1), ((2, 3), 2)):
        before = used(rows, "tokens_computed")
        assert_right(rows, None, [ids])  # the last token of a cached context, or all tokens
        assert used(rows, "tokens_computed") == before + count


def test_contexts_that_grow_by_several_tokens_are_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, _ = serve(5000)
    contexts = packed([(*text(4000, 0), i) for i in range(4)])
    rows.rows(None, contexts)
    longer = [TokenSequence.of(text(5, i), context) for i, context in enumerate(contexts)]
    wanted = [expected(None, context.token_ids) for context in longer]
    read: list[int] = []
    ids_from = TokenSequence.ids_from

    def counted(sequence: TokenSequence, start: int) -> tuple[int, ...]:
        read.append(len(sequence) - start)
        return ids_from(sequence, start)

    monkeypatch.setattr(TokenSequence, "ids_from", counted)
    assert list(rows.next_pass(None, longer)) == [0, 1, 2, 3]
    torch.testing.assert_close(rows.rows(None, longer), torch.stack(wanted), rtol=0, atol=0)
    assert sum(read) < 500


def test_adapters_share_nothing() -> None:
    rows, _ = serve(500)
    for adapter in ("", "red", "scarlet"):
        assert_right(rows, adapter, [(1, 2, 3), (1, 2)])
    assert used(rows, "kv_tokens") == 9


def test_what_was_computed_with_an_adapter_is_dropped_with_it() -> None:
    rows, _ = serve(20)
    for _ in range(4):
        rows.pin("red", TokenSequence.of((1, 2, 3, 4, 5, 6)))
        assert_right(rows, "red", [(1, 2, 3, 0), (2, 3)])
        assert_right(rows, None, [(1, 2)])
        rows.drop("red")
        assert used(rows, "kv_tokens") == 2
    rows.drop("blue")
    assert_right(rows, None, [(i % SIZE,) * 6 for i in range(9)])


def test_a_context_longer_than_a_pass_is_computed_in_pieces() -> None:
    rows, model = serve(500, max_tokens=10)
    assert_right(rows, None, [tuple(i % SIZE for i in range(95)), (1, 2)])
    assert model.largest[0] == 10


@pytest.mark.parametrize(
    ("limits", "passes"),
    [
        ({"max_tokens": 9}, 2),
        ({"max_tokens": 10}, 1),
        ({"max_rows": 2}, 2),
        ({"max_rows": 3}, 1),
    ],
)
def test_contexts_share_a_pass_up_to_its_limits(limits: dict[str, int], passes: int) -> None:
    rows, model = serve(500, **limits)
    assert_right(rows, None, [text(3, 0), text(3, 1), text(4, 2)])
    assert model.passes == passes


def test_what_raises_leaves_computed_tokens_only() -> None:
    rows, model = serve(500)
    assert_right(rows, None, [(1, 2, 3)])
    model.fail = True
    with pytest.raises(RuntimeError, match="no memory"):
        rows.rows(None, packed([(1, 2, 3, 4, 5), (2,)]))
    assert used(rows, "kv_tokens") == 3
    model.fail = False
    assert_right(rows, None, [(1, 2, 3, 4, 5), (2,), (1, 2)])


def test_a_kept_prefix_outlives_others_and_must_fit() -> None:
    rows, _ = serve(20)
    pinned = (6, 5, 4, 3, 2, 1)
    rows.pin(None, TokenSequence.of(pinned))
    for i in range(SIZE):
        assert_right(rows, None, [(i,) * 12])
    before = used(rows, "tokens_computed")
    assert_right(rows, None, [(*pinned, 0)])
    assert used(rows, "tokens_computed") == before + 1
    with pytest.raises(EvaluationError, match="does not fit into the 20 tokens"):
        rows.pin(None, TokenSequence.of((1,) * 19))
    rows.clear()
    assert used(rows, "kv_tokens") == 0


# -- what goes into one pass ----------------------------------------------------------

Sequences = list[tuple[int, ...]]


def passes_by_choice(rows: PrefixRows, model: Model, sequences: Sequences) -> list[int]:
    """Answer sequences, a choice of `next_pass` at a time; the passes that each took."""
    passes, left = [], list(sequences)
    while left:
        indices = rows.next_pass(None, packed(left))
        assert indices[0] == 0
        assert sorted(set(indices)) == list(indices)
        passes.append(passes_at_once(rows, model, [left[place] for place in indices]))
        left = [ids for place, ids in enumerate(left) if place not in indices]
    return passes


def passes_at_once(rows: PrefixRows, model: Model, sequences: Sequences) -> int:
    before = model.passes
    assert_right(rows, None, sequences)
    return model.passes - before


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(SIZE), k=length))


def extended(prompts: Sequences, count: int, length: int) -> Sequences:
    """As many contexts as told, of these prompts in turn."""
    return [(*prompts[i % len(prompts)], *text(length, 1000 + i)) for i in range(count)]


PROMPTS = [text(30, i) for i in range(8)]
POPULATIONS: dict[str, tuple[list[Sequences], list[list[int]]]] = {
    # Steps; of each the choices, as how many passes of 64 tokens each took.
    "long contexts": ([[text(25, i) for i in range(20)]], [[1] * 10]),
    "a new prompt for all": ([extended([text(40, 0)], 4, 5)], [[1]]),
    "two new prompts in turn": ([extended([text(20, 0), text(20, 1)], 6, 3)], [[1]]),
    "decoding": ([PROMPTS, extended(PROMPTS, 8, 1)], [[1] * 4, [1]]),
    "more rows than a pass has": ([[(a, b) for a in range(3) for b in range(7)]], [[1] * 3]),
    "a prompt longer than a pass": ([extended([text(150, 0)], 4, 3)], [[3, 1]]),
}


@pytest.mark.parametrize("name", POPULATIONS)
def test_a_choice_is_one_pass_and_there_are_no_more_passes_than_at_once(name: str) -> None:
    steps, passes = POPULATIONS[name]
    by_choice, at_once = serve(2000), serve(2000)
    for step, indices in zip(steps, passes, strict=True):
        assert passes_by_choice(*by_choice, step) == indices
        assert passes_at_once(*at_once, step) == sum(indices)
    figures = by_choice[0].statistics(), at_once[0].statistics()
    assert figures[0]["tokens_computed"] == figures[1]["tokens_computed"]


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_of_a_growing_population_takes_two_passes(seed: int) -> None:
    program = random.Random(seed)
    rows, model = serve(3000)
    population: Sequences = [text(n, n) for n in (3, 40, 11, 40)]
    for _ in range(40):
        population = [
            (*program.choice(population)[:45], *text(program.choice([1, 1, 12]), i + 5 * seed))
            for i in range(12)
        ]
        assert set(passes_by_choice(rows, model, list(dict.fromkeys(population)))) == {1}


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    rows, _ = serve(500)
    waiting = [text(n, n) for n in (40, 30, 10, 25, 3)]
    assert list(rows.next_pass(None, packed(waiting))) == [0, 2, 4]
    assert list(rows.next_pass(None, packed(waiting[1:]))) == [
        0,
        1,
        2,
    ]  # the third shares a token
    assert list(rows.next_pass(None, packed([text(100, 0), *waiting]))) == [0]
    rows.rows(None, packed([waiting[1]]))
    assert list(rows.next_pass(None, packed(waiting))) == [0, 1, 2, 4]


def test_only_so_many_are_passed_over() -> None:
    rows, _ = serve(500)
    waiting = [text(60, i) for i in range(257)]
    assert list(rows.next_pass(None, packed([*waiting, (1,)]))) == [0, 257]
    assert list(rows.next_pass(None, packed([*waiting, text(60, 257), (1,)]))) == [0]


def test_a_choice_leaves_the_tree_as_it_is() -> None:
    rows, _ = serve(50)
    assert_right(rows, None, [text(45, 0)])
    before = rows.statistics()
    rows.next_pass(None, packed([text(40, i) for i in range(5)]))
    assert rows.statistics() == before
    assert_right(rows, None, [text(45, 0)])
    assert used(rows, "tokens_computed") == 46
