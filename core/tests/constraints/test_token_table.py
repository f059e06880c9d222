"""`TokenTable` against the definition: bytes one after the other, states by enumeration."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from constrained_model import TOKENS, SmallEngine
from hypothesis import given
from hypothesis import strategies as st

import genlm
from genlm.constraints import Automaton, byte_automata
from genlm.constraints import token_table as token_table_module
from genlm.constraints.byte_automata import NO_STATE, ByteTable, minimise
from genlm.constraints.states import DEAD, FINISHED, LIVE
from genlm.constraints.text_tokens import TextTokens
from genlm.constraints.token_table import TokenTable, TokenTrie

CPU = torch.device("cpu")
LETTERS = b"abc"
TOKEN_A = TOKENS.index(b"a")


def random_table(seed: int, count: int) -> ByteTable:
    random = np.random.default_rng(seed)
    successors = np.full((count, 256), NO_STATE)
    successors[:, list(LETTERS)] = random.integers(-1, count, (count, len(LETTERS)))
    return minimise(ByteTable(successors, random.random(count) < 0.4))


def tokens_of(texts: list[bytes], stop: list[int]) -> TextTokens:
    is_stop = np.zeros(len(texts) + 1, np.bool_)
    is_stop[stop] = True
    return TextTokens(texts, np.array(stop, np.int64), is_stop)


def expected_rows(table: ByteTable, tokens: TextTokens) -> list[list[int]]:
    """The successors of each state over bytes, as states of the token table."""

    def after(state: int, text: bytes) -> int:
        for byte in text:
            state = NO_STATE if state == NO_STATE else int(table.successors[state, byte])
        return state if text else NO_STATE

    states = range(len(table.accepting))
    rows = [[after(state, text) for text in tokens.texts] for state in states]
    live = {state for state in states if table.accepting[state]}
    while more := {s for s in states if s not in live and live.intersection(rows[s])}:
        live |= more
    rows = [[s if s in live else NO_STATE for s in row] for row in rows]
    over = {s for s in live if table.accepting[s] and set(rows[s]) <= {NO_STATE}}
    over = set() if tokens.stop.size else over
    numbers = {NO_STATE: DEAD, **{s: FINISHED if s in over else LIVE + s for s in states}}
    expected = [[numbers[s] for s in row] for row in rows]
    for state, row in zip(states, expected, strict=True):
        for token_id in tokens.stop.tolist():
            row[token_id] = FINISHED if table.accepting[state] else DEAD
    return expected


@given(
    st.integers(0, 2**32),
    st.integers(1, 8),
    st.lists(st.binary(min_size=0, max_size=3).map(lambda b: bytes(LETTERS[i % 3] for i in b))),
    st.booleans(),
    st.booleans(),
)
def test_rows_in_any_order_are_those_of_the_definition(
    seed: int, count: int, texts: list[bytes], has_all_bytes: bool, has_stop: bool
) -> None:
    table = random_table(seed, count)
    if has_all_bytes:  # otherwise, tokens may be unable to complete what bytes can
        texts = [*texts, b"a", b"b", b"c"]
    texts = [b"", *texts]  # a special token
    tokens = tokens_of(texts, [0] if has_stop else [])
    token_table = TokenTable(table, tokens, TokenTrie(tokens))
    expected = expected_rows(table, tokens)
    states = LIVE + np.random.default_rng(seed).permutation(len(expected))
    for state in states[: 1 + len(states) // 2].tolist():
        members = np.array([state, DEAD, FINISHED, state])
        for token_id in range(-1, len(texts)):
            after = token_table.after(members, np.full(4, token_id)).tolist()
            row = expected[state - LIVE]
            goal = token_table.starts[state - LIVE] if token_id < 0 else row[token_id]
            assert after == [goal, DEAD, FINISHED, goal]
        masks = token_table.row_masks(members)
        bits = np.unpackbits(masks.bits(CPU)[0].numpy(), axis=1, bitorder="little")
        assert not bits[:, len(texts) :].any()
        allowed = masks.factors(0, 4, CPU).numpy().astype(bool)
        assert allowed[0].tolist() == [s != DEAD for s in expected[state - LIVE]]
        assert not allowed[1:3].any()


def test_rows_are_computed_for_the_states_that_members_have() -> None:
    language = Automaton.regex(r"a[ab]{40}")
    with genlm.AsyncLM(SmallEngine) as llm:
        constraint = language.start(llm, 3)
        assert len(constraint.masks()[0]) == 3  # with those of dead and finished
        after = constraint.advance([TOKEN_A, TOKEN_A, -1])
        assert len(after.masks()[0]) == 4
        assert language.start(llm, 1).table is constraint.table


def chain_table(count: int) -> tuple[ByteTable, TextTokens]:
    """An automaton whose states form a chain and have different masks, and its tokens."""
    letters = b"abcdef"
    successors = np.full((count, 256), NO_STATE)
    for state in range(count - 1):
        for bit, letter in enumerate(letters):
            if (state + 1) >> bit & 1:
                successors[state, letter] = state + 1
    table = ByteTable(successors, np.arange(count) == count - 1)
    return table, tokens_of([*(bytes([letter]) for letter in letters), b"ab"], [])


def repetition_table() -> tuple[ByteTable, TextTokens]:
    """An automaton of texts of 60 letters, and tokens of up to three letters."""
    successors = np.full((61, 256), NO_STATE)
    successors[:-1, [ord("a"), ord("b")]] = np.arange(1, 61)[:, None]
    tokens = tokens_of([b"a", b"b", b"aa", b"bab", b""], [4])
    return ByteTable(successors, np.arange(61) >= 59), tokens


@pytest.mark.parametrize("have_equal_hashes", [False, True])
def test_states_with_equal_masks_share_one(
    monkeypatch: pytest.MonkeyPatch, have_equal_hashes: bool
) -> None:
    if have_equal_hashes:  # the classes are then not exact, and no masks are shared
        monkeypatch.setattr(byte_automata, "_FACTORS", np.zeros(257, np.int64))
    table, tokens = repetition_table()
    token_table = TokenTable(table, tokens, TokenTrie(tokens))
    masks = token_table.row_masks(LIVE + np.arange(61))
    allowed = masks.factors(0, 61, CPU).numpy().astype(bool)
    for row, expected in zip(allowed, expected_rows(table, tokens), strict=True):
        assert row.tolist() == [state != DEAD for state in expected]
    # Those of the dead and the finished state; more than 2 letters remain; 2, 1, 0 letters.
    assert len(masks.bits(CPU)[0]) == (63 if have_equal_hashes else 6)


def test_a_state_that_allows_every_token_differs_from_the_finished_state() -> None:
    tokens = tokens_of([b"a", b"bc", b""], [2])
    table = ByteTable(np.repeat([[1], [0]], 256, axis=1), np.array([False, True]))
    masks = TokenTable(table, tokens, TokenTrie(tokens)).row_masks(np.array([2, 3, FINISHED]))
    assert masks.factors(0, 3, CPU).tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]


def test_tokens_are_followed_only_where_bytes_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[int] = []
    token_edges = TokenTable._token_edges

    def record(self: TokenTable, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        followed.extend(states.tolist())
        return token_edges(self, states)

    monkeypatch.setattr(TokenTable, "_token_edges", record)
    # The vocabulary has no token for the byte d, but the first letters can be a or b.
    table = minimise(Automaton.regex(r"[abd]{3}(c|da){2}")._table)
    tokens = tokens_of([b"a", b"b", b"c", b"da"], [])
    TokenTable(table, tokens, TokenTrie(tokens))
    assert followed == []
    table = minimise(Automaton.regex(r"[abd]{3}(da){2}")._table)
    token_table = TokenTable(table, tokens, TokenTrie(tokens))
    # All except those after a d and before the last a, and after it.
    assert len(followed) == len(table.accepting) - 2
    assert token_table.starts.tolist() == [
        LIVE + state if table.successors[state].max() >= 0 else FINISHED
        for state in range(len(table.accepting))
    ]


def test_threads_may_need_states_at_the_same_time() -> None:
    table, tokens = chain_table(60)
    expected = expected_rows(table, tokens)
    token_table = TokenTable(table, tokens, TokenTrie(tokens))
    barrier = threading.Barrier(8)

    def walk(seed: int) -> None:
        barrier.wait()
        for state in (LIVE + np.random.default_rng(seed).permutation(60)).tolist():
            states = np.array([state, state])
            assert token_table.after(states, np.array([0, 2])).tolist() == [
                expected[state - LIVE][0],
                expected[state - LIVE][2],
            ]
            masks = token_table.row_masks(states)
            assert bool(masks.is_empty[0]) == (set(expected[state - LIVE]) == {DEAD})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(walk, range(8)))
    assert len(token_table.row_masks(np.array([DEAD])).bits(CPU)[0]) == 2 + 60


def test_the_memory_of_rows_is_bounded_and_dropped_rows_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, tokens = chain_table(60)
    expected = expected_rows(table, tokens)
    token_table = TokenTable(table, tokens, TokenTrie(tokens))
    monkeypatch.setattr(token_table_module, "MAX_ROW_BYTES", 10 * 4)
    states, sizes = LIVE + np.arange(60), []
    for part in [*states[:, None], states[:20], states[5:8], states[30:33]]:
        after = token_table.after(part, np.full(len(part), 2))
        assert after.tolist() == [expected[state - LIVE][2] for state in part]
        masks = token_table.row_masks(part)
        sizes.append(len(masks.bits(CPU)[0]))
        assert masks.is_empty.tolist() == [
            set(expected[state - LIVE]) == {DEAD} for state in part
        ]
    assert max(sizes[:60]) == 10
    assert sizes[60:] == [22, 22, 5]
