"""`TokenTable`: an automaton over the tokens of a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.constraints.byte_automata import (
    NO_STATE,
    ByteTable,
    distinct_edges,
    distinct_letters,
    divide,
    is_exact,
    live_states,
)
from genlm.constraints.protocol import Integers64
from genlm.constraints.states import DEAD, FINISHED, LIVE
from genlm.constraints.text_tokens import TextTokens, text_tokens
from genlm.core.base.arrays import ranges
from genlm.core.base.forking import renew_in_forks
from genlm.core.rows.row_masks import RowMasks
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import Symbols
from genlm.core.vocab.per_vocabulary import PerVocabulary
from genlm.engines.memory import free_memory_bytes

TokenStates: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

Edges: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]

_VALUES_AT_ONCE = 2**23
"""Maximum number of tokens of all states whose masks are computed at once."""

MAX_ROW_BYTES = 2**30
"""Maximum memory of the masks of a table, unless a single call needs more."""

_NO_LETTER, _STOP, _NO_TEXT, _LETTERS = 256, 257, 258, 259
"""Letters besides the bytes: after the end of a token, a token that ends a text, and a token
without bytes. The last is the number of letters."""


class TokenTrie:
    """The trie of the bytes of a vocabulary's tokens.

    Args:
        tokens: The tokens. A token without bytes leads to the dead state.

    Attributes:
        count: Number of tokens.
        longest: Number of bytes of the longest token.
        single_bytes: Which bytes are tokens, shape `(256,)`.
        repeated: Tokens with the bytes of an earlier token, and these earlier tokens.
    """

    def __init__(self, tokens: TextTokens) -> None:
        texts = tokens.texts
        layout = TrieLayout.build(Symbols.of(texts))
        self.count = first = layout.n_tokens
        self.single_bytes = np.zeros(256, np.bool_)
        self.single_bytes[[text[0] for text in texts if len(text) == 1]] = True
        # The last byte of each prefix, its children, and the token that equals it, or `count`.
        self._symbols = layout.symbol.astype(np.int32)
        self._children = layout.child_start.astype(np.int64) - first
        self._child_counts = np.diff(self._children)
        prefix_of = layout.parent[:first] - first
        self._token_of = np.full(layout.n_prefixes, first)
        self._token_of[prefix_of[::-1]] = np.arange(first)[::-1]
        equal = self._token_of[prefix_of]
        [repeated] = (equal != np.arange(first)).nonzero()
        self.repeated = repeated, equal[repeated]
        # The letters of each token and `_NO_LETTER`; the last token stands for -1.
        self._lengths = np.array([*(len(text) or 1 for text in texts), 0])
        self.longest = int(self._lengths.max())
        self._begins = (self._lengths + 1).cumsum() - self._lengths - 1
        self._letters = np.full(self._begins[-1] + 1, _NO_LETTER, np.int16)
        self._letters[ranges(self._begins, self._lengths)] = np.frombuffer(
            b"".join(text or b"?" for text in texts), np.uint8
        )
        [empty] = np.array([not text for text in texts]).nonzero()
        self._letters[self._begins[empty]] = np.where(tokens.is_stop[empty], _STOP, _NO_TEXT)

    def letters(self, token_ids: Integers64) -> npt.NDArray[np.int16]:
        """Return the letters of tokens, -1 for no token, shape `(longest, n)`."""
        lengths = self._lengths[token_ids]
        places = np.arange(np.maximum.reduce(lengths, initial=0))[:, None]
        letters: npt.NDArray[np.int16] = self._letters[
            self._begins[token_ids] + np.minimum(places, lengths)
        ]
        return letters

    def walk(
        self, steps: TokenStates, states: Integers64
    ) -> Iterator[tuple[Integers64, TokenStates]]:
        """Yield the prefixes of tokens that some states allow, the shortest first.

        Args:
            steps: Successors of all states and letters, `DEAD` (0) for no successor.
            states: Shape `(n,)`.

        Returns:
            For prefixes of tokens of one length, the token that equals each, or `count` if none
            does, shape `(k,)`, and the state after it from each state, shape `(k, n)`.
        """
        flat, width = steps.reshape(-1), steps.shape[1]
        kind = np.min_scalar_type(-flat.size)
        nodes = np.array([len(self._symbols) - 1])  # the root
        reached = states[None].astype(steps.dtype)
        while nodes.size:
            last = np.append(np.flatnonzero(nodes[1:] - nodes[:-1] != 1), len(nodes) - 1)
            first = np.append(0, last[:-1] + 1)  # of runs of adjacent nodes
            begins, ends = self._children[nodes[first]], self._children[nodes[last] + 1]
            children = ranges(begins, ends - begins)
            before = np.multiply(reached, width, dtype=kind)
            before = before.repeat(self._child_counts[nodes], axis=0)
            before += self._symbols[children][:, None]
            nodes, reached = children, flat.take(before)
            live = np.flatnonzero(reached.any(1))
            if len(live) < len(nodes):  # most prefixes are dead in most states
                nodes, reached = nodes[live], reached[live]
            yield self._token_of[nodes], reached


token_tries = PerVocabulary(
    lambda vocabulary, stop: TokenTrie(text_tokens.get(vocabulary, stop))
)
"""The trie of a vocabulary, without the tokens that end a text."""


class _Rows:
    """Masks of some states of a table, in the order in which they were added.

    Attributes:
        count: Number of masks.
        place_of: Mask of each state of the automaton, -1 for none.
        words: Allowed tokens, packed bits.
        masks: The masks; all draws share copies on devices.
    """

    masks: RowMasks

    def __init__(self, states: int, vocab_size: int) -> None:
        self.count = 0
        self.place_of = np.full(states, -1)
        self.words = np.empty((0, -(-vocab_size // 32)), np.int32)


class TokenTable:
    r"""The masks and the successors of the states of an automaton, for tokens of a vocabulary.

    State `s` of the automaton over bytes is state `LIVE + s`. A stop token leads from a
    complete text to the finished state. If there are no stop tokens, a token that completes a
    text without continuations leads there. Tokens after which no text can be completed lead to
    the dead state.

    The mask of a state is computed when it is first needed, because most states of large
    automata never are: `\w{9}` has 2,700. States whose masks are equal share one, such as those
    in the middle of a long repetition. If the masks would exceed `MAX_ROW_BYTES`, earlier
    ones are dropped, and computed again when they are needed. May be used by several threads.

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
        self._steps = np.full((count, _LETTERS), DEAD, kind)
        successors = table.successors
        self._steps[LIVE:, :256] = np.where(successors == NO_STATE, DEAD, successors + LIVE)
        self._steps[:, _NO_LETTER] = np.arange(count)
        self._steps[self._accepting, _STOP] = FINISHED
        self._resolved = self._resolve()
        self._steps[FINISHED] = FINISHED
        self.starts = self._resolved[LIVE:]
        self._alike = self._find_alike()
        self._lock = threading.Lock()
        renew_in_forks(self)
        self._row_bytes = -(-trie.count // 32) * 4
        self._rows = self._first_rows(np.array([], np.int64))

    def row_masks(self, states: TokenStates) -> RowMasks:
        """Return the masks of members in some states."""
        rows, states = self._rows, self._alike[states]
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
        return rows.masks.of(places)

    def after(self, states: TokenStates, token_ids: Integers64) -> TokenStates:
        """Return the states after tokens; -1 for no token. Both have shape `(n,)`."""
        for letters in self._trie.letters(token_ids):
            states = self._steps[states, letters]
        after: TokenStates = self._resolved[states]
        return after

    def _first_rows(self, states: Integers64) -> _Rows:
        """Return the masks of some states, of the dead state and of the finished state."""
        rows = _Rows(len(self._steps), self.vocab_size)
        self._add(rows, np.union1d(states, [DEAD, FINISHED]))
        return rows

    def _resolve(self) -> TokenStates:
        """Return what a state is as a successor: itself, the dead or the finished state."""
        accepting, steps = self._accepting, self._steps[:, :256]
        is_used = (steps != DEAD).any(0)
        are_tokens = self._trie.single_bytes
        sources, targets = edges = distinct_edges([steps[:, is_used & are_tokens]])
        is_live = live_states(edges, accepting)
        if not are_tokens[is_used].all():
            # Longer tokens may lead on from states where the tokens of one byte do not.
            leads_on = np.zeros(len(accepting), np.bool_)
            leads_on[sources[is_live[targets]]] = True
            by_bytes = live_states(distinct_edges([steps[:, is_used]]), accepting)
            uncertain = np.flatnonzero(by_bytes[steps].any(1) & ~leads_on)
            sources, targets = np.concatenate([edges, self._token_edges(uncertain)], axis=1)
            is_live = live_states((sources, targets), accepting)
        resolved = np.where(is_live, np.arange(len(accepting)), DEAD).astype(self._steps.dtype)
        if not self._tokens.stop.size:
            is_over = accepting.copy()
            is_over[sources[is_live[targets]]] = False
            resolved[is_over] = FINISHED
        resolved[FINISHED] = FINISHED
        return resolved

    def _find_alike(self) -> TokenStates:
        """Return a state with the same mask for each state.

        Two states allow the same tokens if no text of up to the length of the longest token can
        be completed after one of them and not after the other.
        """
        states: TokenStates = np.arange(len(self._steps)).astype(self._steps.dtype)
        classes: Integers64 = (self._resolved != DEAD).astype(np.int64)
        classes[FINISHED] = 2
        letters, _ = distinct_letters(self._steps[:, :256])
        columns = self._steps[:, letters].T.astype(np.int64)
        count = len(np.unique(classes))
        for _ in range(self._trie.longest):
            first, divided = divide(columns, classes)
            if not is_exact(columns, classes, first[divided]) or len(first) == len(states):
                return states
            if len(first) == count:
                break
            classes, count = divided, len(first)
        classes = 2 * classes + self._accepting  # the stop tokens are allowed there
        _, first, alike = np.unique(classes, return_index=True, return_inverse=True)
        return states[first[alike]]

    def _parts(self, states: Integers64) -> Iterator[Integers64]:
        """Divide states into parts that are computed at once."""
        part = max(1, _VALUES_AT_ONCE // self.vocab_size)
        return (states[begin : begin + part] for begin in range(0, len(states), part))

    def _token_edges(self, states: Integers64) -> Edges:
        """Return the distinct pairs of a state and a state after a token."""
        edges = [np.empty((2, 0), np.int32)]
        for part in self._parts(states):
            is_reached = np.zeros((len(part), len(self._steps)), np.bool_)
            for token_ids, after in self._trie.walk(self._steps, part):
                is_reached[np.arange(len(part)), after[token_ids < self.vocab_size]] = True
            sources, targets = is_reached.nonzero()
            edges.append(np.array([part[sources], targets], np.int32))
        sources, targets = np.concatenate(edges, axis=1)
        return sources, targets

    def _add(self, rows: _Rows, states: Integers64) -> None:
        """Compute the masks of states that have none."""
        begin, end = rows.count, rows.count + len(states)
        if end > len(rows.words):
            most = min(len(self._steps), MAX_ROW_BYTES // self._row_bytes)
            self._grow(rows, max(end, min(2 * len(rows.words), most)))
        can_end, size = self._resolved != DEAD, self.vocab_size
        for part in self._parts(states):
            allowed = np.zeros((len(part), rows.words.shape[1] * 32 + 32), np.bool_)
            starts = np.where(part < LIVE, DEAD, part)
            for token_ids, after in self._trie.walk(self._steps, starts):
                allowed.T[token_ids] = can_end[after]
            allowed[:, size:] = False
            repeated, equal = self._trie.repeated
            allowed.T[repeated] = allowed.T[equal]
            allowed.T[self._tokens.stop] = self._accepting[part]
            bits = np.packbits(allowed[:, :-32], axis=1, bitorder="little")
            rows.words[begin : begin + len(part)] = bits.view(np.int32)
            begin += len(part)
        rows.masks = RowMasks.of_bits(
            rows.words[:end], self.vocab_size, np.arange(end), is_shared=True
        )
        rows.count = end
        # At last, because other threads read it without the lock.
        rows.place_of[states] = np.arange(end - len(states), end)

    def _grow(self, rows: _Rows, capacity: int) -> None:
        """Make room for the masks of states; raise `MemoryError` if less memory is free."""
        needed, free = capacity * self._row_bytes, free_memory_bytes()
        if needed > free:
            raise MemoryError(
                f"the table of an automaton for {capacity:,} states and {self.vocab_size:,} "
                f"tokens needs about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are "
                f"free. Use a language of fewer states, or check the texts with `Python`"
            )
        words = np.empty((capacity, rows.words.shape[1]), np.int32)
        words[: len(rows.words)] = rows.words
        rows.words = words
