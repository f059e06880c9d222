"""Regular expressions against Python's `re`, and against one automaton of regex-automata."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from genlm.constraints import Automaton, regex
from genlm.constraints.regex_automaton import Element

WORDS = ["".join(word) for n in range(6) for word in itertools.product("abé", repeat=n)]

ELEMENTS = ["a", "b", "é", ".", "[^a]", "[ab]", "(?:)", "ab", "a|b", "a*b|é", "[^a]?"]
REPETITIONS = ["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "{0,}", "{3}?", "{1,2}?"]


def expressions() -> st.SearchStrategy[str]:
    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        repeated = st.tuples(inner, st.sampled_from(REPETITIONS)).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        )
        several = st.lists(inner, min_size=2, max_size=3)
        return repeated | repeated | several.map("".join) | several.map("|".join)

    return st.recursive(st.sampled_from(ELEMENTS), extend, max_leaves=5)


def texts(language: Automaton) -> list[str]:
    return [word for word in WORDS if word.encode() in language]


@settings(max_examples=300)
@given(expressions())
@example("(?:.{0,2}a){2}.{0,3}")
@example("(?:(?:.{0,2}a){0,2}b){1,3}")
@example("(?:(?:a{2,}b?){2,}é){0,2}")
@example("[ab]{1,3}a[^é]{2,4}")
@example(".*ab.{2,}")
def test_a_regular_expression_has_the_texts_that_it_matches_as_a_whole(pattern):
    expected = [word for word in WORDS if re.fullmatch(pattern, word)]
    assert texts(Automaton.regex(pattern)) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "a{2}[]b]{1,2}",
        "[^]a]{2}",
        "[[^a]&&[^b]]{1,2}|[a-z--b]{2}",
        "(?i)A{2}(?-i)b|B{2}",
        "(?i:A{1,2}|É)b{0,1}",
        "(a(?i)B{2}|É{1})b?",
        "(?x) a {2} ? b # b",
        "(?x) a b* [a #]\n b] {2} \\  | é{1}",
        "(?x: a {1,2} b )é{0,1}(?-x: )?",
        "(?x)(a b # )\n){2} ? é",
        "(?x) [ ] a ]{1,2} | [ ^ ] a ]{2}",
        "a{1}+?b{2}??",
        "a{ 1 , 2 }",
        r"\x61{2}\x{62}\u00e9{1}|\U00000062{2}\p{L}|\pL{3}",
        "(?P<x>a{2})(?<y>b)?",
        "a{0}b{0,0}",
        "(){3}a{0,1}",
        "(a?){3}(b*){2}",
        "(?s).{2}|(?s-u:a){1}(?U)b{1,}",
        r"\w{2}\d?|\D{1}",
        "[[:alpha:]]{2}é",
        "a$|a{2}b$",
        r"(a{1}\z|b)*$",
    ],
)
def test_the_syntax_is_that_of_the_compiler_of_elements(pattern):
    element = Element.compiled(f"(?:{pattern}(?x)\n)")
    whole = Automaton(element.successors[:, :256], element.accepting)
    assert texts(Automaton.regex(pattern)) == texts(whole)
    assert texts(whole)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a$|b)c", []),
        ("(a$|b)*", ["", "a", "b", "ba", "bb", "bba", "bbb"]),
        (r"(a{2}$|b\z)$", ["b", "aa"]),
        ("$a|$", [""]),
    ],
)
def test_an_anchor_of_the_end_matches_only_at_the_end(pattern, words):
    found = [word for word in texts(Automaton.regex(pattern)) if len(word) < 4]
    assert found == words
    assert found == [
        word
        for word in WORDS
        if len(word) < 4 and re.fullmatch(pattern.replace(r"\z", r"\Z"), word)
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        "^ab*$",
        r"\Aab?|^b{1,2}|é",
        "((?i)^A|^(^b|(a|é)))b{0,1}",
        r"(?m)^a|\Ab",
        "(?x) ^ a # ^\n{2}",
        "^",
        "^^$|^[^a]|\\^",
        "(^)ab",
    ],
)
def test_an_anchor_of_the_beginning_matches_there(pattern):
    python = pattern.replace("((?i)^A|^(", "(^[aA]|^(")
    matches = [word for word in WORDS if re.fullmatch(python, word)]
    assert sorted(set(texts(Automaton.regex(pattern))) & {*WORDS}) == sorted(matches)
    assert matches


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        (".{0,30}", 241),
        ("[^b]{0,30}é", 303),
        ("a.{30}|é", 243),
        (".{0,20}ab.{0,20}", 2000),
        (".{0,20}ab.{5,20}", 4000),
        ("[^b]{0,12}(a[^b]{0,12}){2}", 6000),
        (r".*ab.{20,}", 200),
        (r"(ab|aab|\d+){1,200}", 6000),
        ("(a|b)*a(a|b){9}", 1024),
    ],
)
def test_automata_of_counted_repetitions_are_small(pattern, states):
    """Automata of matches that begin anywhere would have 2 ** 20 states and more."""
    language = Automaton.regex(pattern)
    assert len(language._table.accepting) <= states
    for word in [
        *WORDS,
        *(w + n * "a" for w in ("ab", "éé", "") for n in (18, 19, 20, 29, 31)),
    ]:
        assert (word.encode() in language) == bool(re.fullmatch(pattern, word)), word


@pytest.mark.parametrize(
    "pattern",
    [
        "a{1000000}",
        "(a{1000}){1000}",
        "(?:a{200}b){200}",
        r"\w{1,200}",
        "((?P<x>é|[à-ü]){100}){160,}",
    ],
)
def test_counted_repetitions_of_many_states_are_refused(pattern):
    with pytest.raises(ValueError, match=r"has [\d,]+ states; the maximum is 30,000"):
        Automaton.regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("a{5}b", 6),
        ("(ab|é{3}){2,4}c", 33),
        (r"\{9}|[]{9}]", 3),
        ("(?x)([a-z] {3}) {5} # {9}", 15),
        ("(?P<x>a{0}b)(?i:c)(?x)d", 3),
        (r"(a{2}b){3}{2}", 18),
        (r"\d{2}[^b]{3}", 2 * 25 + 3 * 8),
        ("(){1000000000}(a{0}|){1000000000}", 0),
    ],
)
def test_the_size_of_a_regular_expression_is_that_of_all_copies(pattern, states, monkeypatch):
    monkeypatch.setattr("genlm.constraints.regex._MAX_SIZE", -1)
    with pytest.raises(ValueError, match=f"has {states} states"):
        Automaton.regex(pattern)


def test_an_automaton_that_cannot_be_small_is_refused(monkeypatch):
    monkeypatch.setattr(regex, "MAX_STATES", 1000)
    assert b"a" * 9 in Automaton.regex("[ab]*a[ab]{8}")
    with pytest.raises(ValueError, match=r"'\[ab\]\*a\[ab\]\{12\}' has more than 1,000 states"):
        Automaton.regex("[ab]*a[ab]{12}")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a)|(b{2}", r"cannot compile .*'a\)\|\(b\{2\}': a closing parenthesis"),
        ("(a{2}", "a group is not closed"),
        ("(?=a)", "cannot compile .*Lookaround and backreferences"),
        ("*a{2}", "has no expression to repeat"),
        ("a{3,2}", "its syntax is invalid or not supported. The syntax is that of Rust"),
        ("[a{2}", "a class is not closed"),
        (r"a{2}\1", "cannot compile"),
        (r"a\q{2}", "cannot compile"),
        ("a{2", "cannot compile"),
        ("a^b{2}", "it has \\^ after other parts; remove it"),
        (r"[\]^]\^(\Aa)", r"it has \\A after other parts; remove it"),
        ("(^a|b)*", "it repeats an anchor of the beginning; remove it"),
        ("(^a){2}", "it repeats an anchor of the beginning; remove it"),
        ("[a&&b]", r"it has a part that no text matches, such as the class \[a&&b\]"),
        (r"b[^\x00-\U0010ffff]|a{2}", "it has a part that no text matches"),
        (r"a\b{start}b{2}", r"it has \\b, which depends on the character that follows"),
        ("(?m)a$\nb{2}", r"it has \$, which"),
        ("(" * 9000 + "a" + ")" * 9000, r"the groups .* are nested too deeply"),
    ],
)
def test_an_expression_that_cannot_be_compiled_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        Automaton.regex(pattern)


def test_a_pattern_of_bytes_is_refused():
    with pytest.raises(TypeError, match="a regular expression is a string; found b'a'"):
        Automaton.regex(b"a")
