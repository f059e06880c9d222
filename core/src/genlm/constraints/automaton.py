"""`Automaton`: regular languages over bytes, and their constraints on populations."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.constraints.byte_automata import (
    NO_STATE,
    ByteTable,
    complement,
    live_states,
    minimise,
    product,
    utf8_table,
)
from genlm.constraints.protocol import Constraint, Integers64, Language
from genlm.constraints.regex import regex_table
from genlm.constraints.states import (
    DEAD,
    FINISHED,
    LIVE,
    StateConstraint,
    check_text,
    first_states,
    member_index,
)
from genlm.constraints.text_tokens import PerVocabulary, TextTokens, text_tokens
from genlm.core.base.arrays import host_array, signed_index
from genlm.core.rows.row_masks import RowMasks
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import Symbols
from genlm.engines.memory import free_memory_bytes

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.lm import AsyncLM

__all__ = ["Automaton"]

States: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


class Automaton(Language):
    r"""A regular language over bytes.

    Languages are combined with `&`, `|` and `~`; the complement of a language contains the
    valid UTF-8 texts that are not in it.

        date = Automaton.regex(r"\d{4}-\d\d-\d\d") & ~Automaton.regex(r".*-00.*")

    The automaton is compiled for the tokens of a vocabulary once, at the first `start` with a
    model: a table of the successors of all states and tokens, and the packed masks of the
    states. Tokens after which no text of the language can be completed are not allowed.

    Args:
        successors: Successors of all states and bytes, -1 for none, shape `(states, 256)`;
            state 0 is the start.
        accepting: Whether a text is complete in each state, shape `(states,)`.

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
        self._table = minimise(table)
        self._compiled = PerVocabulary(
            lambda vocabulary, stop: _TokenTable(self._table, text_tokens.get(vocabulary, stop))
        )

    @classmethod
    def regex(cls, pattern: str) -> Automaton:
        r"""Return the language of the texts that fully match a regular expression.

        Args:
            pattern: Expression in the syntax of Rust's `regex`: Python's `re` without
                look-around and backreferences. Classes such as `\w` and `\d` are those of
                Unicode; `.` is any character except a newline. `^` and `$` are not needed;
                `^` is accepted at the beginning only.

        Raises:
            ValueError: The syntax of the pattern is invalid, its counted repetitions have more
                than 30,000 states, or its automaton has more than 100,000, such as that of
                `[ab]*a[ab]{20}`.
            MissingRequirementError: The compiler, outlines-core, is not installed.
        """
        return cls(*regex_table(pattern))

    def __and__(self, other: Automaton) -> Automaton:
        if not isinstance(other, Automaton):
            return NotImplemented
        return Automaton(*product(self._table, other._table, np.logical_and))

    def __or__(self, other: Automaton) -> Automaton:
        if not isinstance(other, Automaton):
            return NotImplemented
        return Automaton(*product(self._table, other._table, np.logical_or))

    def __invert__(self) -> Automaton:
        return Automaton(*complement(self._table))

    def __contains__(self, text: bytes) -> bool:
        check_text(text)
        state = self._state_after(text)
        return state != NO_STATE and bool(self._table.accepting[state])

    def __reduce__(self) -> Any:
        return type(self), tuple(self._table)

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
        table = self._compiled.get(llm.vocabulary, stop)
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


class _TokenTable:
    """An automaton over the tokens of a vocabulary.

    State `s` of the automaton over bytes is state `LIVE + s`. A stop token leads from a
    complete text to the finished state. If there are no stop tokens, a token that completes a
    text without continuations leads there.

    Attributes:
        successors: Successors of all states and tokens, in the smallest unsigned dtype, shape
            `(LIVE + states, vocab_size + 1)`. The last column, for token -1, has the states
            themselves.
        masks: Allowed tokens of each state, packed bits.
        starts: Initial state of members for each state of the automaton over bytes: the same
            state, the dead state or the finished state.
    """

    def __init__(self, table: ByteTable, tokens: TextTokens) -> None:
        _check_memory(LIVE + len(table.accepting), len(tokens.texts))
        accepting = np.append([False] * LIVE, table.accepting)
        successors = _token_successors(table.successors, tokens.texts)
        is_live = live_states(successors, accepting)
        successors[~is_live[successors]] = DEAD
        states = np.arange(len(successors), dtype=successors.dtype)
        starts = np.where(is_live, states, DEAD)
        if tokens.stop.size:
            successors[:, tokens.stop] = np.where(accepting, FINISHED, DEAD)[:, None]
        else:
            is_over = accepting & (successors == DEAD).all(1)
            successors[is_over[successors]] = starts[is_over] = FINISHED
        self.starts = starts[LIVE:]
        self.masks = tokens.pack(successors != DEAD)
        self._row_masks = RowMasks(self.masks, len(states), successors.shape[1])
        successors[FINISHED] = FINISHED
        self.successors = np.column_stack([successors, states])

    def masks_of(self, states: States) -> RowMasks:
        """Return the masks of members in some states; all draws share copies on devices."""
        masks, size = self._row_masks, self.successors.shape[1] - 1
        return RowMasks(masks, len(states), size, states.astype(np.int64))


def _check_memory(states: int, vocab_size: int) -> None:
    # Two copies of the successors, one of booleans.
    needed = states * vocab_size * (2 * np.min_scalar_type(states).itemsize + 1)
    free = free_memory_bytes()
    if needed > free:
        raise MemoryError(
            f"the table of an automaton of {states:,} states and {vocab_size:,} tokens needs "
            f"about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free. Use a language "
            f"of fewer states, or check the texts with `Python`"
        )


def _token_successors(successors: Integers64, texts: list[bytes]) -> States:
    """Return the successors of states and tokens, by one pass over the trie of the tokens.

    Args:
        successors: The automaton over bytes, `(states, 256)`.
        texts: Bytes of each token; a token without bytes has no successor.

    Returns:
        Shape `(LIVE + states, len(texts))`; `DEAD` for no successor.
    """
    kind = np.min_scalar_type(LIVE + len(successors))
    steps = np.full((LIVE + len(successors), 256), DEAD, kind)
    steps[LIVE:] = np.where(successors == NO_STATE, DEAD, successors + LIVE)
    flat = steps.reshape(-1)
    layout = TrieLayout.build(Symbols.of(texts))
    level, first = layout.level, layout.n_tokens
    node_of = layout.parent[:first]  # the prefix that equals each token
    by_node = np.argsort(node_of, kind="stable")
    nodes = node_of[by_node]
    token_successors = np.full((len(steps), first), DEAD, kind)
    states = np.arange(len(steps), dtype=kind)[:, None]  # at the root
    for depth in range(1, len(level) - 1):
        begin, end = level[depth + 1], level[depth]
        parents = layout.parent[begin:end] - level[depth]
        symbols = layout.symbol[begin - first : end - first]
        states = flat[states[:, parents].astype(np.int64) * 256 + symbols]
        at_depth = slice(*np.searchsorted(nodes, [begin, end]))
        token_successors[:, by_node[at_depth]] = states[:, nodes[at_depth] - begin]
    return token_successors


class _AutomatonConstraint(StateConstraint):
    """Members whose states are rows of a shared table."""

    def __init__(self, table: _TokenTable, states: States) -> None:
        super().__init__(states, table.successors.shape[1] - 1)
        self.table = table
        self._row_masks = RowMasks.deferred(lambda: table.masks_of(states), len(states))

    def masks(self) -> tuple[torch.Tensor, Integers64]:
        """Return the masks of all states, and the state of each member."""
        return self.table.masks, self.states.astype(np.int64)

    def _draw_masks(self) -> tuple[RowMasks, None]:
        return self._row_masks, None

    def _after(self, token_ids: Integers64, *, are_drawn: bool = False) -> _AutomatonConstraint:
        """Look up the next states in the table."""
        del are_drawn
        return _AutomatonConstraint(self.table, self.table.successors[self.states, token_ids])

    def __getitem__(self, ancestors: Any) -> _AutomatonConstraint:
        return _AutomatonConstraint(self.table, self.states[member_index(ancestors)])


def _states(values: npt.ArrayLike, argument: str) -> Integers64:
    """Return a copy of integers or booleans."""
    array = host_array(values, argument)
    if array.dtype.kind not in "biu" and array.size:
        raise TypeError(f"{argument} has values of type {array.dtype}; expected integers")
    return signed_index(array).astype(np.int64)
