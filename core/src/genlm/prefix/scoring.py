"""Scores of texts: all positions of many texts from few passes over a prefix tree.

A text is divided into parts that fit into a pass; parts of several texts share a pass. Cached
tokens before the first target of a text are not recomputed, and common positions of several
texts of a pass are computed once. Tokens after the first target are evicted before all others:
few programs request them again, and keeping them would evict contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.text_scores import PieceScores, ScoredText, TextResult
from genlm.core.vocab import Vocabulary
from genlm.prefix.forward import TreeBatch
from genlm.prefix.tree import End, OutOfSlotsError, PrefixTree

if TYPE_CHECKING:
    import torch

    from genlm.prefix.node import Node, Slots

__all__ = ["TextScorer"]

_Integers = NDArray[np.int64]


@dataclass(slots=True)
class _Batch:
    """Parts of texts in the current batch of the tree.

    Attributes:
        sequences, nodes, first_positions: As in `TreeBatch`.
        keys: Slots of the tokens that precede targets.
        members: Indices of these targets among all targets.
        ends: Nodes that are evicted before all others.
        new: Slots of the tokens that are computed and cached.
        again: Slots of cached tokens that are recomputed.
    """

    sequences: list[TokenSequence] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    keys: list[Slots] = field(default_factory=list)
    members: list[_Integers] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    new: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.new) + len(self.again)


class TextScorer:
    """Scores texts with passes over a prefix tree.

    Args:
        tree: The tree.
        run: Function that computes a batch of the tree, ends it, and returns the requested
            logits; the ends among its arguments are evicted first.
        without_cache: Function that scores a text that does not fit into the tree.
        vocabulary: The tokenizer's vocabulary.
        limit: Maximum number of tokens of a pass.
    """

    def __init__(
        self,
        tree: PrefixTree,
        run: Callable[[TreeBatch, Sequence[End]], torch.Tensor],
        *,
        without_cache: Callable[[str | None, ScoredText], TextResult],
        vocabulary: Vocabulary,
        limit: int,
    ) -> None:
        self._tree, self._run, self._limit = tree, run, limit
        self._without_cache, self._vocabulary = without_cache, vocabulary

    def scores(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[TextResult]:
        """Score texts; see `PrefixRows.scores`."""
        scores = PieceScores(texts, self._vocabulary)
        self._compute(adapter, texts, scores)
        return scores.results()

    def _compute(
        self,
        adapter: str | None,
        texts: Sequence[ScoredText],
        scores: PieceScores,
    ) -> None:
        """Run the passes that the texts need."""
        batch, begin, limit = _Batch(), 0, self._limit
        for index, text in enumerate(texts):
            members = np.arange(begin, begin + len(text.targets))
            begin += len(text.targets)
            known = len(text.sequence) - self._tree.missing(adapter, text.sequence)
            kept = max(known, text.first)
            while True:
                missing = self._tree.missing(adapter, text.sequence)
                known = len(text.sequence) - missing
                cached = self._tree.slots(adapter, text.sequence, text.first, known)
                tokens = missing + len(cached - batch.new - batch.again)
                fits = tokens <= limit - batch.tokens and self._add(
                    adapter, batch, text.sequence, text.first, members, kept=kept
                )
                if fits or not batch.members:
                    break
                self._run_pass(adapter, batch, scores)
                batch = _Batch()
            if fits:
                continue
            if not self._add(adapter, batch, text.sequence, text.first, members, kept=kept):
                # No token is uncached: this releases the cached prefix.
                self._tree.roll_back()
                scores.put(index, self._without_cache(adapter, text))
                continue
            self._tree.roll_back()  # frees its slots, which suffice for every part
            batch = _Batch()
            for sequence, first, part in _parts(text, members, tokens, limit):
                if batch.members:
                    self._run_pass(adapter, batch, scores)
                    batch = _Batch()
                self._add(adapter, batch, sequence, first, part, kept=kept)
        if batch.members:
            self._run_pass(adapter, batch, scores)

    def _add(
        self,
        adapter: str | None,
        batch: _Batch,
        sequence: TokenSequence,
        first: int,
        members: _Integers,
        *,
        kept: int,
    ) -> bool:
        """Add a sequence, and the targets after its tokens from `first` on, to a batch.

        Its tokens after the first `kept` ones are evicted before all others.

        Returns:
            Whether there were enough slots.
        """
        cached = len(sequence) - self._tree.missing(adapter, sequence)
        try:
            node = self._tree.insert(adapter, sequence)
        except OutOfSlotsError:
            return False
        end = len(sequence)
        again = node.path_slots(min(first, cached), cached)
        batch.again.update(set(again.tolist()) - batch.new)
        batch.new.update(node.path_slots(cached, end).tolist())
        batch.sequences.append(sequence)
        batch.nodes.append(node)
        batch.first_positions.append(min(first, end - 1))
        batch.keys.append(node.path_slots(first, end))
        batch.members.append(members)
        batch.ends.append(End(adapter, sequence, kept))
        return True

    def _run_pass(self, adapter: str | None, batch: _Batch, scores: PieceScores) -> None:
        """Compute a batch and score its logits."""
        scores.expect(np.concatenate(batch.keys), np.concatenate(batch.members))
        wanted = TreeBatch(
            self._tree, adapter, batch.sequences, batch.nodes, batch.first_positions
        )
        scores.add(wanted.wanted, self._run(wanted, batch.ends))


def _parts(
    text: ScoredText, members: _Integers, tokens: int, limit: int
) -> Iterator[tuple[TokenSequence, int, _Integers]]:
    """Divide a text with more tokens to compute than the maximum of a pass.

    Yields:
        The text up to the end of a pass; the position of its first token that precedes a
        target, or its end; and the indices of these targets.
    """
    length = len(text.sequence)
    ids, begin = text.sequence.token_ids, length - tokens
    while begin < length:
        end = min(begin + limit, length)
        sequence = text.sequence if end == length else TokenSequence.of(ids[:end])
        first = min(max(begin, text.first), end)
        yield sequence, first, members[max(0, first - text.first) : max(0, end - text.first)]
        begin = end
