"""Intersections of languages against enumerations of all sequences of tokens."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from constrained_model import END, TOKENS, SmallEngine, probability, text_of, unpacked, writings

import genlm
from genlm.constraints import Automaton, Constraint, Grammar, Language, Python
from genlm.smc import steer_sync

pytest.importorskip("xgrammar")

LONGEST = 4
ANY = Grammar.ebnf('root ::= ("a" | "b" | "é")*')
BALANCED = Grammar.ebnf('root ::= "" | "a" root "b"')
SHORT = Automaton.regex("[ab]{0,4}|é?")


class NoTokenTwice(Constraint):
    """No token twice; masks are booleans, and attributes are tensors."""

    def __init__(self, allowed: torch.Tensor, finished: torch.Tensor) -> None:
        self.allowed = allowed
        self.finished = finished
        self.log_potential = torch.zeros(len(allowed))

    def masks(self) -> tuple[Any, None]:
        return self.allowed, None

    def advance(self, token_ids: Any) -> NoTokenTwice:
        allowed, drawn = self.allowed.clone(), torch.as_tensor(token_ids)
        members = drawn >= 0
        allowed[members, drawn[members]] = False
        return NoTokenTwice(allowed, self.finished | (drawn == END))

    def __getitem__(self, ancestors: Any) -> NoTokenTwice:
        return NoTokenTwice(self.allowed[ancestors], self.finished[ancestors])


class TokensOnce(Language):
    def start(self, llm: Any, size: int, *, text: bytes = b"", stop: Any = None) -> Constraint:
        del text, stop
        return NoTokenTwice(
            torch.ones(size, llm.vocab_size, dtype=torch.bool),
            torch.zeros(size, dtype=torch.bool),
        )


def is_balanced(ids: Sequence[int]) -> bool:
    return bool(re.fullmatch("(a(a(ab)?b)?b)?", text_of(ids).decode(errors="replace")))


def is_short(ids: Sequence[int]) -> bool:
    return bool(re.fullmatch("[ab]{0,4}|é?", text_of(ids).decode(errors="replace")))


def is_once(ids: Sequence[int]) -> bool:
    return len(set(ids)) == len(ids)


CASES = {
    "grammar and automaton": (BALANCED & SHORT, (is_balanced, is_short)),
    "automaton and grammar": (SHORT & ANY, (is_short,)),
    "own and automaton": (TokensOnce() & SHORT, (is_once, is_short)),
    "three": (BALANCED & TokensOnce() & SHORT, (is_balanced, is_once, is_short)),
}


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


def total_mass(constraint: Constraint, ids: tuple[int, ...]) -> float:
    """The probability of all continuations that the masks allow, and that end."""
    mass = 0.0
    for token in unpacked(constraint):
        after, extended = constraint.advance([token]), (*ids, token)
        if after.finished.all():
            mass += probability((3,), extended)
        elif len(extended) <= LONGEST and after.log_potential[0] == 0:
            mass += total_mass(after, extended)
    return mass


@pytest.mark.parametrize("case", CASES)
def test_the_mass_of_an_intersection_is_that_of_its_texts(llm, case):
    language, conditions = CASES[case]
    expected = sum(
        probability((3,), (*ids, END))
        for ids in writings(lambda _: True, LONGEST)
        if all(condition(ids) for condition in conditions)
    )
    assert expected > 0
    assert np.isclose(total_mass(language.start(llm, 1), ()), expected, rtol=1e-9)
    assert np.isclose(
        total_mass(pickle.loads(pickle.dumps(language)).start(llm, 1), ()), expected, rtol=1e-9
    )


def test_members_follow_their_own_tokens_and_are_resampled(llm):
    a, b, ab = TOKENS.index(b"a"), TOKENS.index(b"b"), TOKENS.index(b"ab")
    constraint = (BALANCED & SHORT).start(llm, 4)
    after = constraint.advance([a, ab, b, -1])
    assert after.log_potential.tolist() == [0, 0, -np.inf, 0]
    assert [unpacked(after, member) for member in range(4)] == [
        {a, b, ab},
        {END},
        set(),
        {a, ab, END},
    ]
    resampled = after[np.array([1, 0, 1])].advance([END, b, -1])
    assert resampled.finished.tolist() == [True, False, False]
    assert unpacked(resampled, 1) == {END}
    assert "3 members, 1 finished, 0 dead" in repr(resampled)
    wrong = after[:1].advance([END])  # complete in SHORT only
    assert wrong.log_potential.tolist() == [-np.inf]
    assert not wrong.finished.any()


def test_a_member_whose_text_ends_in_one_language_only_is_dead(llm):
    class OneToken(NoTokenTwice):
        def advance(self, token_ids: Any) -> OneToken:
            return OneToken(self.allowed, self.finished | (torch.as_tensor(token_ids) >= 0))

    class Single(TokensOnce):
        def start(self, llm: Any, size: int, **options: Any) -> Constraint:
            started: Any = super().start(llm, size, **options)
            return OneToken(started.allowed, started.finished)

    a = TOKENS.index(b"a")
    after = (Single() & SHORT).start(llm, 3).advance([a, END, -1])
    assert after.finished.tolist() == [False, True, False]
    assert after.log_potential.tolist() == [-np.inf, 0, 0]


@pytest.mark.parametrize("case", CASES)
def test_a_filter_draws_texts_of_both_languages(llm, case):
    language, conditions = CASES[case]
    *_, particles = steer_sync(
        llm, [3], 40, max_tokens=LONGEST + 1, constraint=language, seed=0
    )
    checked = 0
    for context, weight in zip(particles.population, particles.log_weights, strict=True):
        ids = context.token_ids[1:]
        if ids[-1] == END and weight > -np.inf:
            assert all(condition(ids[:-1]) for condition in conditions)
            checked += 1
    assert checked > 10


def has_b(text: bytes) -> bool:
    return b"b" in text


def is_long(text: bytes) -> bool:
    return len(text) > 1


def anything(text: bytes) -> bool:
    del text
    return True


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (SHORT & Python(anything, has_b), "automaton"),
        (Python(anything, has_b) & SHORT, "automaton"),
        (BALANCED & Python(anything, has_b, within=SHORT), "both"),
        (Python(anything, has_b) & Python(anything, is_long, within=SHORT), "functions"),
        (Python(anything, has_b, within=SHORT) & Python(anything, is_long), "functions"),
    ],
)
def test_functions_test_the_tokens_of_the_other_language(llm, language, expected):
    assert isinstance(language, Python)
    language = pickle.loads(pickle.dumps(language))
    *_, particles = steer_sync(
        llm, [3], 60, max_tokens=LONGEST + 1, constraint=language, seed=0
    )
    texts = {
        text_of(context.token_ids[1:])
        for context, weight in zip(particles.population, particles.log_weights, strict=True)
        if context.token_ids[-1] == END and weight > -np.inf
    }
    conditions = {
        "automaton": has_b,
        "both": lambda text: (
            has_b(text) and is_balanced([TOKENS.index(bytes([x])) for x in text])
        ),
        "functions": lambda text: has_b(text) and is_long(text),
    }
    assert len(texts) > 1
    assert all(text in SHORT and conditions[expected](text) for text in texts)


def test_the_results_of_combined_functions_are_checked(llm):
    language = Python(lambda text: np.zeros(2)) & Python(has_b)
    with pytest.raises(TypeError, match="returned ndarray, which is neither true nor false"):
        steer_sync(llm, [3], 2, max_tokens=1, constraint=language, seed=0).__next__()


def test_what_cannot_be_intersected_is_refused(llm):
    class Own(NoTokenTwice):
        async def draw(self, population: Any, **options: Any) -> Any:
            return await super().draw(population, **options)

    class Owner(TokensOnce):
        def start(self, llm: Any, size: int, **options: Any) -> Constraint:
            started: Any = super().start(llm, size, **options)
            return Own(started.allowed, started.finished)

    with pytest.raises(TypeError, match="Own overrides draw"):
        (BALANCED & Owner()).start(llm, 1)
    for language in (BALANCED, SHORT, Python(has_b)):
        with pytest.raises(TypeError, match="unsupported operand"):
            language & "a"
    with genlm.AsyncLM(lambda: SmallEngine(tokenizer=None)) as without_end:
        with pytest.raises(ValueError, match="needs token ids that end a text"):
            (BALANCED & SHORT).start(without_end, 1)
        assert len((BALANCED & SHORT).start(without_end, 1, stop=[END])) == 1


def test_a_text_may_have_begun(llm):
    constraint = (BALANCED & SHORT).start(llm, 1, text=b"aab")
    assert unpacked(constraint) == {TOKENS.index(b"b")}
    with pytest.raises(ValueError, match=r"begins with b'\\xc3'"):
        (BALANCED & SHORT).start(llm, 1, text=b"\xc3")
