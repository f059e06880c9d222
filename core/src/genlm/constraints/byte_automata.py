"""Deterministic automata over bytes as arrays, for `Automaton`.

A `ByteTable` has a row of 256 successors per state; -1 stands for no state. State 0 is the
start. All functions are array operations on whole tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Flags: TypeAlias = npt.NDArray[np.bool_]
States: TypeAlias = npt.NDArray[np.int64]

NO_STATE = -1
MAX_STATES = 100_000
"""Maximum number of states of an automaton that is built from a description."""
_BLOCK = 2**22
"""Number of successors that `distinct_edges` sorts at a time."""
_MAX_ROUNDS = 32
"""Maximum number of rounds of Moore's algorithm, which together take less than the time of
Hopcroft's algorithm."""
_FACTORS: States = np.random.default_rng(0).integers(2**62, size=257) * 2 + 1
"""Factors of classes in hashes of 64 bits."""


class ByteTable(NamedTuple):
    """A deterministic automaton.

    Attributes:
        successors: Successors of all states and bytes, -1 for none, `(states, 256)`, int64.
        accepting: Whether a text is complete in each state, `(states,)`, bool.
    """

    successors: States
    accepting: Flags


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


def texts_table(texts: Iterable[bytes]) -> ByteTable:
    """Return the smallest automaton of some texts.

    Texts are added in order. A state from which no later text continues is complete, and is
    replaced by an equal complete state if there is one.

    Source: Daciuk, Mihov, Watson and Watson, Incremental Construction of Minimal Acyclic
    Finite-State Automata, 2000, section 3.

    Raises:
        ValueError: `texts` is empty, or the automaton has more than `MAX_STATES` states.
    """
    ordered = sorted({*texts})
    if not ordered:
        raise ValueError("found an empty list of texts; pass at least one text")
    number_of: dict[tuple[int, ...], int] = {}  # of the complete states
    # The states of a text: whether each accepts, then its edges, a byte and a state each.
    path: list[list[int]] = [[False]]
    for text, after in zip(ordered, [*ordered[1:], b""], strict=True):
        path += [[False] for _ in range(len(path), len(text) + 1)]
        path[-1][0] = True
        differing = (place for place, pair in enumerate(zip(text, after)) if pair[0] != pair[1])
        shared = next(differing, min(len(text), len(after)))
        while len(path) > shared + 1:
            number = number_of.setdefault(tuple(path.pop()), len(number_of) + 1)
            path[-1] += text[len(path) - 1], number
        if len(number_of) >= MAX_STATES:
            raise ValueError(
                f"the automaton of {len(ordered):,} texts has more than {MAX_STATES:,} states; "
                f"pass fewer or shorter texts"
            )
    states = [path[0], *number_of]
    edges = np.array([*chain(*(state[1:] for state in states))], np.int64).reshape(-1, 2)
    sources = np.repeat(np.arange(len(states)), [len(state) // 2 for state in states])
    successors = np.full((len(states), 256), NO_STATE)
    successors[sources, edges[:, 0]] = edges[:, 1]
    return ByteTable(successors, np.array([state[0] for state in states], np.bool_))


def complement(table: ByteTable) -> ByteTable:
    """Return the automaton of the valid UTF-8 texts that `table` does not accept."""
    successors, accepting = _with_dead_state(table, np.arange(256))
    return product(ByteTable(successors, ~accepting), utf8_table(), np.logical_and)


def product(
    first: ByteTable, second: ByteTable, accepts: Callable[[Flags, Flags], Flags]
) -> ByteTable:
    """Return the product automaton, which accepts by a function of both automata.

    Reachable pairs of states are enumerated layer by layer.
    """
    letters, letter_of = distinct_letters(np.vstack([first.successors, second.successors]))
    first, second = _with_dead_state(first, letters), _with_dead_state(second, letters)
    width = len(second.accepting)
    number_of, layers, rows = {0: 0}, [np.zeros(1, np.int64)], []
    while layers[-1].size:
        pairs, count = layers[-1], len(number_of)
        after = first.successors[pairs // width] * width + second.successors[pairs % width]
        targets, places = np.unique(after, return_inverse=True)
        numbers = np.array(
            [number_of.setdefault(target, len(number_of)) for target in targets.tolist()]
        )
        rows.append(numbers[places].reshape(after.shape))
        layers.append(targets[numbers >= count])
    pairs = np.concatenate(layers)
    accepting = accepts(first.accepting[pairs // width], second.accepting[pairs % width])
    return ByteTable(np.concatenate(rows)[:, letter_of], accepting)


def minimise(table: ByteTable) -> ByteTable:
    """Return the smallest automaton of the same language.

    Moore's algorithm takes array operations on the table for each letter of the longest text
    that is needed to distinguish two states. If 32 do not suffice, Hopcroft's algorithm is
    used, whose time is proportional to `n log n` for any automaton.

    States from which no accepting state can be reached become -1; state 0 always remains.
    """
    letters, letter_of = distinct_letters(table.successors)
    successors, accepting = _with_dead_state(table, letters)
    is_live = live_states(distinct_edges([successors]), accepting)
    successors[~is_live[successors]] = len(table.accepting)
    columns = np.ascontiguousarray(successors.T)
    classes = _moore(columns, accepting, is_live)
    if classes is None:
        classes = _hopcroft(columns, accepting, is_live)
    merged = _merge_states(successors, accepting, classes)
    return ByteTable(merged.successors[:, letter_of], merged.accepting)


def distinct_letters(successors: States) -> tuple[States, States]:
    """Return a letter of each set of letters with equal successors, and each letter's set.

    Args:
        successors: Shape `(states, letters)`.
    """
    place_of: dict[bytes, int] = {}
    sets = np.array(
        [place_of.setdefault(column.tobytes(), len(place_of)) for column in successors.T.copy()]
    )
    return np.unique(sets, return_index=True)[1], sets


def _with_dead_state(table: ByteTable, letters: States) -> ByteTable:
    """Return the columns of some letters, with a further state that takes the place of -1."""
    successors = np.pad(
        table.successors[:, letters], ((0, 1), (0, 0)), constant_values=NO_STATE
    )
    successors[successors == NO_STATE] = len(table.accepting)
    return ByteTable(successors, np.append(table.accepting, [False]))


def _moore(columns: States, accepting: Flags, is_live: Flags) -> States | None:
    """Return the class of each state; None if more than 32 rounds are needed.

    Args:
        columns: Successors of all states, shape `(letters, states)`.
        accepting: Whether each state accepts.
        is_live: Whether an accepting state can be reached from each state.
    """
    classes: States = np.where(accepting, 2, is_live)
    count = len(np.unique(classes))
    for _ in range(_MAX_ROUNDS):
        first, refined = divide(columns, classes)
        if len(first) == count:
            same = first[refined]
            is_right = (accepting == accepting[same]).all() and is_exact(columns, classes, same)
            return classes if is_right else None
        classes, count = refined, len(first)
    return None


def divide(columns: States, classes: States) -> tuple[States, States]:
    """Divide classes by the classes of the states' successors: a round of Moore's algorithm.

    States of one new class may differ by chance, which `is_exact` finds.

    Args:
        columns: Successors of all states, shape `(letters, states)`.
        classes: Class of each state.

    Returns:
        The first state of each new class, and the new class of each state.
    """
    # Hashes of a state's class and of the classes of its successors; the sums wrap.
    hashes = classes * _FACTORS[-1]
    for column, factor in zip(columns, _FACTORS):
        hashes += classes[column] * factor
    _, first, divided = np.unique(hashes, return_index=True, return_inverse=True)
    return first, divided


def is_exact(columns: States, classes: States, same: States) -> bool:
    """Whether states have the class of other states, and their successors as well.

    Args:
        columns: As for `divide`.
        classes: As for `divide`.
        same: Another state for each state.
    """
    return bool((classes == classes[same]).all()) and all(
        (classes[column] == classes[column[same]]).all() for column in columns
    )


def _hopcroft(columns: States, accepting: Flags, is_live: Flags) -> States:
    """Return the class of each state; arguments as for `_moore`."""
    sources: list[dict[int, list[int]]] = []  # of each live state, by column
    for column in columns:
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
                if len(part) == len(members[name]):
                    continue
                members[name] -= part
                members.append(part)
                if name not in pending and len(part) > len(members[name]):
                    members[name], members[-1] = part, members[name]
                for state in members[-1]:
                    classes[state] = len(members) - 1
                pending.add(len(members) - 1)
    return np.array(classes)


def _merge_states(successors: States, accepting: Flags, classes: States) -> ByteTable:
    """Return the automaton of the classes of states that are reachable from the start."""
    _, members, classes = np.unique(classes, return_index=True, return_inverse=True)
    dead = classes[-1]
    table, flags = classes[successors[members]], accepting[members]
    order, rows = [int(classes[0])], table.tolist()
    is_reached = {order[0], int(dead)}
    for state in order:  # grows
        new = [target for target in dict.fromkeys(rows[state]) if target not in is_reached]
        is_reached.update(new)
        order += new
    number = np.full(len(members), NO_STATE)
    number[order] = np.arange(len(order))
    number[dead] = NO_STATE  # also if it is the start
    return ByteTable(number[table[order]], flags[order])


def distinct_edges(
    blocks: Iterable[npt.NDArray[np.integer[Any]]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the distinct pairs of a state and a successor, in order of the states.

    Args:
        blocks: Successors of consecutive states and all symbols, each of shape
            `(some states, symbols)`.
    """
    edges, first = [np.empty((2, 0), np.int32)], 0
    for block in blocks:
        symbols = block.shape[1]
        for begin in range(0, len(block), rows := _BLOCK // max(1, symbols)):
            part = np.sort(block[begin : begin + rows].astype(np.int32), axis=1)
            is_first = np.diff(part, axis=1, prepend=-1) > 0
            sources = first + begin + np.flatnonzero(is_first) // symbols
            edges.append(np.array([sources, part[is_first]], np.int32))
        first += len(block)
    sources, targets = np.concatenate(edges, axis=1)
    return sources, targets


def live_states(
    edges: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], accepting: Flags
) -> Flags:
    """Return whether an accepting state can be reached from each state, `(states,)`.

    Args:
        edges: Pairs of a state and a successor, from 0 to `states - 1`.
        accepting: Whether each state accepts, shape `(states,)`.
    """
    sources, targets = edges
    sources = sources[np.argsort(targets, kind="stable")]
    ends = np.cumsum(np.bincount(targets, minlength=len(accepting))).tolist()
    live = accepting.copy()
    reached = np.flatnonzero(live).tolist()
    for state in reached:  # grows
        before = sources[ends[state - 1] if state else 0 : ends[state]]
        new = before[~live[before]]
        live[new] = True
        reached.extend(new.tolist())
    return live
