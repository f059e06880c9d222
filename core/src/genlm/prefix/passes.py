"""Division of a batch of sequences into forward passes over the uncached tokens of a tree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.forward import TokenBatch
from genlm.prefix.node import Node
from genlm.prefix.tree import End, OutOfSlotsError, PrefixTree

if TYPE_CHECKING:
    import torch


class PassPart(NamedTuple):
    """A sequence of a pass, or its beginning.

    Attributes:
        place: Index of the sequence.
        sequence: Its tokens up to the end of the pass.
        first: First position whose logits are requested; the end if no logits are.
        node: Node from the tree's `insert`.
    """

    place: int
    sequence: TokenSequence
    first: int
    node: Node


class PassResult(NamedTuple):
    """The results of a pass.

    Attributes:
        parts: The sequences.
        batch: The tokens that were computed.
        logits: The logits of its results, shape `(len(results), width)`. The next pass may
            overwrite them.
    """

    parts: Sequence[PassPart]
    batch: TokenBatch
    logits: torch.Tensor


@dataclass(slots=True)
class _Pass:
    """The current batch of the tree.

    Attributes:
        parts: The sequences.
        recomputed: Slots of cached tokens that are recomputed for their logits.
        ends: Ends of sequences that are evicted before all other tokens.
    """

    parts: list[PassPart] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    ends: list[End] = field(default_factory=list)


class TreePasses:
    """The passes over a batch of sequences with the same adapter.

    After an exception, the tree contains tokens that were not computed; see its `roll_back`.

    Args:
        tree: The tree.
        forward: Function that runs the model over uncached tokens and returns their logits.
        adapter: Adapter of the sequences.
        max_tokens: Maximum number of tokens of a pass.
        max_rows: Maximum number of sequences of a pass.
        make_room: Function that is called between two passes if there are too few slots for a
            sequence. It returns whether it has unpinned slots, with which the sequence may fit.
        scored: Whether sequences may share requested positions, and their new tokens after the
            first requested one are evicted before all other tokens.
    """

    def __init__(
        self,
        tree: PrefixTree,
        forward: Callable[[TokenBatch], torch.Tensor],
        adapter: str | None,
        *,
        max_tokens: int,
        max_rows: int,
        make_room: Callable[[], bool],
        scored: bool = False,
    ) -> None:
        self._tree, self._forward, self._adapter = tree, forward, adapter
        self._make_room = make_room
        self._max_tokens, self._max_rows, self._scored = max_tokens, max_rows, scored
        self._pass = _Pass()

    def run(
        self, sequences: Sequence[TokenSequence], firsts: Sequence[int]
    ) -> Iterator[PassResult | int]:
        """Compute sequences.

        Args:
            sequences: The sequences.
            firsts: The position in each sequence from which on logits are requested.

        Yields:
            The results of a pass, or the index of a sequence for which there are too few slots.
        """
        order: Sequence[int] = range(len(sequences))
        if sum(map(len, sequences)) > self._tree.capacity - self._tree.slots_used:
            # Cached sequences are computed before they could be evicted for the others.
            missing = [self._tree.missing(self._adapter, sequence) for sequence in sequences]
            order = sorted(order, key=missing.__getitem__)
        for index in order:
            part = index, sequences[index], firsts[index]
            if self._pass.parts:
                if self._add(part, self._retained(part), max_tokens=self._max_tokens):
                    continue
                yield self._compute()
            while not (yield from self._begin(part)):
                if not self._make_room():
                    yield index
                    break
        if self._pass.parts:
            yield self._compute()

    def _begin(self, part: tuple[int, TokenSequence, int]) -> Generator[PassResult, None, bool]:
        """Add a sequence to the empty pass, or compute it if it needs several passes.

        Returns:
            False if there are too few slots.
        """
        retained = self._retained(part)
        is_added = self._add(part, retained)
        if is_added and self._tokens > self._max_tokens:
            self._drop()  # frees its slots, which are sufficient for every part
            is_added = yield from self._compute_long(part, retained)
        if not is_added:
            self._drop()  # ends the use of the cached prefix, which may then be evicted
        return is_added

    def _retained(self, part: tuple[int, TokenSequence, int]) -> int:
        """Return the number of tokens that are not evicted before all other tokens."""
        _, sequence, first = part
        return max(first, self._tree.match(self._adapter, sequence)[1]) if self._scored else 0

    def _compute_long(
        self, part: tuple[int, TokenSequence, int], retained: int
    ) -> Generator[PassResult, None, bool]:
        """Compute a sequence in several passes, between which its computed tokens are pinned.

        Returns:
            False if there are too few slots, because others were pinned between two passes.
        """
        index, sequence, first = part
        ids, length, end = sequence.token_ids, len(sequence), 0
        with ExitStack() as pins:
            while end < length:
                begin = min(first, self._tree.match(self._adapter, sequence)[1])
                end = min(begin + self._max_tokens, length)
                whole = sequence if end == length else TokenSequence.of(ids[:end])
                is_added = self._add((index, whole, min(first, end)), retained)
                pins.close()  # the tokens are in use until the end of the pass
                if not is_added:
                    return False
                if end < length:
                    pins.enter_context(self._pinned(whole))
                yield self._compute()
                first = max(first, end)
        return True

    @contextmanager
    def _pinned(self, sequence: TokenSequence) -> Iterator[None]:
        """Pin a sequence of the tree until the end of the context or until `clear`."""
        times_cleared = self._tree.times_cleared
        self._tree.pin(self._adapter, sequence)
        try:
            yield
        finally:
            if times_cleared == self._tree.times_cleared:
                self._tree.unpin(self._adapter, sequence)

    def _add(
        self,
        part: tuple[int, TokenSequence, int],
        retained: int,
        *,
        max_tokens: int | None = None,
    ) -> bool:
        """Add a sequence to the pass unless this exceeds the limit or the available slots.

        Args:
            part: Index, tokens and first requested position of the sequence.
            retained: Number of its tokens that are not evicted before all other tokens.
            max_tokens: Maximum number of tokens of the pass; None for no limit.
        """
        index, sequence, first = part
        match = node, cached = self._tree.match(self._adapter, sequence)
        repeated: set[int] = set()
        if first < cached:
            repeated = node.computed_slots(first, cached) - self._pass.recomputed
        if max_tokens is not None:
            tokens = self._tokens + len(sequence) - cached + len(repeated)
            if tokens > max_tokens or len(self._pass.parts) >= self._max_rows:
                return False
        try:
            node = self._tree.insert(self._adapter, sequence, match)
        except OutOfSlotsError:
            return False
        self._pass.recomputed |= repeated
        self._pass.parts.append(PassPart(index, sequence, first, node))
        if self._scored:
            self._pass.ends.append(End(node, retained, len(sequence)))
        return True

    @property
    def _tokens(self) -> int:
        """Number of tokens that the pass computes."""
        return self._tree.uncached_tokens + len(self._pass.recomputed)

    def _drop(self) -> None:
        """Remove the sequences of the pass, which is not computed."""
        self._tree.roll_back()
        self._pass = _Pass()

    def _compute(self) -> PassResult:
        """Compute the pass and begin the next one."""
        current, self._pass = self._pass, _Pass()
        parts = current.parts
        batch = TokenBatch.of_tree(
            self._tree,
            self._adapter,
            [part.sequence for part in parts],
            [part.node for part in parts],
            [min(p.first, len(p.sequence) - 1) for p in parts] if self._scored else (),
        )
        logits = self._forward(batch)
        self._tree.commit(current.ends)
        return PassResult(parts, batch, logits)
