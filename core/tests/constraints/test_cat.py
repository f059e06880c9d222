"""`Constraint.cat`: each member keeps its language, against constraints of one member."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from constrained_model import TOKENS, SmallEngine, unpacked
from hypothesis import given
from hypothesis import strategies as st

import genlm
from genlm.constraints import Automaton, Constraint, Language, Python
from genlm.constraints.joined import JoinedConstraint
from genlm.constraints.protocol import mask_of_each_member

LANGUAGES: list[Language] = [
    Automaton.regex("(ab)*|é"),
    Automaton.choice(["a", "ba", "é"]),
    ~Automaton.regex(".*b.*"),
]


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


def check(constraint: Constraint, members: list[Constraint]) -> None:
    assert len(constraint) == len(members)
    masks = mask_of_each_member(constraint, len(TOKENS))
    allowed = masks.factors(0, len(members), torch.device("cpu")).expand(len(members), -1)
    for member, alone in enumerate(members):
        assert constraint.finished[member] == alone.finished[0]
        assert constraint.log_potential[member] == alone.log_potential[0]
        if not alone.finished[0]:
            assert set(allowed[member].nonzero()[:, 0].tolist()) == unpacked(alone)


@given(data=st.data())
def test_each_member_follows_its_own_language(llm, data):
    constraint = LANGUAGES[0].start(llm, 1)
    members = [LANGUAGES[0].start(llm, 1)]
    for _ in range(data.draw(st.integers(1, 5))):
        operation = data.draw(st.sampled_from(["cat", "select", "advance"]))
        if operation == "cat":
            added = [constraint]
            for _ in range(data.draw(st.integers(0, 2))):
                language, count = (
                    data.draw(st.sampled_from(LANGUAGES)),
                    data.draw(st.integers(0, 3)),
                )
                added.append(language.start(llm, count))
                members = [*members, *(language.start(llm, 1) for _ in range(count))]
            constraint = Constraint.cat(llm, added)
        elif operation == "select":
            places = st.integers(0, max(len(members) - 1, 0))
            chosen = data.draw(st.lists(places, max_size=4 if members else 0))
            constraint = constraint[np.array(chosen, np.int64)]
            members = [members[place] for place in chosen]
        else:
            ids = st.integers(-1, len(TOKENS) - 1)
            token_ids = data.draw(st.lists(ids, min_size=len(members), max_size=len(members)))
            constraint = constraint.advance(np.array(token_ids, np.int64))
            members = [
                alone.advance([token]) for alone, token in zip(members, token_ids, strict=True)
            ]
    check(constraint, members)


def test_finished_members_are_replaced(llm):
    """In a loop that draws one text from the first language, then others from the second."""
    first, second = LANGUAGES[1], Python(lambda text: b"b" not in text, within=LANGUAGES[0])
    population, constraint = llm.population([3], 3), first.start(llm, 3)
    texts = []
    for step in range(20):
        drawn = constraint.draw_sync(population, seed=step)
        population = population.extend(drawn.token_ids)
        constraint = constraint.advance(drawn.token_ids)
        ended = constraint.finished
        texts += [
            llm.decode_bytes(population[int(i)].token_ids[1:-1]) for i in ended.nonzero()[0]
        ]
        new = int(ended.sum())
        population = genlm.Population.cat([population[~ended], llm.population([3], new)])
        constraint = Constraint.cat(llm, [constraint[~ended], second.start(llm, new)])
    assert len(texts) > 6
    assert sorted(texts[:3]) != [b"\xc3\xa9"] * 3
    assert {*texts} <= {b"a", b"ba", "é".encode(), b""}


def test_constraints_without_members_are_dropped(llm):
    """Otherwise a loop that replaces members would keep the constraints of all."""
    constraint: Any = LANGUAGES[0].start(llm, 2)
    for _ in range(5):
        constraint = Constraint.cat(llm, [constraint[1:], LANGUAGES[1].start(llm, 1)])
    assert len(constraint._pairs) == 2
    assert not any(isinstance(part, JoinedConstraint) for part, _ in constraint._pairs)
    empty = constraint[:0]
    assert len(empty) == len(Constraint.cat(llm, [empty, empty])) == 0


def test_what_cannot_be_concatenated_is_refused(llm):
    constraint = LANGUAGES[0].start(llm, 1)
    with pytest.raises(ValueError, match="no constraints"):
        Constraint.cat(llm, [])
    with pytest.raises(TypeError, match="expected constraints; found <Automaton"):
        Constraint.cat(llm, [constraint, LANGUAGES[0]])
    with pytest.raises(TypeError, match="expected a loaded model"):
        Constraint.cat([constraint], [constraint])
