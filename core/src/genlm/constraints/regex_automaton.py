r"""Parts of a regular expression, and the deterministic automaton of their texts.

An element has a copy for each counted repetition: `E{2,4}` is `EE(E(E)?)?`, and `E{2,}` is
`EE` with a loop at the second copy. A position is a state of a copy. The states of the
deterministic automaton are sets of positions, as in Glushkov's construction. If the
continuations of a position are included in those of another position of a set, the first is
removed. The union of the continuations, and therefore the language, remains the same. Without
this, `.{0,n}a.{0,n}` has a state for each set of distances to earlier `a`; with it, only the
distance to the last one counts.

Only equal positions in different copies of an `E` are compared. The continuations of a position
consist of the rest of its copy, further texts of `E`, and what follows the repetition. In copy
i of `E{m,n}`, i >= m, there are at most n - 1 - i further texts, so the continuations include
those of later copies. In copy i of `E{m,}`, there are at least m - 1 - i further texts, so they
include those of earlier copies. If `E` has counted repetitions itself, the rest of a copy
depends in the same way on the copies inside. A position is removed if the set has the same
position in copies of which each has at least the continuations of its copy.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from genlm.constraints.byte_automata import (
    NO_STATE,
    ByteTable,
    Flags,
    States,
    distinct_letters,
    minimise,
)
from genlm.core.base.error_handling import import_required

END = 256
"""Column of the anchor `$`, a letter that may follow a text any number of times."""


def compile_index(pattern: str) -> Any:
    """Compile an expression with outlines-core.

    regex-automata compiles it. The vocabulary consists of the 256 bytes, so that the index is
    the automaton.

    Raises:
        ValueError: The expression is invalid or not supported.
    """
    outlines = import_required("outlines_core", "Automaton.regex", "'genlm-core[constraints]'")
    letters = outlines.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        return outlines.Index(pattern, letters)
    except Exception as error:
        # A state after which no byte leads to a match.
        if "Found no transitions" in str(error):
            message = "it has a part that no text matches, such as the class [a&&b]"
            raise ValueError(message) from error
        if "building NFA" in str(error):  # outlines-core omits the reason
            raise ValueError("its syntax is invalid or not supported") from error
        raise ValueError(str(error)) from error


class Copy(NamedTuple):
    """A copy of a part for each counted repetition that contains it.

    Attributes:
        names: Numbers of the copies; equal for copies that `order` compares.
        order: Ranks of the copies, of which the smallest has the most continuations.
    """

    names: tuple[int, ...]
    order: tuple[int, ...]


class Fragment(NamedTuple):
    """Where the texts of a part begin and end.

    Attributes:
        first: Positions before the first byte.
        last: Followers of each position after the last byte: the `first` of other parts.
    """

    first: list[int]
    last: list[list[list[int]]]

    def precede(self, first: list[int]) -> None:
        """Let a part follow."""
        for followers in self.last:
            followers.append(first)


class Part(ABC):
    """A part of an expression.

    Attributes:
        size: Number of states, of all copies of its elements, that have successors.
        is_nullable: Whether the part matches the empty text.
    """

    size: int
    is_nullable: bool

    @abstractmethod
    def add(self, positions: Positions, copy: Copy) -> Fragment:
        """Add the positions of a copy."""


class Element(Part):
    """A deterministic automaton, with a column for `$`."""

    def __init__(self, successors: States, accepting: Flags) -> None:
        self.successors = successors
        self.has_successors = (successors != NO_STATE).any(1).tolist()
        self.accepting = accepting.tolist()
        self.size = sum(self.has_successors)
        self.is_nullable = self.accepting[0]

    @classmethod
    def of(cls, table: ByteTable) -> Element:
        """Return the element of an automaton over bytes."""
        successors = np.pad(table.successors, ((0, 0), (0, 1)), constant_values=NO_STATE)
        return cls(successors, table.accepting)

    @classmethod
    def end(cls) -> Element:
        """Return the anchor `$`."""
        successors = np.full((2, END + 1), NO_STATE)
        successors[0, END] = 1
        return cls(successors, np.array([False, True]))

    @classmethod
    def compiled(cls, expression: str) -> Element:
        """Compile an expression; raise `ValueError` as `compile_index`."""
        # \z makes the whole text match: else "a|ab" would end at its first alternative. Three
        # bytes precede each text: after the first, the expression matches already, so that
        # regex-automata does not also follow matches that begin later; expressions that match
        # the empty text need the byte before it, and the second separates both.
        index = compile_index(rf"\x00(?:\x00(?:\x00{expression})?\z)?")
        edges, accepting = index.get_transitions(), index.get_final_states()
        first = index.get_initial_state()
        for _ in range(3):
            first = edges[first][0]
        names = [first, *sorted({*edges, *accepting} - {first})]
        number = {name: place for place, name in enumerate(names)}
        successors = np.full((len(names), 256), NO_STATE)
        for name, row in edges.items():
            for byte, target in row.items():
                if byte < 256 and target in number:
                    successors[number[name], byte] = number[target]
        is_accepting = np.array([name in accepting for name in names])
        return cls.of(minimise(ByteTable(successors, is_accepting)))

    def add(self, positions: Positions, copy: Copy) -> Fragment:
        """Add the positions of a copy of the element."""
        return positions.add(self, copy)


class Sequence(Part):
    """Parts one after the other."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)
        self.is_nullable = all(part.is_nullable for part in parts)

    def add(self, positions: Positions, copy: Copy) -> Fragment:
        """Add the parts, each of which precedes the next."""
        first: list[int] = []
        last: list[list[list[int]]] = []
        is_nullable = True
        for part in self.parts:
            fragment = part.add(positions, copy)
            Fragment(first, last).precede(fragment.first)
            first = first + fragment.first if is_nullable else first
            last = last + fragment.last if part.is_nullable else fragment.last
            is_nullable = is_nullable and part.is_nullable
        return Fragment(first, last)


class Choice(Part):
    """Alternatives."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)
        self.is_nullable = any(part.is_nullable for part in parts)

    def add(self, positions: Positions, copy: Copy) -> Fragment:
        """Add the alternatives."""
        firsts, lasts = zip(*[part.add(positions, copy) for part in self.parts], strict=True)
        return Fragment([*chain(*firsts)], [*chain(*lasts)])


class Repetition(Part):
    """A part that is repeated `least` to `most` times; `most` is None for no maximum."""

    def __init__(self, part: Part, least: int, most: int | None) -> None:
        self.part, self.most = part, most
        self.least = 0 if part.is_nullable else least
        self.copies = max(self.least, 1) if most is None else most
        self.size = self.copies * part.size
        self.is_nullable = self.least == 0

    def add(self, positions: Positions, copy: Copy) -> Fragment:
        """Add the copies, each of which precedes the next."""
        first: list[int] = []
        last: list[list[list[int]]] = []
        before = Fragment([], [])
        for number in range(self.copies if self.part.size else 0):
            if self.most is None:
                inside = Copy((*copy.names, 0), (*copy.order, -number))
            elif number >= self.least:
                inside = Copy((*copy.names, self.least), (*copy.order, number))
            else:
                inside = Copy((*copy.names, number), copy.order)
            fragment = self.part.add(positions, inside)
            before.precede(fragment.first)
            first = first or fragment.first
            last += fragment.last if number >= self.least - 1 else []
            before = fragment
        if self.most is None:
            before.precede(before.first)
        return Fragment(first, last)


class Positions:
    """The positions of an expression. Position 0 is the end of the text."""

    def __init__(self) -> None:
        self._elements: list[tuple[Element, int]] = []  # with the state
        self._starts: list[int] = []  # first positions of the copies
        self._followers: list[list[list[int]]] = []
        self._families: list[int] = []  # equal for the same position in ordered copies
        self._orders: list[tuple[int, ...]] = []
        self._family_of: dict[tuple[Element, tuple[int, ...]], int] = {}
        self._closures: list[set[int]] = []  # positions that a position stands for
        self.add(Element(np.full((1, END + 1), NO_STATE), np.zeros(1, np.bool_)), Copy((), ()))

    def add(self, element: Element, copy: Copy) -> Fragment:
        """Add the positions of a copy of an element."""
        start = len(self._starts)
        family = self._family_of.setdefault((element, copy.names), start)
        last: list[list[int]] = []
        for state, is_last in enumerate(element.accepting):
            self._elements.append((element, state))
            self._starts.append(start)
            self._followers.append(last if is_last else [])
            self._families.append(family + state)
            self._orders.append(copy.order)
        return Fragment([start], [last])

    def determinise(self, expression: Part, max_states: int) -> ByteTable | None:
        """Return the automaton of an expression; None for more than `max_states` states."""
        whole = expression.add(self, Copy((), ()))
        whole.precede([0])
        self._closures = [
            {*([position] if element.has_successors[state] else []), *chain(*followers)}
            for position, ((element, state), followers) in enumerate(
                zip(self._elements, self._followers, strict=True)
            )
        ]
        rows, class_of = self._rows()
        start = self._without_included({*whole.first, *([0] if expression.is_nullable else [])})
        number_of, subsets, successors = {(): NO_STATE, start: 0}, [start], []
        for subset in subsets:  # grows
            if len(subsets) > max_states:
                return None
            columns = list(zip(*[rows[position] for position in subset], strict=True))
            numbers: dict[tuple[int, ...], int] = {}
            for column in set(columns):
                after = self._after(subset, column)
                numbers[column] = number_of.setdefault(after, len(subsets))
                if numbers[column] == len(subsets):
                    subsets.append(after)
            successors.append([numbers[column] for column in columns])
        accepting = np.array([0 in subset for subset in subsets])
        return ByteTable(np.array(successors)[:, class_of], accepting)

    def _rows(self) -> tuple[list[list[int]], npt.NDArray[np.intp]]:
        """Return the successors of each position for classes of letters, and these classes."""
        elements = list(dict.fromkeys(element for element, _ in self._elements))
        tables = np.vstack([element.successors for element in elements])
        letters, class_of = distinct_letters(tables)
        ends = np.cumsum([len(element.successors) for element in elements])[:-1]
        rows = [part.tolist() for part in np.split(tables[:, letters], ends)]
        rows_of = dict(zip(elements, rows, strict=True))
        return [rows_of[element][state] for element, state in self._elements], class_of

    def _after(self, subset: tuple[int, ...], states: tuple[int, ...]) -> tuple[int, ...]:
        """Return the positions after a letter that leads to the given states of the copies."""
        after: set[int] = set()
        for position, state in zip(subset, states, strict=True):
            if state != NO_STATE:
                after |= self._closures[self._starts[position] + state]
        return self._without_included(after)

    def _without_included(self, positions: set[int]) -> tuple[int, ...]:
        """Return the positions whose continuations are not included in those of another."""
        if len({self._families[position] for position in positions}) == len(positions):
            return tuple(sorted(positions))
        orders: dict[int, list[tuple[int, ...]]] = {}
        kept = []
        for position in sorted(positions, key=self._orders.__getitem__):
            order = self._orders[position]
            others = orders.setdefault(self._families[position], [])
            if not any(all(map(operator.le, other, order)) for other in others):
                others.append(order)
                kept.append(position)
        return tuple(sorted(kept))
