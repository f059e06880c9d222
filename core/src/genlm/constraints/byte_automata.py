"""Deterministic automata over bytes as arrays, for `Automaton`.

A `ByteTable` has a row of 256 successors per state; -1 stands for no state. State 0 is the
start. All functions are array operations on whole tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import import_required

__all__ = [
    "NO_STATE",
    "ByteTable",
    "complement",
    "live_states",
    "minimise",
    "product",
    "regex_table",
    "utf8_table",
]

Flags: TypeAlias = npt.NDArray[np.bool_]
States: TypeAlias = npt.NDArray[np.int64]

NO_STATE = -1
_MAX_STATES = 30_000
"""Maximum size of a regular expression, estimated before it is compiled."""

_IGNORED = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^]\\])*\])|\s|#[^\n]*", re.DOTALL)
_ELEMENT = re.compile(
    r"""
    \{ \s* (?P<least>\d{1,10}) \s* (?: , \s* (?P<most>\d{0,10}) \s* )? \}
    | (?P<open> \( (?: \? (?: P?<\w+> | [a-zA-Z-]*:? ) )? )
    | (?P<repeated> [*+?|] )
    | \\ [pPxuU] \{ [^}]* \} | \\. | \[ \^? \]? (?: \\. | [^]\\] )* \] | .
""",
    re.VERBOSE | re.DOTALL,
)
_STATES = [  # approximate numbers of states of elements, for UTF-8
    (re.compile(r"(\[.*)?\\[wWpP]", re.DOTALL), 300),
    (re.compile(r"(\[.*)?\\[dDsS]", re.DOTALL), 30),
    (re.compile(r"\.|\[\^|\[.*[^\x00-\x7F]", re.DOTALL), 8),
    (re.compile(r"\[|\\"), 1),
]


class ByteTable(NamedTuple):
    """A deterministic automaton.

    Attributes:
        successors: Successors of all states and bytes, -1 for none, `(states, 256)`, int64.
        accepting: Whether a text is complete in each state, `(states,)`, bool.
    """

    successors: States
    accepting: Flags


def regex_table(pattern: str) -> ByteTable:
    """Return the automaton of the texts that fully match a regular expression.

    outlines-core compiles it with the Rust crate regex-automata. The vocabulary passed to it
    consists of the 256 bytes, so that its index is the automaton.

    Raises:
        MissingRequirementError: outlines-core is not installed.
        ValueError: The syntax of the pattern is invalid or not supported.
        TypeError: `pattern` is not a string.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a regular expression is a string; found {pattern!r}")
    outlines = import_required(
        "outlines_core", "regular expressions", "'genlm-core[constraints]'"
    )
    _check_elements(pattern)
    letters = outlines.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        outlines.Index(f"|{pattern}", letters)  # matches the empty text, so errors are syntax
        # \z makes the whole text match: else "a|ab" would end at its first alternative. A
        # comment of the pattern ends at the newline, which (?x) ignores. Three bytes precede
        # each text: after the first, the expression matches already, so that regex-automata
        # does not also follow matches that begin later; expressions that match the empty text
        # need the byte before it, and the second separates both.
        index = outlines.Index(rf"\x00(?:\x00(?:\x00(?:{pattern}(?x){chr(10)}))?\z)?", letters)
    except Exception as error:
        raise ValueError(
            f"cannot compile the regular expression {pattern!r}: {error}. The syntax is that "
            f"of Rust's regex. Lookaround and backreferences are not supported"
        ) from error
    edges = index.get_transitions()
    first = index.get_initial_state()
    for _ in range(3):
        first = edges[first][0]
    accepting = index.get_final_states()
    names = [first, *sorted({*edges, *accepting} - {first})]
    number = {name: place for place, name in enumerate(names)}
    successors = np.full((len(names), 256), NO_STATE)
    for name, row in edges.items():
        for byte, target in row.items():
            if byte < 256 and target in number:
                successors[number[name], byte] = number[target]
    return ByteTable(successors, np.array([name in accepting for name in names]))


def _check_elements(pattern: str) -> None:
    r"""Refuse anchors of the beginning, and counted repetitions with too many states.

    Raises:
        ValueError: The pattern has `^` or `\A`, or more than `_MAX_STATES` states.
    """
    is_verbose = re.match(r"\(\?[a-wyzA-Z]*x", pattern) is not None
    sizes, last = [0], [0]  # of the groups around an element, and of the element before it
    for element in _ELEMENT.finditer(_IGNORED.sub(r"\1", pattern) if is_verbose else pattern):
        text = element[0]
        if text in ("^", r"\A"):
            raise ValueError(
                f"the regular expression {pattern!r} has an anchor of the beginning, ^ or \\A; "
                f"remove it, because the whole text is matched"
            )
        if element["open"]:
            sizes.append(0)
            last.append(0)
        elif element["least"]:
            times = max(int(element["least"]), int(element["most"] or 0))
            sizes[-1] += last[-1] * (times - 1)
            last[-1] *= times
        elif not element["repeated"]:
            if text == ")" and len(sizes) > 1:
                last.pop()
                size = sizes.pop()
            else:
                states = (states for kind, states in _STATES if kind.match(text))
                size = next(states, len(text.encode()))
            sizes[-1] += size
            last[-1] = size
    if sum(sizes) > _MAX_STATES:
        shown = pattern if len(pattern) <= 80 else f"{pattern[:80]}..."
        raise ValueError(
            f"the regular expression {shown!r} has about {sum(sizes):,} states; the maximum is "
            f"{_MAX_STATES:,}. Use *, + or fewer repetitions, and classes of fewer characters, "
            f"such as [a-z] in place of \\w"
        )


@cache
def utf8_table() -> ByteTable:
    """Return the automaton of valid UTF-8 (RFC 3629, section 4)."""
    ranges = [
        (0, 0x00, 0x7F, 0),
        (0, 0xC2, 0xDF, 1),
        (0, 0xE0, 0xE0, 2),
        (0, 0xE1, 0xEC, 3),
        (0, 0xED, 0xED, 4),
        (0, 0xEE, 0xEF, 3),
        (0, 0xF0, 0xF0, 5),
        (0, 0xF1, 0xF3, 6),
        (0, 0xF4, 0xF4, 7),
        (1, 0x80, 0xBF, 0),
        (2, 0xA0, 0xBF, 1),
        (3, 0x80, 0xBF, 1),
        (4, 0x80, 0x9F, 1),
        (5, 0x90, 0xBF, 3),
        (6, 0x80, 0xBF, 3),
        (7, 0x80, 0x8F, 3),
    ]
    successors = np.full((8, 256), NO_STATE)
    for state, first, last, target in ranges:
        successors[state, first : last + 1] = target
    return ByteTable(successors, np.arange(8) == 0)


def complement(table: ByteTable) -> ByteTable:
    """Return the automaton of the valid UTF-8 texts that `table` does not accept."""
    states = len(table.accepting)
    successors = np.vstack([table.successors, np.full((1, 256), NO_STATE)])
    successors[successors == NO_STATE] = states
    opposite = ByteTable(successors, ~np.append(table.accepting, [False]))
    return product(opposite, utf8_table(), np.logical_and)


def product(
    first: ByteTable, second: ByteTable, accepts: Callable[[Flags, Flags], Flags]
) -> ByteTable:
    """Return the product automaton, which accepts by a function of both automata.

    Reachable pairs of states are enumerated layer by layer.
    """
    width = len(second.accepting) + 1  # the last state of both is dead
    tables = [
        np.vstack([automaton.successors, np.full((1, 256), NO_STATE)])
        for automaton in (first, second)
    ]
    flags = [np.append(automaton.accepting, [False]) for automaton in (first, second)]
    for table in tables:
        table[table == NO_STATE] = len(table) - 1
    is_reached = np.zeros(len(tables[0]) * width, np.bool_)
    is_reached[0] = True
    layers, rows = [np.zeros(1, np.int64)], []
    while layers[-1].size:
        pairs = layers[-1]
        after = tables[0][pairs // width] * width + tables[1][pairs % width]
        rows.append(after)
        new = np.unique(after)
        new = new[~is_reached[new]]
        is_reached[new] = True
        layers.append(new)
    pairs = np.concatenate(layers)
    number = np.empty(len(is_reached), np.int64)
    number[pairs] = np.arange(len(pairs))
    accepting = accepts(flags[0][pairs // width], flags[1][pairs % width])
    return ByteTable(number[np.concatenate(rows)], accepting)


def minimise(table: ByteTable) -> ByteTable:
    """Return the smallest automaton of the same language, by Hopcroft's algorithm.

    States from which no accepting state can be reached become -1; state 0 always remains.
    """
    dead = len(table.accepting)
    accepting = np.append(table.accepting, [False])
    successors = np.vstack([table.successors, np.full((1, 256), NO_STATE)])
    successors[successors == NO_STATE] = dead
    is_live = live_states(successors, accepting)
    successors[~is_live[successors]] = dead
    classes = _equivalent_states(successors, accepting, is_live)
    return _merge_states(successors, accepting, classes)


def _equivalent_states(successors: States, accepting: Flags, is_live: Flags) -> States:
    """Return the class of each state; all states that are not live are in class 0."""
    # Bytes with equal successors have one column.
    columns = {column.tobytes(): column for column in successors.T.copy()}
    sources: list[dict[int, list[int]]] = []  # of each live state, by column
    for column in columns.values():
        sources.append({})
        for source in np.flatnonzero(is_live[column]).tolist():
            sources[-1].setdefault(int(column[source]), []).append(source)
    classes = np.where(accepting, 2, is_live).tolist()
    members = [
        set(np.flatnonzero(kind).tolist())
        for kind in (~is_live, is_live & ~accepting, accepting)
    ]
    pending = {1, 2}  # classes whose sources have not been separated from other states
    while pending:
        targets = list(members[pending.pop()])
        for sources_of in sources:
            parts: dict[int, set[int]] = {}
            for target in targets:
                for source in sources_of.get(target, ()):
                    parts.setdefault(classes[source], set()).add(source)
            for name, part in parts.items():
                halves = [members[name] - part, part]
                if not halves[0]:
                    continue
                if name not in pending and len(part) > len(halves[0]):
                    halves.reverse()
                members[name], new = halves
                for state in new:
                    classes[state] = len(members)
                pending.add(len(members))
                members.append(new)
    return np.array(classes)


def _merge_states(successors: States, accepting: Flags, classes: States) -> ByteTable:
    """Return the automaton of the classes of states that are reachable from the start."""
    _, members, classes = np.unique(classes, return_index=True, return_inverse=True)
    dead = classes[-1]
    table, flags = classes[successors[members]], accepting[members]
    order, is_reached = [int(classes[0])], np.zeros(len(members), np.bool_)
    is_reached[[classes[0], dead]] = True
    for state in order:  # grows
        for target in np.unique(table[state]).tolist():
            if not is_reached[target]:
                is_reached[target] = True
                order.append(target)
    number = np.full(len(members), NO_STATE)
    number[order] = np.arange(len(order))
    if classes[0] == dead:  # the empty language
        return ByteTable(np.full((1, 256), NO_STATE), np.zeros(1, np.bool_))
    return ByteTable(number[table[order]], flags[order])


def live_states(successors: npt.NDArray[np.integer[Any]], accepting: Flags) -> Flags:
    """Return whether an accepting state can be reached from each state, `(states,)`.

    Args:
        successors: Successors of all states and symbols, shape `(states, symbols)`, from 0 to
            `states - 1`.
        accepting: Whether each state accepts, shape `(states,)`.
    """
    states = len(accepting)
    comes_from = np.zeros((states, states), np.bool_)
    comes_from[successors, np.arange(states)[:, None]] = True
    live = accepting.copy()
    reached = np.flatnonzero(live).tolist()
    for state in reached:  # grows
        sources = np.flatnonzero(comes_from[state] & ~live)
        live[sources] = True
        reached.extend(sources.tolist())
    return live
