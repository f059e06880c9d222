"""`TokenTable`: an automaton over the tokens of a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.constraints.byte_automata import NO_STATE, ByteTable, distinct_edges, live_states
from genlm.constraints.protocol import Flags, Integers64
from genlm.constraints.states import DEAD, FINISHED, LIVE
from genlm.constraints.text_tokens import TextTokens, text_tokens
from genlm.core.base.forking import renew_in_forks
from genlm.core.rows.row_masks import RowMasks
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import Symbols
from genlm.core.vocab.per_vocabulary import PerVocabulary
from genlm.engines.memory import free_memory_bytes

TokenStates: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_VALUES_AT_ONCE = 2**23
"""Maximum number of successors that are computed at once."""

MAX_ROW_BYTES = 2**30
"""Maximum memory of the rows of a table, unless a single call needs more."""


class _Level(NamedTuple):
    """The prefixes of tokens that have the same length, in order.

    Attributes:
        parents: Place of each prefix without its last byte among those of the previous level.
        symbols: Last byte of each prefix.
        token_ids: Tokens of this length.
        nodes: Place of the prefix that equals each of these tokens.
    """

    parents: Integers64
    symbols: Integers64
    token_ids: Integers64
    nodes: Integers64


class TokenTrie:
    """The trie of the bytes of a vocabulary's tokens.

    Args:
        texts: Bytes of each token. A token without bytes leads to the dead state.

    Attributes:
        count: Number of tokens.
        single_bytes: Which bytes are tokens, shape `(256,)`.
    """

    def __init__(self, texts: list[bytes]) -> None:
        layout = TrieLayout.build(Symbols.of(texts))
        level, first = layout.level.tolist(), layout.n_tokens
        node_of = layout.parent[:first].astype(np.int64)  # the prefix that equals each token
        by_node = np.argsort(node_of, kind="stable")
        nodes = node_of[by_node]
        self.count = first
        self.single_bytes = np.zeros(256, np.bool_)
        self.single_bytes[[text[0] for text in texts if len(text) == 1]] = True
        self._levels = []
        for depth in range(1, len(level) - 1):
            begin, end = level[depth + 1], level[depth]
            at_depth = slice(*np.searchsorted(nodes, [begin, end]))
            self._levels.append(
                _Level(
                    layout.parent[begin:end].astype(np.int64) - end,
                    layout.symbol[begin - first : end - first].astype(np.int64),
                    by_node[at_depth],
                    nodes[at_depth] - begin,
                )
            )
        self._widest = max([first, *(len(each.parents) for each in self._levels)])

    def successors(self, steps: TokenStates, states: Integers64) -> Iterator[TokenStates]:
        """Yield the successors of some states, a few states at a time.

        Args:
            steps: Successors of all states and bytes, shape `(all states, 256)`.
            states: Shape `(n,)`.

        Returns:
            Arrays of shape `(part, count)`; `DEAD` for no successor.
        """
        flat, part = steps.reshape(-1), max(1, _VALUES_AT_ONCE // self._widest)
        for begin in range(0, len(states), part):
            reached = states[begin : begin + part, None].astype(steps.dtype)  # at the root
            found = np.full((len(reached), self.count), DEAD, steps.dtype)
            for level in self._levels:
                # Most prefixes are dead in most states.
                live = np.flatnonzero((reached != DEAD).any(0)[level.parents])
                states_before = reached[:, level.parents[live]].astype(np.int64)
                reached = np.full((len(reached), len(level.parents)), DEAD, steps.dtype)
                reached[:, live] = flat[states_before * 256 + level.symbols[live]]
                found[:, level.token_ids] = reached[:, level.nodes]
            yield found


token_tries = PerVocabulary(
    lambda vocabulary, stop: TokenTrie(text_tokens.get(vocabulary, stop).texts)
)
"""The trie of a vocabulary, without the tokens that end a text."""


class _Rows:
    """Rows of some states of a table, in the order in which they were added.

    Attributes:
        count: Number of rows.
        place_of: Row of each state of the automaton, -1 for none.
        successors: State after each token; in the last column, the state of the row.
        words: Allowed tokens, packed bits.
        masks: The masks of all rows; all draws share copies on devices.
    """

    masks: RowMasks

    def __init__(self, states: int, vocab_size: int, kind: np.dtype[Any]) -> None:
        self.count = 0
        self.place_of = np.full(states, -1)
        self.successors = np.empty((0, vocab_size + 1), kind)
        self.words = np.empty((0, -(-vocab_size // 32)), np.int32)


class TokenTable:
    r"""The successors of the states of an automaton for the tokens of a vocabulary.

    State `s` of the automaton over bytes is state `LIVE + s`. A stop token leads from a
    complete text to the finished state. If there are no stop tokens, a token that completes a
    text without continuations leads there. Tokens after which no text can be completed lead to
    the dead state.

    The row of a state is computed when it is first needed, because most states of large
    automata never are: `\w{9}` has 2,700. If the rows would exceed `MAX_ROW_BYTES`, earlier
    rows are dropped, and computed again when they are needed. May be used by several threads.

    Args:
        table: The automaton over bytes.
        tokens: The tokens.
        trie: Their trie.

    Attributes:
        starts: Initial state of members for each state of the automaton over bytes: the same
            state, the dead state or the finished state.
        vocab_size: Number of token ids.
    """

    def __init__(self, table: ByteTable, tokens: TextTokens, trie: TokenTrie) -> None:
        count = LIVE + len(table.accepting)
        kind = np.min_scalar_type(count)
        self.vocab_size = trie.count
        self._tokens, self._trie = tokens, trie
        self._accepting = np.append([False] * LIVE, table.accepting)
        self._steps = np.full((count, 256), DEAD, kind)
        successors = table.successors
        self._steps[LIVE:] = np.where(successors == NO_STATE, DEAD, successors + LIVE)
        self._resolved = self._resolve()
        self.starts = self._resolved[LIVE:]
        self._lock = threading.Lock()
        renew_in_forks(self)
        self._row_bytes = (trie.count + 1) * kind.itemsize + trie.count // 8
        self._rows = self._first_rows(np.array([], np.int64))

    def row_masks(self, states: TokenStates) -> RowMasks:
        """Return the masks of members in some states."""
        rows, places = self._rows_of(states)
        return rows.masks.of(places)

    def after(self, states: TokenStates, token_ids: Integers64) -> TokenStates:
        """Return the states after tokens; -1 for no token. Both have shape `(n,)`."""
        rows, places = self._rows_of(states)
        after: TokenStates = rows.successors[places, token_ids]
        return after

    def _rows_of(self, states: TokenStates) -> tuple[_Rows, Integers64]:
        """Return rows that include those of some states, and their places."""
        rows = self._rows
        places: Integers64 = rows.place_of[states]
        if places.size and np.minimum.reduce(places) < 0:
            with self._lock:
                rows, needed = self._rows, np.unique(states).astype(np.int64)
                new = needed[rows.place_of[needed] < 0]
                if (rows.count + len(new)) * self._row_bytes <= MAX_ROW_BYTES:
                    self._add(rows, new)
                else:
                    rows = self._rows = self._first_rows(needed)
            places = rows.place_of[states]
        return rows, places

    def _first_rows(self, states: Integers64) -> _Rows:
        """Return the rows of some states, of the dead state and of the finished state."""
        rows = _Rows(len(self._steps), self.vocab_size, self._steps.dtype)
        self._add(rows, np.union1d(states, [DEAD, FINISHED]))
        return rows

    def _resolve(self) -> TokenStates:
        """Return what a state is as a successor: itself, the dead or the finished state."""
        accepting, states = (
            self._accepting,
            np.arange(len(self._steps), dtype=self._steps.dtype),
        )
        used = (self._steps != DEAD).any(0)
        if self._trie.single_bytes[used].all():  # tokens can complete what bytes can
            edges = distinct_edges([self._steps])
        else:
            edges = distinct_edges(self._trie.successors(self._steps, states))
        is_live = live_states(edges, accepting)
        resolved = np.where(is_live, states, DEAD).astype(states.dtype)
        if not self._tokens.stop.size:
            sources, targets = edges
            is_over = accepting.copy()
            is_over[sources[is_live[targets]]] = False
            resolved[is_over] = FINISHED
        return resolved

    def _add(self, rows: _Rows, states: Integers64) -> None:
        """Compute the rows of states that have none."""
        begin, end = rows.count, rows.count + len(states)
        if end > len(rows.words):
            most = min(len(self._steps), MAX_ROW_BYTES // self._row_bytes)
            self._grow(rows, max(end, min(2 * len(rows.words), most)))
        stop = self._tokens.stop
        for reached in self._trie.successors(self._steps, states):
            part, states = states[: len(reached)], states[len(reached) :]
            places = slice(begin, begin := begin + len(part))
            successors = self._resolved[reached]
            successors[:, stop] = np.where(self._accepting[part], FINISHED, DEAD)[:, None]
            rows.words[places] = _packed(successors != DEAD)
            successors[part == FINISHED] = FINISHED
            rows.successors[places, :-1], rows.successors[places, -1] = successors, part
        rows.masks = RowMasks.of_bits(
            rows.words[:end], self.vocab_size, np.arange(end), is_shared=True
        )
        rows.count = end
        # At last, because other threads read it without the lock.
        rows.place_of[rows.successors[:end, -1]] = np.arange(end)

    def _grow(self, rows: _Rows, capacity: int) -> None:
        """Make room for the rows of states; raise `MemoryError` if less memory is free."""
        needed, free = capacity * self._row_bytes, free_memory_bytes()
        if needed > free:
            raise MemoryError(
                f"the table of an automaton for {capacity:,} states and {self.vocab_size:,} "
                f"tokens needs about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are "
                f"free. Use a language of fewer states, or check the texts with `Python`"
            )
        for name in ("successors", "words"):
            before = getattr(rows, name)
            after = np.empty((capacity, before.shape[1]), before.dtype)
            after[: len(before)] = before
            setattr(rows, name, after)


def _packed(allowed: Flags) -> npt.NDArray[np.int32]:
    """Return booleans of shape `(n, vocab_size)` as packed bits."""
    count, size = allowed.shape
    padded = np.zeros((count, -(-size // 32) * 32), np.bool_)
    padded[:, :size] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)
