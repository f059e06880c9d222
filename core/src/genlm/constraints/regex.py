r"""Regular expressions as deterministic automata over bytes, for `Automaton.regex`.

outlines-core checks the syntax and compiles the parts of an expression without counted
repetitions, which are called elements here. `_Parser` finds them, and `_Positions` compiles the
rest.

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
import re
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
    live_states,
    minimise,
)
from genlm.core.base.errors import import_required

__all__ = ["regex_table"]

_MAX_SIZE = 30_000
"""Maximum size of a regular expression: the number of states of all copies of its elements."""
_MAX_STATES = 100_000
"""Maximum number of states of a deterministic automaton before it is minimised."""
_END = 256
"""Column of the anchor `$`, a letter that may follow a text any number of times."""

_IGNORED = re.compile(r"(?:[^\S\x1c-\x1f]|#[^\n]*)*")  # in verbose mode
_GROUP = re.compile(r"\((?:\?P?<[^>]*>|\?(?P<on>[a-zA-Z]*)-?(?P<off>[a-zA-Z]*)(?P<end>[:)]))?")
_COUNTED = re.compile(r"\{\s*(?P<least>\d+)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}")
_CHARACTER = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x..|u.{4}|U.{8}|[pP].|.)|.", re.DOTALL)


def regex_table(pattern: str) -> ByteTable:
    """Return an automaton of the texts that fully match a regular expression.

    Raises:
        MissingRequirementError: outlines-core is not installed.
        ValueError: The syntax of the pattern is invalid or not supported, or the pattern or its
            automaton has too many states.
        TypeError: `pattern` is not a string.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a regular expression is a string; found {pattern!r}")
    shown = pattern if len(pattern) <= 80 else f"{pattern[:80]}..."
    try:
        expression = _Parser(pattern).expression()
        if expression.size <= _MAX_SIZE:
            # Matches one byte, so only the syntax is checked.
            _index(f"\\x00(?:|{pattern}(?x)\n)")
    except ValueError as error:
        raise ValueError(
            f"cannot compile the regular expression {shown!r}: {error}. The syntax is that of "
            f"Rust's regex. Lookaround and backreferences are not supported"
        ) from error
    if expression.size > _MAX_SIZE:
        raise ValueError(
            f"the regular expression {shown!r} has {expression.size:,} states; the maximum is "
            f"{_MAX_SIZE:,}. Use *, + or fewer repetitions, and classes of fewer characters, "
            f"such as [a-z] in place of \\w"
        )
    table = _Positions().determinise(expression)
    if table is None:
        raise ValueError(
            f"the automaton of the regular expression {shown!r} has more than {_MAX_STATES:,} "
            f"states. Use fewer repetitions after parts that can end at several places"
        )
    return _accept_ends(table)


def _accept_ends(table: ByteTable) -> ByteTable:
    """Return the automaton of the texts that are accepted with any number of `$` after them."""
    states = len(table.accepting)
    after = np.append(table.successors[:, _END], NO_STATE)
    after[after == NO_STATE] = states
    accepting = live_states(after[:, None], np.append(table.accepting, [False]))
    return ByteTable(table.successors[:, :_END], accepting[:states])


def _index(pattern: str) -> Any:
    """Compile an expression with outlines-core.

    regex-automata compiles it. The vocabulary consists of the 256 bytes, so that the index is
    the automaton.

    Raises:
        ValueError: The expression is invalid or not supported.
    """
    outlines = import_required(
        "outlines_core", "regular expressions", "'genlm-core[constraints]'"
    )
    letters = outlines.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        return outlines.Index(pattern, letters)
    except Exception as error:
        raise ValueError(str(error)) from error


class _Copy(NamedTuple):
    """A copy of a part for each counted repetition that contains it.

    Attributes:
        names: Numbers of the copies; equal for copies that `order` compares.
        order: Ranks of the copies, of which the smallest has the most continuations.
    """

    names: tuple[int, ...]
    order: tuple[int, ...]


class _Fragment(NamedTuple):
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


class _Part(ABC):
    """A part of an expression.

    Attributes:
        size: Number of states, of all copies of its elements, that have successors.
        is_nullable: Whether the part matches the empty text.
    """

    size: int
    is_nullable: bool

    @abstractmethod
    def add(self, positions: _Positions, copy: _Copy) -> _Fragment:
        """Add the positions of a copy."""


class _Element(_Part):
    """A deterministic automaton, with a column for `$`."""

    def __init__(self, successors: States, accepting: Flags) -> None:
        self.successors = successors
        self.has_successors = (successors != NO_STATE).any(1).tolist()
        self.accepting = accepting.tolist()
        self.size = sum(self.has_successors)
        self.is_nullable = self.accepting[0]

    @classmethod
    def end(cls) -> _Element:
        """Return the anchor `$`."""
        successors = np.full((2, _END + 1), NO_STATE)
        successors[0, _END] = 1
        return cls(successors, np.array([False, True]))

    @classmethod
    def compiled(cls, expression: str) -> _Element:
        """Compile an expression.

        Raises:
            ValueError: The expression is invalid or not supported.
        """
        # \z makes the whole text match: else "a|ab" would end at its first alternative. Three
        # bytes precede each text: after the first, the expression matches already, so that
        # regex-automata does not also follow matches that begin later; expressions that match
        # the empty text need the byte before it, and the second separates both.
        index = _index(rf"\x00(?:\x00(?:\x00{expression})?\z)?")
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
        successors, is_accepting = minimise(ByteTable(successors, is_accepting))
        return cls(np.pad(successors, ((0, 0), (0, 1)), constant_values=NO_STATE), is_accepting)

    def add(self, positions: _Positions, copy: _Copy) -> _Fragment:
        return positions.add(self, copy)


class _Sequence(_Part):
    """Parts one after the other."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)
        self.is_nullable = all(part.is_nullable for part in parts)

    def add(self, positions: _Positions, copy: _Copy) -> _Fragment:
        first: list[int] = []
        last: list[list[list[int]]] = []
        is_nullable = True
        for part in self.parts:
            fragment = part.add(positions, copy)
            _Fragment(first, last).precede(fragment.first)
            first = first + fragment.first if is_nullable else first
            last = last + fragment.last if part.is_nullable else fragment.last
            is_nullable = is_nullable and part.is_nullable
        return _Fragment(first, last)


class _Choice(_Part):
    """Alternatives."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)
        self.is_nullable = any(part.is_nullable for part in parts)

    def add(self, positions: _Positions, copy: _Copy) -> _Fragment:
        firsts, lasts = zip(*[part.add(positions, copy) for part in self.parts], strict=True)
        return _Fragment([*chain(*firsts)], [*chain(*lasts)])


class _Repetition(_Part):
    """A part that is repeated `least` to `most` times; `most` is None for no maximum."""

    def __init__(self, part: _Part, least: int, most: int | None) -> None:
        self.part, self.most = part, most
        self.least = 0 if part.is_nullable else least
        self.copies = max(self.least, 1) if most is None else most
        self.size = self.copies * part.size
        self.is_nullable = self.least == 0

    def add(self, positions: _Positions, copy: _Copy) -> _Fragment:
        first: list[int] = []
        last: list[list[list[int]]] = []
        before = _Fragment([], [])
        for number in range(self.copies if self.part.size else 0):
            if self.most is None:
                inside = _Copy((*copy.names, 0), (*copy.order, -number))
            elif number >= self.least:
                inside = _Copy((*copy.names, self.least), (*copy.order, number))
            else:
                inside = _Copy((*copy.names, number), copy.order)
            fragment = self.part.add(positions, inside)
            before.precede(fragment.first)
            first = first or fragment.first
            last += fragment.last if number >= self.least - 1 else []
            before = fragment
        if self.most is None:
            before.precede(before.first)
        return _Fragment(first, last)


class _Positions:
    """The positions of an expression. Position 0 is the end of the text."""

    def __init__(self) -> None:
        self._elements: list[tuple[_Element, int]] = []  # with the state
        self._starts: list[int] = []  # first positions of the copies
        self._followers: list[list[list[int]]] = []
        self._families: list[int] = []  # equal for the same position in ordered copies
        self._orders: list[tuple[int, ...]] = []
        self._family_of: dict[tuple[_Element, tuple[int, ...]], int] = {}
        self._closures: list[set[int]] = []  # positions that a position stands for
        self.add(
            _Element(np.full((1, _END + 1), NO_STATE), np.zeros(1, np.bool_)), _Copy((), ())
        )

    def add(self, element: _Element, copy: _Copy) -> _Fragment:
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
        return _Fragment([start], [last])

    def determinise(self, expression: _Part) -> ByteTable | None:
        """Return the automaton of an expression; None for more than `_MAX_STATES` states."""
        whole = expression.add(self, _Copy((), ()))
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
            if len(subsets) > _MAX_STATES:
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
        columns, class_of = np.unique(tables, axis=1, return_inverse=True)
        ends = np.cumsum([len(element.successors) for element in elements])[:-1]
        rows = [part.tolist() for part in np.split(columns, ends)]
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


class _Plain(NamedTuple):
    """A part of a pattern without counted repetitions, and the flags at its beginning."""

    begin: int
    end: int
    flags: dict[str, bool]


class _Parser:
    """Finds the elements and the counted repetitions of a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place = pattern, 0

    def expression(self) -> _Part:
        """Read the pattern.

        Raises:
            ValueError: The pattern is not supported. Invalid patterns may raise no error.
        """
        part = self._choice({})
        if self._place < len(self._pattern):
            raise ValueError("a group is closed that was not opened")
        return self._part(part)

    def _next(self, flags: dict[str, bool]) -> str:
        """Return the next character, after white space and comments in verbose mode."""
        if flags.get("x"):
            ignored = _IGNORED.match(self._pattern, self._place)
            self._place = ignored.end() if ignored else self._place
        return self._pattern[self._place : self._place + 1]

    def _choice(self, flags: dict[str, bool]) -> _Plain | _Part:
        """Read alternatives up to a closing parenthesis or the end."""
        begin, flags_before = self._place, flags
        choices: list[list[_Plain | _Part]] = [[]]
        while (character := self._next(flags)) not in ("", ")"):
            if character == "|":
                self._place += 1
                choices.append([])
            elif character in "*+?" or _COUNTED.match(self._pattern, self._place):
                if not choices[-1]:
                    raise ValueError(f"{character} repeats nothing")
                choices[-1].append(self._repetition(choices[-1].pop(), flags))
            elif group := _GROUP.match(self._pattern, self._place):
                on, off = group["on"] or "", group["off"] or ""
                inside = {**flags, **dict.fromkeys(on, True), **dict.fromkeys(off, False)}
                if group["end"] == ")":
                    flags, self._place = inside, group.end()
                else:
                    choices[-1].append(self._group(group.end(), inside, flags))
            else:
                choices[-1].append(self._character(flags))
        if all(isinstance(item, _Plain) for item in chain(*choices)):
            return _Plain(begin, self._place, flags_before)
        return _Choice([self._sequence(items) for items in choices])

    def _sequence(self, items: list[_Plain | _Part]) -> _Part:
        """Return a sequence, in which adjacent parts without counted repetitions are one."""
        parts: list[_Plain | _Part] = []
        for item in items:
            before = parts[-1] if parts else None
            if isinstance(item, _Plain) and isinstance(before, _Plain):
                parts[-1] = before._replace(end=item.end)
            else:
                parts.append(item)
        return _Sequence([self._part(part) for part in parts])

    def _part(self, item: _Plain | _Part) -> _Part:
        if isinstance(item, _Part):
            return item
        on, off = (
            "".join(flag for flag, is_on in item.flags.items() if is_on is value)
            for value in (True, False)
        )
        text = self._pattern[item.begin : item.end]
        # A comment of the text ends at the newline, which (?x) ignores.
        return _Element.compiled(f"(?{on}{'-' if off else ''}{off}:{text}(?x)\n)")

    def _group(
        self, begin: int, inside: dict[str, bool], flags: dict[str, bool]
    ) -> _Plain | _Part:
        """Read a group, whose content begins at `begin`."""
        outside, self._place = self._place, begin
        item = self._choice(inside)
        if self._place == len(self._pattern):
            raise ValueError("a group is not closed")
        self._place += 1
        return _Plain(outside, self._place, flags) if isinstance(item, _Plain) else item

    def _repetition(self, item: _Plain | _Part, flags: dict[str, bool]) -> _Plain | _Part:
        """Read an operator of repetition, and the mark of a lazy one."""
        operation, counted = self._next(flags), _COUNTED.match(self._pattern, self._place)
        self._place = counted.end() if counted else self._place + 1
        mark = self._next(flags) if counted else self._pattern[self._place : self._place + 1]
        self._place += mark == "?"
        if counted:
            least = int(counted["least"])
            most = int(counted["most"]) if counted["most"] else None
            return _Repetition(self._part(item), least, most if counted["comma"] else least)
        if isinstance(item, _Plain):
            return item._replace(end=self._place)
        return _Repetition(item, operation == "+", 1 if operation == "?" else None)

    def _character(self, flags: dict[str, bool]) -> _Plain | _Part:
        """Read a character, an escape, a class or an anchor.

        Raises:
            ValueError: An anchor is not supported, or a class is not closed.
        """
        begin, depth = self._place, 0
        while self._place == begin or depth:
            character = _CHARACTER.match(self._pattern, self._place)
            if character is None:
                raise ValueError("a class is not closed")
            self._place = character.end()
            if character[0] == "[":
                depth += 1
                for literal in "^]":  # `]` is a character at the beginning of a class
                    if self._next(flags) == literal:
                        self._place += 1
            elif character[0] == "]" and depth:
                depth -= 1
            if depth:
                self._next(flags)
        text = self._pattern[begin : self._place]
        if text in ("^", r"\A"):
            raise ValueError(
                r"it has an anchor of the beginning, ^ or \A; remove it, because the whole "
                r"text is matched"
            )
        if text == r"\z" or (text == "$" and not flags.get("m")):
            return _Element.end()
        if text == "$" or text[:2] in (r"\b", r"\B", r"\<", r"\>"):
            raise ValueError(f"it has {text}, which depends on the character that follows")
        return _Plain(begin, self._place, flags)
