"""Arguments that all languages and constraints check, and copies of languages."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from constrained_model import SmallEngine

import genlm
from genlm.constraints import Automaton, Grammar, Python

PROMPT = (2,)
A = 2


def few_a(text: bytes) -> bool:
    return text.count(b"a") <= 2


LANGUAGES = {
    "automaton": Automaton.regex("a+é?"),
    "xgrammar": Grammar.ebnf('root ::= "a" "a"* "é"?'),
    "llguidance": Grammar.lark("start: /a+é?/"),
    "python": Python(few_a, within=Automaton.regex("a+é?"), extra_draws=3),
}


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


@pytest.fixture(params=LANGUAGES)
def language(request) -> Any:
    return LANGUAGES[request.param]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": -1}, ValueError, "size=-1; it must be 0 or more"),
        ({"size": 2.0}, TypeError, "size=2.0; expected an integer"),
        ({"text": "a"}, TypeError, "text='a'; texts of languages are bytes"),
        ({"text": None}, TypeError, "text=None; texts of languages are bytes"),
        ({"text": b"b"}, ValueError, "begins with b'b'"),
        ({"stop": "x"}, TypeError, "stop='x'; expected token ids"),
        ({"stop": 1.5}, TypeError, "stop=1.5; expected"),
        ({"stop": [True]}, TypeError, "stop has True"),
        ({"stop": [99]}, genlm.TokenIdError, "token id 99 at position 0 of stop"),
    ],
)
def test_a_wrong_argument_of_start_is_named(llm, language, arguments, error, message):
    with pytest.raises(error, match=message):
        language.start(llm, **{"size": 1, **arguments})


def test_stop_tokens_may_be_a_set_or_one_id(llm, language):
    masks = [language.start(llm, 1, text=b"a", stop=stop).masks()[0] for stop in (3, {3}, [3])]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        ([A], ValueError, r"shape \(1,\) for 2 members"),
        ([2.0, 2.0], TypeError, "must be integers; found an array of float64"),
        ([True, True], TypeError, "must be integers; found an array of bool"),
        ([A, 99], ValueError, "from 2 to 99; expected 0 to"),
    ],
)
def test_tokens_that_are_no_ids_are_refused(llm, language, token_ids, error, message):
    with pytest.raises(error, match=message):
        language.start(llm, 2).advance(token_ids)


@pytest.mark.parametrize("index", [0, np.int64(1), 1.0, "a", [[0]]])
def test_a_constraint_is_indexed_by_arrays(llm, language, index):
    constraint = language.start(llm, 2)
    with pytest.raises(IndexError, match="a constraint is indexed by a slice, or an array"):
        constraint[index]
    assert len(constraint[[]]) == 0


def test_a_population_of_another_size_is_refused(llm, language):
    constraint = language.start(llm, 2)
    with pytest.raises(TypeError, match=r"population=\[1, 2\]; expected a Population"):
        constraint.draw_sync([1, 2])
    with pytest.raises(ValueError, match="a constraint of 2 members for a population of 3"):
        constraint.draw_sync(llm.population(PROMPT, 3))


def test_a_population_of_a_model_with_other_tokens_is_refused(llm, language):
    constraint = language.start(llm, 2)
    with (
        genlm.load_model("demo", backend="reference") as other,
        pytest.raises(ValueError, match="for 11 token ids and a population"),
    ):
        constraint.draw_sync(other.population(PROMPT, 2))


def test_both_forms_of_draw_return_the_same(llm, language):
    population = llm.population(PROMPT, 5)
    blocking = language.start(llm, 5).draw_sync(population, temperature=0.7, seed=3)
    drawn = asyncio.run(language.start(llm, 5).draw(population, temperature=0.7, seed=3))
    assert all(map(torch.equal, blocking, drawn))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_a_language_has_the_same_texts(llm, language, copied):
    population = llm.population(PROMPT, 5)
    expected = language.start(llm, 5).draw_sync(population, seed=3)
    drawn = copied(language).start(llm, 5).draw_sync(population, seed=3)
    assert repr(copied(language)) == repr(language)
    assert all(map(torch.equal, drawn, expected))


def test_a_constraint_is_its_own_copy_and_cannot_be_pickled(llm, language):
    constraint = language.start(llm, 2)
    assert copy.copy(constraint) is copy.deepcopy(constraint) is constraint
    with pytest.raises(TypeError, match="pickle its language"):
        pickle.dumps(constraint)


def test_llguidance_takes_whole_characters_as_the_beginning(llm):
    with pytest.raises(ValueError, match="llguidance takes only whole characters"):
        LANGUAGES["llguidance"].start(llm, 1, text=b"a\xc3")


def test_texts_of_automata_are_bytes():
    with pytest.raises(TypeError, match="texts of languages are bytes"):
        "a" in LANGUAGES["automaton"]  # noqa: B015


def test_the_empty_language_has_no_text(llm):
    empty = Automaton.regex("a") & Automaton.regex("b")
    with pytest.raises(ValueError, match="the language of the automaton is empty"):
        empty.start(llm, 1)


def test_tokens_are_drawn_within_a_language():
    with pytest.raises(TypeError, match="within='a'; expected a Language"):
        Python(few_a, within="a")
