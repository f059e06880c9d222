"""`Grammar` against enumerations and against `Automaton`, for both libraries."""

from __future__ import annotations

import asyncio
import json
import re
import sys

import numpy as np
import pytest
import torch
from constrained_model import END, TEXT_IDS, TOKENS, SmallEngine, text_of, unpacked, writings

import genlm
from genlm.constraints import Automaton, Grammar, matchers
from genlm.core.base.blocking import run_blocking

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

PATTERN = "(a|éb)(b|é)?"
GRAMMARS = {
    "xgrammar": Grammar.ebnf('root ::= ("a" | "éb") last\nlast ::= "" | "b" | "é"'),
    "llguidance": Grammar.lark('start: ("a" | "éb") last?\nlast: "b" | "é"'),
}
CLOSED = {"additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {"é": {"enum": ["x", 10]}},
    "required": ["é"],
    **CLOSED,
}
WRITTEN = r'\{"é": ("x"|10)\}'
TIGHT = {
    "xgrammar": {"any_whitespace": False, "strict_mode": True},
    "llguidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    },
}


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


@pytest.fixture(params=GRAMMARS)
def grammar(request):
    return GRAMMARS[request.param]


def test_masks_are_the_tokens_after_which_a_text_can_be_completed(llm, grammar):
    """Against all sequences of up to five tokens, for all their beginnings."""

    def accepts(text: bytes) -> bool:
        try:
            return bool(re.fullmatch(PATTERN, text.decode()))
        except UnicodeDecodeError:
            return False

    accepted = {*writings(accepts, 5)}
    beginnings = {ids[:length] for ids in accepted for length in range(len(ids) + 1)}
    assert len(beginnings) > 20
    for ids in beginnings:
        constraint = grammar.start(llm, 1)
        for token in ids:
            constraint = constraint.advance([token])
        expected = {token for token in TEXT_IDS if (*ids, token) in beginnings}
        expected |= {END} if ids in accepted else set()
        assert unpacked(constraint) == expected, text_of(ids)


def test_members_follow_their_own_tokens_and_equal_ones_share_a_matcher(llm, grammar):
    a, b, special = TOKENS.index(b"a"), TOKENS.index(b"b"), 1
    start = grammar.start(llm, 6)
    constraint = start.advance([a, a, a, -1, b, special])
    assert constraint.log_potential.tolist() == [0, 0, 0, 0, -np.inf, -np.inf]
    masks, index = constraint.masks()
    assert len(masks) == 4  # dead, finished, after "a", and after nothing
    assert index.tolist() == [2, 2, 2, 3, 0, 0]
    assert unpacked(constraint, 4) == set()
    assert unpacked(constraint, 3) == unpacked(start)
    after = constraint[np.array([0, 0, 3, 4])].advance([b, END, a, a])
    assert after.finished.tolist() == [False, True, False, False]
    assert after.log_potential.tolist() == [0, 0, 0, -np.inf]
    assert unpacked(after, 0) == {END}
    assert unpacked(after, 2) == unpacked(constraint, 0) == unpacked(start.advance([a] * 6), 3)
    again = after.advance([END, a, b, -1])
    assert again.finished.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        after.advance([a, a])


def test_tokens_that_were_not_drawn_are_looked_up(llm, grammar):
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    constraint = grammar.start(llm, 3).advance([a, a, a])
    population = llm.population([(2, a)] * 3)
    drawn = run_blocking(constraint.draw(population, seed=1))
    after = constraint.advance(drawn.token_ids)
    assert after.log_potential.tolist() == [0, 0, 0]
    assert after.finished.tolist() == (drawn.token_ids == END).tolist()
    drawn.token_ids[:] = torch.tensor([b, END, a])
    after = constraint.advance(drawn.token_ids)
    assert after.log_potential.tolist() == [0, 0, -np.inf]
    assert after.finished.tolist() == [False, True, False]
    assert unpacked(after, 0) == {END}


def test_a_text_may_have_begun(llm, grammar):
    assert unpacked(grammar.start(llm, 1, text="éb".encode())) == unpacked(
        Automaton.regex(PATTERN).start(llm, 1, text="éb".encode())
    )
    with pytest.raises(ValueError, match="begins with b'b'"):
        grammar.start(llm, 1, text=b"b")


LACKING = {  # "z" and "w" are bytes that no token has
    "xgrammar": 'root ::= "a" | "az" | "bz" | "bwa"',
    "llguidance": 'start: "a" | "az" | "bz" | "bwa"',
}


@pytest.mark.parametrize("library", LACKING)
def test_a_text_that_needs_a_byte_without_token_is_not_complete(llm, library):
    source = LACKING[library]
    language = Grammar.ebnf(source) if library == "xgrammar" else Grammar.lark(source)
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    assert not {b"z", b"w"} & set(TOKENS)
    first = language.start(llm, 2)
    constraint = first.advance([a, b])
    assert unpacked(constraint, 0) == {END}  # "a" is a text
    assert unpacked(constraint, 1) == set()  # "b" is not
    assert constraint.advance([END, END]).log_potential.tolist() == [0, -np.inf]
    assert unpacked(first.advance([b, a]), 1) == {END}  # the first state can be continued
    assert unpacked(language.start(llm, 1, text=b"bw")) == {a}
    with pytest.raises(ValueError, match="begins with b'zz'"):
        language.start(llm, 1, text=b"zz")


def test_a_grammar_of_llguidance_without_text_allows_no_token(llm):
    constraint = Grammar.lark("start: T\nT: /a/ & /b/").start(llm, 1)
    assert unpacked(constraint) == set()


@pytest.mark.parametrize(
    ("grammar", "text", "allowed"),
    [
        (Grammar.ebnf('root ::= "[]" | "[" root "]"'), b"[[[", {b"]", b"]]"}),
        (Grammar.ebnf('root ::= "[[[" | root "]"'), b"[[[", {b"]", b"]]"}),
        (
            Grammar.json_schema(
                {"type": "array", "items": {"$ref": "#"}}, any_whitespace=False
            ),
            b"[[[",
            {b"]", b"]]"},
        ),
        (Grammar.ebnf('root ::= "bba" | "\u00e9"'), b"", {b"bba", b"\xc3"}),
    ],
)
def test_tokens_that_xgrammar_may_exclude_wrongly_are_allowed(grammar, text, allowed):
    """Tokens after an inner use of the start rule, and tokens that contain another token."""
    texts = [b"]", b"]]", b"a]", b"ba", b"bba", b"\xc3", b"\xa9\xc3"]
    tokens = [genlm.Token(token_id, each) for token_id, each in enumerate(texts)]
    model = genlm.AsyncLM.__new__(genlm.AsyncLM)  # without an engine
    model.vocabulary = genlm.Vocabulary(None, tokens, [""] * len(texts))
    constraint = grammar.start(model, 1, text=text)
    assert {texts[token_id] for token_id in unpacked(constraint)} == allowed


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_grammars_share_the_form_of_a_vocabulary(library, llm, monkeypatch):
    forms = {"xgrammar": matchers._tokenizer_infos, "llguidance": matchers._byte_tokenizers}
    build, built = forms[library]._build, []
    monkeypatch.setattr(
        forms[library], "_build", lambda *vocabulary: built.append(1) or build(*vocabulary)
    )
    for kind in ("string", "integer"):
        Grammar.json_schema({"type": kind}, library=library).start(llm, 1, stop=[1, 2])
    assert len(built) == 1


def test_texts_end_with_the_given_tokens(llm, grammar):
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    constraint = grammar.start(llm, 1, stop=[b]).advance([a])
    assert b in unpacked(constraint)
    assert END not in unpacked(constraint)
    assert constraint.advance([b]).finished.all()


def test_without_an_end_of_text_a_text_is_over_where_nothing_can_follow(grammar):
    with genlm.AsyncLM(lambda: SmallEngine(tokenizer=None)) as llm:
        a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
        constraint = grammar.start(llm, 2).advance([a, a]).advance([b, -1])
        assert constraint.finished.tolist() == [True, False]


@pytest.mark.parametrize("library", TIGHT)
def test_constraints_do_not_change_when_others_continue_them(library):
    """Continue random earlier constraints; compare with matchers that have one continuation."""
    grammar = Grammar.json_schema(SCHEMA, library=library)
    with genlm.load_model("demo", "reference") as llm:
        rng, constraints = np.random.default_rng(1), [([()] * 3, grammar.start(llm, 3))]
        for _ in range(80):
            histories, constraint = constraints[rng.integers(len(constraints))]
            tokens = [rng.choice(sorted(unpacked(constraint, i))) for i in range(3)]
            tokens[rng.integers(3)] = -1
            ancestors = rng.integers(3, size=3)
            after = [(*ids, token) for ids, token in zip(histories, tokens, strict=True)]
            constraint = constraint.advance(tokens)
            if not constraint.finished.any():
                constraints.append(([after[i] for i in ancestors], constraint[ancestors]))
        for histories, constraint in constraints:
            for member, ids in enumerate(histories):
                alone = grammar.start(llm, 1)
                for token in ids:
                    alone = alone.advance([token])
                assert unpacked(constraint, member) == unpacked(alone)
        assert max(len(ids) for histories, _ in constraints for ids in histories) > 3


@pytest.mark.parametrize("library", TIGHT)
@pytest.mark.parametrize("is_text", [False, True])
def test_a_json_schema_is_the_regular_language_of_its_documents(library, is_text):
    """On a real vocabulary, along all ways to write a document."""
    schema = json.dumps(SCHEMA) if is_text else SCHEMA
    grammar = Grammar.json_schema(schema, library=library, **TIGHT[library])
    with genlm.load_model("demo", "reference") as llm:
        constraint, expected = grammar.start(llm, 1), Automaton.regex(WRITTEN).start(llm, 1)
        rng, steps = np.random.default_rng(0), 0
        for _ in range(3):
            one, other = constraint, expected
            while not one.finished.all():
                allowed = unpacked(one)
                assert allowed == unpacked(other)
                token = rng.choice(sorted(allowed))
                one, other = one.advance([token]), other.advance([token])
                steps += 1
            assert other.finished.all()
        assert steps > 10


def test_draws_in_a_loop_and_in_a_blocking_one_are_the_same(llm, grammar):
    async def sampled(seed: int) -> list[list[int]]:
        population, constraint = llm.population([2], 30), grammar.start(llm, 30)
        while not constraint.finished.all():
            drawn = await constraint.draw(population, seed=seed)
            population = population.extend(drawn.token_ids)
            constraint = constraint.advance(drawn.token_ids)
        return population.tokens.tolist()

    assert asyncio.run(sampled(0)) == run_blocking(sampled(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema({}, library="outlines"), "expected one of xgrammar, llg"),
        (lambda: Grammar("llguidance", "ebnf", ""), "expected one of xgrammar$"),
    ],
)
def test_an_unknown_library_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_options_of_llguidance_need_a_schema_that_is_an_object():
    for schema, error in ((True, "an object; found True"), ("[1]", r"an object; found \[1\]")):
        with pytest.raises(ValueError, match=error):
            Grammar.json_schema(schema, library="llguidance", whitespace_flexible=False)
    flexible = {"type": "string", "x-guidance": None}
    Grammar.json_schema(flexible, library="llguidance", whitespace_flexible=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.ebnf("root ::= nothing"),
        lambda: Grammar.ebnf('root ::= "a"', root="nothing"),
        lambda: Grammar.lark("start: nothing"),
        lambda: Grammar.json_schema({"type": "nothing"}),
        lambda: Grammar.json_schema('{"type": "nothing"}', library="llguidance"),
    ],
)
def test_a_wrong_grammar_is_refused_where_it_is_made(make):
    with pytest.raises(ValueError, match=r"does not accept the grammar: [^$]*nothing"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.ebnf('a ::= "b"'), "EBNF parser error at line 1"),
        (lambda: Grammar.json_schema({"type": "nothing"}), 'Unsupported type "nothing"'),
        (lambda: Grammar.json_schema("{nothing"), "Failed to parse JSON"),
    ],
)
def test_errors_of_xgrammar_do_not_name_lines_of_its_source(make, message):
    with pytest.raises(ValueError, match=f"^xgrammar does not accept the grammar: {message}"):
        make()


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_a_missing_library_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(genlm.MissingRequirementError, match=rf"genlm-core\[{library}\]"):
        Grammar.json_schema({}, library=library)
