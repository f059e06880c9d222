"""`Automaton`: regular languages over bytes, and their constraints on populations."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from genlm.constraints.byte_automata import (
    MAX_STATES,
    NO_STATE,
    ByteTable,
    complement,
    minimise,
    product,
    texts_table,
    utf8_table,
)
from genlm.constraints.languages import Language
from genlm.constraints.protocol import Constraint, Flags, Integers64
from genlm.constraints.regex import regex_table
from genlm.constraints.regex_automaton import (
    END,
    Element,
    Part,
    Positions,
    Repetition,
    Sequence,
)
from genlm.constraints.states import (
    DEAD,
    StateConstraint,
    check_text,
    first_states,
    member_index,
)
from genlm.constraints.text_tokens import text_tokens
from genlm.constraints.token_table import TokenStates, TokenTable, token_tries
from genlm.core.base.arrays import host_array, signed_index
from genlm.core.base.validation import checked_integer
from genlm.core.model.lm import AsyncLM, checked_model
from genlm.core.rows.row_masks import RowMasks
from genlm.core.vocab.per_vocabulary import PerVocabulary

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers


class Automaton(Language):
    r"""A regular language over bytes.

    Languages are combined with `&`, `|` and `~`; the complement of a language contains the
    valid UTF-8 texts that are not in it. `+` is the language of the concatenations of a text of
    one language and a text of the other.

        date = Automaton.regex(r"\d{4}-\d\d-\d\d") & ~Automaton.regex(r".*-00.*")
        line = Automaton.choice(["start: ", "end: "]) + date

    For a vocabulary, the automaton has a table with the packed mask of each state, which is
    computed when a member first has the state. Tokens after which no text of the language can
    be completed are not allowed.

    Args:
        successors: Successors of all states and bytes, -1 for none, shape `(states, 256)`;
            state 0 is the start.
        accepting: Whether a text is complete in each state, shape `(states,)`.

    Attributes:
        successors: Successors in the smallest automaton of the language, as the argument; -1 if
            no text of the language continues with the byte. Read-only.
        accepting: As the argument, for these states. Read-only.

    Raises:
        ValueError: A shape is wrong, or a state is out of range.
        TypeError: `successors` or `accepting` has values that are not integers or booleans.
    """

    def __init__(self, successors: npt.ArrayLike, accepting: npt.ArrayLike) -> None:
        table = ByteTable(
            _states(successors, "successors"), _states(accepting, "accepting").astype(bool)
        )
        states = len(table.accepting) if table.accepting.ndim == 1 else 0
        if not states or table.successors.shape != (states, 256):
            raise ValueError(
                f"an automaton of successors {table.successors.shape} and accepting states "
                f"{table.accepting.shape}; expected (states, 256) and (states,)"
            )
        if table.successors.min() < NO_STATE or table.successors.max() >= states:
            raise ValueError(
                f"a state out of range; expected -1 for none, or 0 to {states - 1}"
            )
        self._set_table(minimise(table))

    def _set_table(self, table: ByteTable) -> None:
        """Set the smallest automaton of the language."""
        self._table = table
        self.successors, self.accepting = table
        for array in table:
            array.setflags(write=False)
        self._compiled = PerVocabulary(
            lambda vocabulary, stop: TokenTable(
                table, text_tokens.get(vocabulary, stop), token_tries.get(vocabulary, stop)
            )
        )

    @classmethod
    def _of_smallest(cls, successors: Integers64, accepting: Flags) -> Automaton:
        """Return the language of an automaton that is the smallest one."""
        automaton = object.__new__(cls)
        automaton._set_table(ByteTable(successors, accepting))
        return automaton

    @classmethod
    def regex(cls, pattern: str) -> Automaton:
        r"""Return the language of the texts that fully match a regular expression.

        Args:
            pattern: Expression in the syntax of Rust's `regex`: Python's `re` without
                look-around and backreferences. Classes such as `\w` and `\d` are those of
                Unicode; `.` is any character except a newline. `^` and `$` are not needed;
                `^` is accepted at the beginning only. Parts without counted repetitions are
                compiled before their size is checked: write `[ab]*a[ab]{20}` instead of 20
                copies of `[ab]`, which take exponential time and memory.

        Raises:
            ValueError: The syntax of the pattern is invalid, its counted repetitions have more
                than 30,000 states, or its automaton has more than 100,000, such as that of
                `[ab]*a[ab]{20}`.
            MissingRequirementError: The compiler, outlines-core, is not installed.
        """
        return cls(*regex_table(pattern))

    @classmethod
    def choice(cls, texts: Iterable[str | bytes]) -> Automaton:
        """Return the language of some texts.

        Unlike a regular expression of alternatives, it is compiled without an additional
        package, and thousands of texts take less than a second.

        Args:
            texts: At least one text, such as the labels of a classification. Strings are
                encoded as UTF-8.

        Raises:
            ValueError: `texts` is empty, or its automaton has more than 100,000 states.
                Texts that begin alike or end alike share states.
            TypeError: A text is neither a string nor bytes.
        """
        if isinstance(texts, (str, bytes)):
            raise TypeError(
                f"texts={texts!r:.80} is one text; pass a list, such as [{texts!r:.80}]"
            )
        return cls._of_smallest(*texts_table(map(_encoded, texts)))

    @overload
    def __and__(self, other: Automaton) -> Automaton: ...
    @overload
    def __and__(self, other: Language) -> Language: ...
    def __and__(self, other: Language) -> Language:
        if not isinstance(other, Automaton):
            return super().__and__(other)
        return Automaton(*product(self._table, other._table, np.logical_and))

    def __or__(self, other: Automaton) -> Automaton:
        if not isinstance(other, Automaton):
            return NotImplemented
        return Automaton(*product(self._table, other._table, np.logical_or))

    def __invert__(self) -> Automaton:
        return Automaton(*complement(self._table))

    def __add__(self, other: Automaton) -> Automaton:
        if not isinstance(other, Automaton):
            return NotImplemented
        return self._of_part(Sequence([Element.of(self._table), Element.of(other._table)]))

    def repeat(self, least: int = 0, most: int | None = None) -> Automaton:
        """Return the language of the concatenations of several texts of the language.

        Args:
            least: Minimum number of texts.
            most: Maximum number of texts; None for any number.

        Raises:
            ValueError: `most` is less than `least`, `least` is negative, or the automaton has
                more than 100,000 states.
            TypeError: `least` or `most` is not an integer.
        """
        least = checked_integer("least", least, 0)
        if most is not None:
            most = checked_integer("most", most, least)
        return self._of_part(Repetition(Element.of(self._table), least, most))

    @classmethod
    def _of_part(cls, part: Part) -> Automaton:
        """Return the language of a part of an expression."""
        is_small = part.size <= MAX_STATES
        table = Positions().determinise(part, MAX_STATES) if is_small else None
        if table is None:
            raise ValueError(f"the automaton has more than {MAX_STATES:,} states")
        return cls(table.successors[:, :END], table.accepting)

    def __contains__(self, text: bytes) -> bool:
        check_text(text)
        state = self._state_after(text)
        return state != NO_STATE and bool(self._table.accepting[state])

    def __reduce__(self) -> Any:
        return self._of_smallest, tuple(self._table)

    def __repr__(self) -> str:
        count = len(self._table.accepting)
        return f"<Automaton of {count} state{'s' * (count != 1)}>"

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`."""
        check_text(text)
        if not self._table.accepting.any():
            raise ValueError("the language of the automaton is empty")
        state = self._state_after(text)
        if state == NO_STATE:
            raise ValueError(f"no text of {self!r} begins with {text!r}")
        table = self._compiled.get(checked_model(llm).vocabulary, stop)
        first = table.starts[state]
        if first == DEAD:
            raise ValueError(
                f"no text of {self!r} that begins with {text!r} can be written with the "
                f"tokens of {llm.vocabulary!r}"
            )
        return _AutomatonConstraint(table, first_states(size, first))

    def _state_after(self, text: bytes) -> int:
        state = 0
        for byte in text:
            state = int(self._table.successors[state, byte])
            if state == NO_STATE:
                break
        return state


@functools.cache
def utf8() -> Automaton:
    """Return the language of valid UTF-8."""
    return Automaton(*utf8_table())


class _AutomatonConstraint(StateConstraint):
    """Members with states of a shared table."""

    def __init__(self, table: TokenTable, states: TokenStates) -> None:
        super().__init__(states, table.vocab_size)
        self.table = table
        self._row_masks = RowMasks.deferred(lambda: table.row_masks(states), len(states))

    def _after(self, token_ids: Integers64, *, are_drawn: bool = False) -> _AutomatonConstraint:
        """Follow the bytes of the tokens in the table."""
        del are_drawn
        return _AutomatonConstraint(self.table, self.table.after(self.states, token_ids))

    def __getitem__(self, ancestors: Any) -> _AutomatonConstraint:
        return _AutomatonConstraint(self.table, self.states[member_index(ancestors)])


def _encoded(text: str | bytes) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"found {text!r:.80} among texts; expected strings or bytes")
    return text.encode() if isinstance(text, str) else text


def _states(values: npt.ArrayLike, argument: str) -> Integers64:
    """Return a copy of integers or booleans."""
    array = host_array(values, argument)
    if array.dtype.kind not in "biu" and array.size:
        raise TypeError(f"{argument} has values of type {array.dtype}; expected integers")
    return signed_index(array).astype(np.int64)
