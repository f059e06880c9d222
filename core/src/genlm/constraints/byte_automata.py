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
_BEGINNING = re.compile(
    r"""
    ^(?: \\[^A] | \[ \^? \]? (?: \\. | [^]\\] )* \] | [^\\^[] )*  # escapes, classes, others
    (?: \^ | \\A )
""",
    re.VERBOSE | re.DOTALL,
)


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
    if _BEGINNING.match(pattern):
        raise ValueError(
            f"the regular expression {pattern!r} has an anchor of the beginning, ^ or \\A; "
            f"remove it, because the whole text is matched"
        )
    letters = outlines.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        outlines.Index(pattern, letters)  # errors then refer to the unchanged pattern
        # \z makes the whole text match: else "a|ab" would end at its first alternative.
        # Expressions that match the empty text need the byte before it.
        index = outlines.Index(rf"\x00(?:{pattern})\z", letters)
    except Exception as error:
        raise ValueError(
            f"cannot compile the regular expression {pattern!r}: {error}. Lookaround "
            f"and backreferences are not supported"
        ) from error
    edges = index.get_transitions()
    first = edges[index.get_initial_state()][0]
    accepting = index.get_final_states()
    names = [first, *sorted({*edges, *accepting} - {first})]
    number = {name: place for place, name in enumerate(names)}
    successors = np.full((len(names), 256), NO_STATE)
    for name, row in edges.items():
        for byte, target in row.items():
            if byte < 256 and target in number:
                successors[number[name], byte] = number[target]
    return minimise(ByteTable(successors, np.array([name in accepting for name in names])))


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
    return minimise(ByteTable(number[np.concatenate(rows)], accepting))


def minimise(table: ByteTable) -> ByteTable:
    """Return the smallest automaton of the same language, by Moore's algorithm.

    States from which no accepting state can be reached become -1; state 0 always remains.
    """
    dead = len(table.accepting)
    successors = np.vstack([table.successors, np.full((1, 256), NO_STATE)])
    successors[successors == NO_STATE] = dead
    successors[~live_states(successors, np.append(table.accepting, [False]))] = dead
    # Bytes with equal successors have one column.
    columns = {column.tobytes(): column for column in successors.T.copy()}
    classes = np.append(table.accepting, [False]).astype(np.int64)
    count = 0
    while classes.max() + 1 > count:
        count = int(classes.max()) + 1
        refined = classes
        for column in columns.values():
            keys = refined * count + classes[column]
            _, refined = np.unique(keys, return_inverse=True)
        classes = refined
    return _merge_states(successors, np.append(table.accepting, [False]), classes)


def _merge_states(successors: States, accepting: Flags, classes: States) -> ByteTable:
    """Return the automaton of the classes of states that are reachable from the start."""
    dead = classes[-1]
    _, members = np.unique(classes, return_index=True)
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
    leads_to = np.zeros((states, states), np.bool_)
    leads_to[np.arange(states)[:, None], successors] = True
    sources, targets = np.nonzero(leads_to)
    live = accepting.copy()
    while True:
        extended = live.copy()
        extended[sources[live[targets]]] = True
        if (extended == live).all():
            return live
        live = extended
