"""`TokenTable`: an automaton over the tokens of a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.constraints.byte_automata import NO_STATE, ByteTable, distinct_edges, live_states
from genlm.constraints.protocol import Integers64
from genlm.constraints.states import DEAD, FINISHED, LIVE
from genlm.constraints.text_tokens import PerVocabulary, TextTokens, text_tokens
from genlm.core.base.forking import renew_in_forks
from genlm.core.rows.row_masks import RowMasks
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import Symbols
from genlm.engines.memory import free_memory_bytes

TokenStates: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_VALUES_AT_ONCE = 2**23
"""Maximum number of successors that are computed at once."""


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


class TokenTable:
    r"""The successors of the states of an automaton for the tokens of a vocabulary.

    State `s` of the automaton over bytes is state `LIVE + s`. A stop token leads from a
    complete text to the finished state. If there are no stop tokens, a token that completes a
    text without continuations leads there. Tokens after which no text can be completed lead to
    the dead state.

    The rows of a state are computed when they are first needed, because most states of large
    automata never are: `\w{9}` has 2,700. May be used by several threads.

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
        # Rows of states in the order in which they were needed; -1 for none.
        self._place_of = np.full(count, -1)
        self._successors = np.empty((0, trie.count + 1), kind)
        self._words = np.empty((0, -(-trie.count // 32)), np.int32)
        self._add(np.array([DEAD, FINISHED]))

    def places_of(self, states: TokenStates) -> Integers64:
        """Return the row in `masks` of each of some states."""
        places: Integers64 = self._place_of[states]
        if places.size and np.minimum.reduce(places) < 0:
            with self._lock:
                is_new = self._place_of[states] < 0
                self._add(np.unique(states[is_new]).astype(np.int64))
            places = self._place_of[states]
        return places

    @property
    def masks(self) -> torch.Tensor:
        """Allowed tokens of the states that were needed, packed bits."""
        return torch.from_numpy(self._words[: self._row_masks.count])

    def masks_of(self, states: TokenStates) -> RowMasks:
        """Return the masks of members in some states; all draws share copies on devices."""
        places = self.places_of(states)
        return RowMasks(self._row_masks, len(states), self.vocab_size, places)

    def after(self, states: TokenStates, token_ids: Integers64) -> TokenStates:
        """Return the states after tokens; -1 for no token. Both have shape `(n,)`."""
        places = self.places_of(states)
        after: TokenStates = self._successors[places, token_ids]
        return after

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

    def _add(self, states: Integers64) -> None:
        """Compute the rows of states that have none."""
        begin = int((self._place_of >= 0).sum())
        end = begin + len(states)
        if end > len(self._words):
            self._grow(max(end, min(2 * len(self._words), len(self._steps))))
        stop = self._tokens.stop
        for reached in self._trie.successors(self._steps, states):
            part, states = states[: len(reached)], states[len(reached) :]
            rows = slice(begin, begin := begin + len(part))
            successors = self._resolved[reached]
            successors[:, stop] = np.where(self._accepting[part], FINISHED, DEAD)[:, None]
            self._words[rows] = self._tokens.pack(successors != DEAD).numpy()
            successors[part == FINISHED] = FINISHED
            self._successors[rows, :-1], self._successors[rows, -1] = successors, part
        self._row_masks = RowMasks(torch.from_numpy(self._words[:end]), end, self.vocab_size)
        # At last, because other threads read it without the lock.
        self._place_of[self._successors[:end, -1]] = np.arange(end)

    def _grow(self, rows: int) -> None:
        """Make room for the rows of states.

        Raises:
            MemoryError: Less memory is free.
        """
        columns = self._successors.shape[1]
        needed = rows * (columns * self._successors.itemsize + columns // 8)
        free = free_memory_bytes()
        if needed > free:
            raise MemoryError(
                f"the table of an automaton for {rows:,} states and {self.vocab_size:,} tokens "
                f"needs about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free. Use a "
                f"language of fewer states, or check the texts with `Python`"
            )
        for name in ("_successors", "_words"):
            before = getattr(self, name)
            after = np.empty((rows, before.shape[1]), before.dtype)
            after[: len(before)] = before
            setattr(self, name, after)
