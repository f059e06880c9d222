"""`Automaton` against enumerations of all texts and all sequences of tokens."""

from __future__ import annotations

import gc
import itertools
import pickle
import re
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from constrained_model import END, SPECIAL, TEXT_IDS, TOKENS, SmallEngine, text_of, unpacked
from constrained_model import writings as all_writings
from hypothesis import given, settings
from hypothesis import strategies as st

import genlm
from genlm.constraints import Automaton, byte_automata
from genlm.constraints.byte_automata import utf8_table
from genlm.constraints.text_tokens import text_tokens
from genlm.core.vocab.per_vocabulary import MAX_VALUES

PATTERNS = [
    "a|ab",
    "é?a{1,2}b?",
    "(é|b)*",
    "a*?b",
    "[^a]{0,2}",
    "",
    r"[\]^a]\^?$",
    "(ab|é)+a?",
    r"\w\w?",
    r"(?x) a[b\#] é? # ^ (verbose)",
]
ALPHABET = ["a", "b", "é"]
WORDS = ["".join(each) for n in range(4) for each in itertools.product(ALPHABET, repeat=n)]


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_has_the_texts_that_it_matches_as_a_whole(pattern):
    language = Automaton.regex(pattern)
    for word in WORDS:
        assert (word.encode() in language) == bool(re.fullmatch(pattern, word)), word


def test_a_table_that_does_not_fit_into_memory_is_refused(llm, monkeypatch):
    monkeypatch.setattr("genlm.constraints.token_table.free_memory_bytes", lambda: 7)
    with pytest.raises(MemoryError, match="2 states and 11 tokens needs"):
        Automaton.regex("a").start(llm, 1)


def test_the_successors_follow_the_texts_that_can_be_completed():
    language = Automaton.regex("a[bé]{1,2}|b")
    texts = {word.encode() for word in WORDS if re.fullmatch("a[bé]{1,2}|b", word)}
    beginnings = {text[:length] for text in texts for length in range(len(text) + 1)}
    for length in range(6):
        for text in map(bytes, itertools.product("abé".encode(), repeat=length)):
            state = 0
            for byte in text:
                state = language.successors[state, byte] if state >= 0 else state
            assert (state >= 0) == (text in beginnings)
            assert (state >= 0 and bool(language.accepting[state])) == (text in texts)
    with pytest.raises(ValueError, match="read-only"):
        language.successors[0, 0] = 0


@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise(PATTERNS)])
def test_languages_are_combined(first, second):
    one, other = Automaton.regex(first), Automaton.regex(second)
    both, either, neither, only = one & other, one | other, ~(one | other), one & ~other
    for word in WORDS:
        in_one, in_other = re.fullmatch(first, word), re.fullmatch(second, word)
        text = word.encode()
        assert (text in both) == bool(in_one and in_other)
        assert (text in either) == bool(in_one or in_other)
        assert (text in neither) == (not in_one and not in_other)
        assert (text in only) == bool(in_one and not in_other)


@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.pairwise([pattern for pattern in PATTERNS if "$" not in pattern][:-1])],
)
def test_languages_are_concatenated_and_repeated(first, second):
    one, other = Automaton.regex(first), Automaton.regex(second)
    both, several, pairs = one + other, one.repeat(), (one | other).repeat(2, 2)
    some, most = other.repeat(1), (one + other).repeat(most=2)
    for word in WORDS:
        text = word.encode()
        for language, pattern in (
            (both, f"(?:{first})(?:{second})"),
            (several, f"(?:{first})*"),
            (pairs, f"(?:{first}|{second}){{2}}"),
            (some, f"(?:{second})+"),
            (most, f"(?:(?:{first})(?:{second})){{0,2}}"),
        ):
            assert (text in language) == bool(re.fullmatch(pattern, word)), (word, pattern)


def test_repetitions_are_checked(monkeypatch):
    letter = Automaton.choice(["ab", "b"])
    with pytest.raises(ValueError, match=r"most=1.* must be 2 or more"):
        letter.repeat(2, 1)
    with pytest.raises(ValueError, match=r"least=-1"):
        letter.repeat(-1)
    with pytest.raises(TypeError, match="unsupported operand"):
        letter + "b"
    with pytest.raises(ValueError, match="the automaton has more than 100,000 states"):
        letter.repeat(10**6, 10**6)
    monkeypatch.setattr("genlm.constraints.automaton.MAX_STATES", 200)
    with pytest.raises(ValueError, match="the automaton has more than 200 states"):
        Automaton.regex("[ab]*a") + Automaton.regex("[ab]").repeat(9, 9)


BOUNDS = bytes.fromhex("00417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")
"""First and last bytes of the ranges that UTF-8 distinguishes."""


def test_the_automaton_of_utf8_agrees_with_pythons_decoder():
    language = Automaton(*utf8_table())
    for length in range(4):
        for text in map(bytes, itertools.product(BOUNDS, repeat=length)):
            assert (text in language) == is_utf8(text)
    for first, text in itertools.product(
        b"\xf0\xf1\xf3\xf4", map(bytes, itertools.product(BOUNDS, repeat=2))
    ):
        data = bytes([first]) + text + b"\x80"
        assert (data in language) == is_utf8(data)


@given(st.binary(max_size=6) | st.text(max_size=3).map(str.encode))
def test_complements_are_of_valid_utf8(text):
    assert (text in ~Automaton.regex("a")) == (is_utf8(text) and text != b"a")
    assert (text in Automaton(*utf8_table())) == is_utf8(text)


@settings(max_examples=60)
@given(st.integers(1, 6), st.data())
def test_tables_are_reduced_without_a_change_of_the_language(states, data):
    """Against a run of the table as it was given, over all texts of three letters."""
    row = st.lists(st.integers(-1, states - 1), min_size=3, max_size=3)
    rows = data.draw(st.lists(row, min_size=states, max_size=states))
    accepting = data.draw(st.lists(st.booleans(), min_size=states, max_size=states))
    table = np.full((states, 256), -1)
    table[:, list(b"abc")] = rows
    language = Automaton(table, accepting)
    numbers = set()
    for length in range(6):
        for word in itertools.product(range(3), repeat=length):
            state = 0
            for letter in word:
                state = rows[state][letter] if state >= 0 else -1
            expected = state >= 0 and accepting[state]
            assert (bytes(b"abc"[letter] for letter in word) in language) == expected
            numbers |= {state} if expected else set()
    assert len(language._table.accepting) <= max(1, states)


def number_of_languages(table: np.ndarray, accepting: np.ndarray) -> int:
    """Count the distinct languages, except the empty one, of the states that can be reached."""
    rows = np.vstack([table[:, list(b"ab")], [[-1, -1]]])  # state -1 is the last one
    texts = [word for length in range(8) for word in itertools.product((0, 1), repeat=length)]
    reachable, flags = [0], np.append(accepting, [False])
    for state in reachable:
        reachable += [after for after in {*rows[state].tolist()} if after not in reachable]
    languages = set()
    for state in reachable:
        accepted = []
        for word in texts:
            after = state
            for letter in word:
                after = rows[after, letter]
            accepted.append(bool(flags[after]))
        languages.add(tuple(accepted))
    return max(1, len(languages - {(False,) * len(texts)}))


@pytest.mark.parametrize(
    "change", [{}, {"_MAX_ROUNDS": 0}, {"_FACTORS": np.zeros(257, np.int64)}]
)
def test_automata_are_minimal(monkeypatch, change):
    """By Moore's algorithm, by Hopcroft's, and where all hashes are equal."""
    for name, value in change.items():
        monkeypatch.setattr(byte_automata, name, value)
    rng, sizes = np.random.default_rng(0), set()
    for _ in range(60):
        states = int(rng.integers(1, 9))
        table, accepting = np.full((states, 256), -1), rng.random(states) < 0.4
        table[:, list(b"ab")] = rng.integers(-1, states, (states, 2))
        size = len(Automaton(table, accepting)._table.accepting)
        assert size == number_of_languages(table, accepting)
        sizes.add(size)
    assert len(sizes) > 4


def test_a_long_text_may_distinguish_two_states():
    """The chains "a" * 100 and "b" + "a" * 99 + "c" differ in their last letters only."""
    table = np.full((202, 256), -1)
    chain = np.arange(200)
    table[chain, ord("a")] = chain + 2
    table[0, [ord("a"), ord("b")]] = 2, 3
    table[[200, 201], [ord("a"), ord("c")]] = [200, 201]
    accepting = np.arange(202) == 200
    language = Automaton(table, accepting)
    assert b"a" * 100 in language
    assert b"b" + b"a" * 99 not in language
    accepting[201] = True
    language = Automaton(table, accepting)
    assert len(language._table.accepting) == 201
    assert b"b" + b"a" * 98 not in language
    assert b"b" + b"a" * 99 + b"c" in language
    assert b"b" + b"a" * 99 + b"a" not in language


def test_equal_languages_have_automata_of_equal_size():
    sizes = {
        len(Automaton.regex(pattern)._table.accepting) for pattern in ("(a|b)*", "(a*b*)*")
    }
    assert sizes == {1}
    assert len((Automaton.regex("a+") & Automaton.regex("b+"))._table.accepting) == 1


@given(st.lists(st.sampled_from(WORDS), min_size=1))
def test_a_choice_has_its_texts_and_the_smallest_automaton(texts):
    language = Automaton.choice(iter(texts))
    for word in WORDS:
        assert (word.encode() in language) == (word in texts)
    for same in (
        Automaton(language.successors, language.accepting),
        Automaton.choice([text.encode() for text in texts]),
        pickle.loads(pickle.dumps(language)),
    ):
        assert len(same.accepting) == len(language.accepting)
        assert all((word.encode() in same) == (word in texts) for word in WORDS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_the_tokens_after_which_a_text_can_be_completed(llm, pattern):
    """Against all sequences of up to five tokens, for every history of up to two."""
    accepted = set(
        all_writings(
            lambda text: is_utf8(text) and bool(re.fullmatch(pattern, text.decode())), 5
        )
    )
    beginnings = {ids[:length] for ids in accepted for length in range(len(ids) + 1)}
    histories = [ids for ids in beginnings if len(ids) <= 2]
    language, checked = Automaton.regex(pattern), 0
    for ids in histories:
        constraint = language.start(llm, 1)
        for token in ids:
            constraint = constraint.advance([token])
        assert not constraint.finished.any()
        assert constraint.log_potential.tolist() == [0]
        expected = {token for token in TEXT_IDS if (*ids, token) in beginnings}
        expected |= {END} if ids in accepted else set()
        assert unpacked(constraint) == expected, text_of(ids)
        checked += len(expected)
    assert checked >= 1


def test_members_follow_their_own_tokens_and_are_resampled(llm):
    constraint = Automaton.regex("a+b").start(llm, 4)
    a, b, ab = TOKENS.index(b"a"), TOKENS.index(b"b"), TOKENS.index(b"ab")
    after = constraint.advance(torch.tensor([a, ab, b, -1]))
    assert after.log_potential.tolist() == [0, 0, -np.inf, 0]
    assert [unpacked(after, member) for member in range(4)] == [
        {a, b, ab},
        {END},
        set(),
        {a, ab},
    ]
    assert unpacked(constraint, 2) == {a, ab}, "a constraint does not change"
    resampled = after[np.array([1, 1, 0])]
    assert len(resampled) == 3
    ended = resampled.advance([END, -1, a]).advance([a, END, END])
    assert ended.finished.tolist() == [True, True, False]
    assert ended.log_potential.tolist() == [0, 0, -np.inf]
    assert "3 members, 2 finished, 1 dead" in repr(ended)
    assert len(after[torch.tensor([True, False, True, False])]) == 2
    assert len(after[1:]) == 3


def test_special_tokens_and_tokens_without_bytes_are_never_allowed(llm):
    allowed = unpacked(Automaton.regex("(?s:.)*").start(llm, 1))
    assert SPECIAL not in allowed
    assert TOKENS.index(b"") not in allowed
    assert allowed == {END, *TEXT_IDS} - {TOKENS.index(b"\xa9"), TOKENS.index(b"\xa9a")}


def test_a_text_may_have_begun(llm):
    language = Automaton.regex("abé")
    assert unpacked(language.start(llm, 1, text=b"ab")) == {
        TOKENS.index(b"\xc3"),
        TOKENS.index("é".encode()),
    }
    with pytest.raises(ValueError, match=r"begins with b'x'"):
        language.start(llm, 1, text=b"x")
    with pytest.raises(ValueError, match="can be written with the tokens"):
        Automaton.regex("x").start(llm, 1)


def test_tokens_that_no_token_of_the_vocabulary_can_complete_are_not_allowed(llm):
    constraint = Automaton.regex("ax|abz|b").start(llm, 1)
    assert unpacked(constraint) == {TOKENS.index(b"b")}


def test_texts_end_with_the_given_tokens(llm):
    b = TOKENS.index(b"b")
    constraint = Automaton.regex("aa?").start(llm, 1, stop=[b])
    constraint = constraint.advance([TOKENS.index(b"a")])
    assert unpacked(constraint) == {TOKENS.index(b"a"), b}
    assert constraint.advance([b]).finished.all()
    with pytest.raises(ValueError, match="valid ids are 0 to 10"):
        Automaton.regex("a").start(llm, 1, stop=[99])


def test_without_an_end_of_text_a_text_is_over_where_nothing_can_follow():
    with genlm.AsyncLM(lambda: SmallEngine(tokenizer=None)) as llm:
        a = TOKENS.index(b"a")
        constraint = Automaton.regex("aa?").start(llm, 1).advance([a])
        assert not constraint.finished.any()
        assert unpacked(constraint) == {a}
        assert constraint.advance([a]).finished.all()
        assert Automaton.regex("aa?").start(llm, 2, text=b"aa").finished.all()


def test_a_table_is_computed_once_for_a_vocabulary(llm):
    language = Automaton.regex("a+b")
    first, second = language.start(llm, 2), language.start(llm, 3)
    assert first.table is second.table
    assert first.table is not language.start(llm, 2, stop=[2]).table


def test_the_tables_of_the_most_recently_used_stop_tokens_are_stored(llm):
    language = Automaton.regex("[ab]*")
    tables = [weakref.ref(language.start(llm, 1).table)]
    for stop in itertools.combinations(range(len(TOKENS)), 2):
        tables.append(weakref.ref(language.start(llm, 1, stop=stop).table))
        assert language.start(llm, 1).table is tables[0]()
    gc.collect()
    assert sum(table() is not None for table in tables) == MAX_VALUES
    assert len(text_tokens._values[llm.vocabulary]) == MAX_VALUES


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Automaton([[0]], [True]), r"\(1, 1\)"),
        (lambda: Automaton(np.full((1, 256), 1), [True]), "out of range"),
        (lambda: Automaton.choice([]), "found an empty list of texts"),
    ],
)
def test_what_is_no_automaton_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("texts", "message"),
    [("yes", r"texts='yes' is one text; pass a list"), (["yes", 3], "found 3 among texts")],
)
def test_what_is_no_choice_of_texts_is_refused(texts, message):
    with pytest.raises(TypeError, match=message):
        Automaton.choice(texts)


def test_a_choice_of_too_many_states_is_refused(monkeypatch):
    monkeypatch.setattr(byte_automata, "MAX_STATES", 5)
    assert b"abcd" in Automaton.choice(["abcd", "bbcd"])  # 5 states
    with pytest.raises(ValueError, match="of 2 texts has more than 5 states"):
        Automaton.choice(["abcde", "bbcde"])  # 6 states


def test_tokens_of_another_shape_are_refused(llm):
    with pytest.raises(ValueError, match=r"shape \(2,\) for 3 members"):
        Automaton.regex("a").start(llm, 3).advance([2, 2])
    with pytest.raises(ValueError, match="from 2 to 11; expected 0 to 10"):
        Automaton.regex("a").start(llm, 2).advance([2, len(TOKENS)])


def test_draws_follow_the_masks_and_skip_the_finished(llm):
    constraint: Any = Automaton.regex("a|é").start(llm, 60)
    population = llm.population([2], 60)
    for _ in range(4):
        drawn = llm_draw(constraint, population)
        population = population.extend(drawn.token_ids)
        constraint = constraint.advance(drawn.token_ids)
    assert constraint.finished.all()
    assert drawn.token_ids.tolist() == [-1] * 60
    assert drawn.log_mass.tolist() == [0] * 60
    texts = {
        text_of([token_id for token_id in row if token_id >= 0][1:])
        for row in population.tokens.tolist()
    }
    assert texts == {b"a", "é".encode()}


def llm_draw(constraint: Any, population: Any) -> Any:
    from genlm.core.base.blocking import run_blocking

    return run_blocking(constraint.draw(population, seed=1))


def test_a_missing_library_of_expressions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    message = r"Automaton\.regex needs outlines_core.*pip install 'genlm-core\[constraints\]'"
    with pytest.raises(genlm.MissingRequirementError, match=message):
        Automaton.regex("[x-z]{3}never compiled before")
