"""Regular expressions as deterministic automata over bytes, for `Automaton.regex`.

outlines-core checks the syntax and compiles the parts of an expression without counted
repetitions, which are called elements here. `_Parser` finds them; `regex_automaton.py` compiles
the rest.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import NamedTuple

import numpy as np

from genlm.constraints.byte_automata import (
    MAX_STATES,
    NO_STATE,
    ByteTable,
    distinct_edges,
    live_states,
)
from genlm.constraints.regex_automaton import (
    END,
    Choice,
    Element,
    Part,
    Positions,
    Repetition,
    Sequence,
    compile_index,
)

_MAX_SIZE = 30_000
"""Maximum size of a regular expression: the number of states of all copies of its elements."""

_IGNORED = re.compile(r"(?:[^\S\x1c-\x1f]|#[^\n]*)*")  # in verbose mode
_GROUP = re.compile(r"\((?:\?P?<[^>]*>|\?(?P<on>[a-zA-Z]*)-?(?P<off>[a-zA-Z]*)(?P<end>[:)]))?")
_COUNTED = re.compile(r"\{\s*(?P<least>\d+)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}")
_BEGINNING = Sequence([])
"""The anchor `^` at the beginning of a text."""
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
            compile_index(f"\\x00(?:|{pattern}(?x)\n)")
    except ValueError as error:
        raise ValueError(
            f"cannot compile the regular expression {shown!r}: {error}. The syntax is that of "
            f"Rust's regex. Lookaround and backreferences are not supported"
        ) from error
    except RecursionError as error:
        raise ValueError(
            f"the groups of the regular expression {shown!r} are nested too deeply"
        ) from error
    if expression.size > _MAX_SIZE:
        raise ValueError(
            f"the regular expression {shown!r} has {expression.size:,} states; the maximum is "
            f"{_MAX_SIZE:,}. Use *, + or fewer repetitions, and classes of fewer characters, "
            f"such as [a-z] in place of \\w"
        )
    table = Positions().determinise(expression, MAX_STATES)
    if table is None:
        raise ValueError(
            f"the automaton of the regular expression {shown!r} has more than {MAX_STATES:,} "
            f"states. Use fewer repetitions after parts that can end at several places"
        )
    return _accept_ends(table)


def _accept_ends(table: ByteTable) -> ByteTable:
    """Return the automaton of the texts that are accepted with any number of `$` after them."""
    states = len(table.accepting)
    after = np.append(table.successors[:, END], NO_STATE)
    after[after == NO_STATE] = states
    accepting = live_states(
        distinct_edges([after[:, None]]), np.append(table.accepting, [False])
    )
    return ByteTable(table.successors[:, :END], accepting[:states])


class _Plain(NamedTuple):
    """A part of a pattern without counted repetitions, and the flags at its beginning."""

    begin: int
    end: int
    flags: dict[str, bool]


class _Parser:
    """Finds the elements and the counted repetitions of a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place = pattern, 0
        self._anchor = -1  # place of the last anchor of the beginning

    def expression(self) -> Part:
        """Read the pattern.

        Raises:
            ValueError: The pattern is not supported. Invalid patterns may raise no error.
        """
        part = self._choice({}, is_first=True)
        if self._place < len(self._pattern):
            raise ValueError("a closing parenthesis has no opening parenthesis")
        return self._part(part)

    def _next(self, flags: dict[str, bool]) -> str:
        """Return the next character, after white space and comments in verbose mode."""
        if flags.get("x"):
            ignored = _IGNORED.match(self._pattern, self._place)
            self._place = ignored.end() if ignored else self._place
        return self._pattern[self._place : self._place + 1]

    def _choice(self, flags: dict[str, bool], *, is_first: bool) -> _Plain | Part:
        """Read alternatives up to a closing parenthesis or the end.

        Args:
            flags: The flags at their beginning.
            is_first: Whether nothing of the pattern precedes them in a text.
        """
        begin, flags_before = self._place, flags
        last = begin  # place of the last item
        choices: list[list[_Plain | Part]] = [[]]
        while (character := self._next(flags)) not in ("", ")"):
            if character == "|":
                self._place += 1
                choices.append([])
                continue
            if character in "*+?" or _COUNTED.match(self._pattern, self._place):
                if not choices[-1]:
                    raise ValueError(f"{character} has no expression to repeat")
                if self._anchor >= last:
                    raise ValueError("it repeats an anchor of the beginning; remove it")
                choices[-1].append(self._repetition(choices[-1].pop(), flags))
                continue
            last = self._place
            precedes = is_first and all(item is _BEGINNING for item in choices[-1])
            if group := _GROUP.match(self._pattern, self._place):
                on, off = group["on"] or "", group["off"] or ""
                inside = {**flags, **dict.fromkeys(on, True), **dict.fromkeys(off, False)}
                if group["end"] == ")":
                    flags, self._place = inside, group.end()
                else:
                    item = self._group(group.end(), inside, flags, is_first=precedes)
                    choices[-1].append(item)
            else:
                choices[-1].append(self._character(flags, is_first=precedes))
        if all(isinstance(item, _Plain) for item in chain(*choices)):
            return _Plain(begin, self._place, flags_before)
        return Choice([self._sequence(items) for items in choices])

    def _sequence(self, items: list[_Plain | Part]) -> Part:
        """Return a sequence, in which adjacent parts without counted repetitions are one."""
        parts: list[_Plain | Part] = []
        for item in items:
            before = parts[-1] if parts else None
            if isinstance(item, _Plain) and isinstance(before, _Plain):
                parts[-1] = before._replace(end=item.end)
            else:
                parts.append(item)
        return Sequence([self._part(part) for part in parts])

    def _part(self, item: _Plain | Part) -> Part:
        if isinstance(item, Part):
            return item
        on, off = (
            "".join(flag for flag, is_on in item.flags.items() if is_on is value)
            for value in (True, False)
        )
        text = self._pattern[item.begin : item.end]
        # A comment of the text ends at the newline, which (?x) ignores.
        return Element.compiled(f"(?{on}{'-' if off else ''}{off}:{text}(?x)\n)")

    def _group(
        self, begin: int, inside: dict[str, bool], flags: dict[str, bool], *, is_first: bool
    ) -> _Plain | Part:
        """Read a group, whose content begins at `begin`; `is_first` as for `_choice`."""
        outside, self._place = self._place, begin
        item = self._choice(inside, is_first=is_first)
        if self._place == len(self._pattern):
            raise ValueError("a group is not closed")
        self._place += 1
        return _Plain(outside, self._place, flags) if isinstance(item, _Plain) else item

    def _repetition(self, item: _Plain | Part, flags: dict[str, bool]) -> _Plain | Part:
        """Read an operator of repetition, and the mark of a lazy one."""
        operation, counted = self._next(flags), _COUNTED.match(self._pattern, self._place)
        self._place = counted.end() if counted else self._place + 1
        mark = self._next(flags) if counted else self._pattern[self._place : self._place + 1]
        self._place += mark == "?"
        if counted:
            least = int(counted["least"])
            most = int(counted["most"]) if counted["most"] else None
            return Repetition(self._part(item), least, most if counted["comma"] else least)
        if isinstance(item, _Plain):
            return item._replace(end=self._place)
        return Repetition(item, operation == "+", 1 if operation == "?" else None)

    def _character(self, flags: dict[str, bool], *, is_first: bool) -> _Plain | Part:
        """Read a character, an escape, a class or an anchor; `is_first` as for `_choice`.

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
            if not is_first:
                raise ValueError(f"it has {text} after other parts; remove it")
            self._anchor = begin
            return _BEGINNING
        if text == r"\z" or (text == "$" and not flags.get("m")):
            return Element.end()
        if text == "$" or text[:2] in (r"\b", r"\B", r"\<", r"\>"):
            raise ValueError(f"it has {text}, which depends on the character that follows")
        return _Plain(begin, self._place, flags)
