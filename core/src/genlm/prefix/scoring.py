"""Scores of texts: all positions of many texts from few passes over a prefix tree.

A text is divided into parts that fit into a pass; parts of several texts share a pass. What
the tree has of a text before its first target is not computed again, and positions that several
texts of a pass have in common are computed once. What a text adds after its first target is
evicted before everything else: few programs ask for it again, and keeping it would evict
contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.core.errors import EvaluationError
from genlm.core.query import TokenScores
from genlm.core.rows import known_logits
from genlm.core.sequence import TokenSequence
from genlm.core.vocab import Vocabulary
from genlm.prefix.forward import Receive, TreeBatch
from genlm.prefix.tree import End, OutOfSlotsError, PrefixTree

if TYPE_CHECKING:
    from genlm.prefix.node import Node, Slots

__all__ = ["PieceScores", "ScoredText", "TextScorer", "divided_scores"]

# Logits that are normalised at once on a CPU: 1 MiB in float32, which stays in its caches.
_VALUES_AT_ONCE = 2**18

# `next_pass` looks at each pending text for microseconds; this bounds the total.
_MOST_PASSED_OVER = 256

_Integers = NDArray[np.int64]


class ScoredText(NamedTuple):
    """A text whose last tokens are scored.

    Attributes:
        sequence: The text without its last token.
        targets: The last tokens, one of which the sequence lacks.
    """

    sequence: TokenSequence
    targets: tuple[int, ...]

    @property
    def first(self) -> int:
        """Position of the token after which the first target follows."""
        return len(self.sequence) - len(self.targets)


class PieceScores:
    """Scores of targets, from logits that come in pieces and in any order.

    Args:
        keys: For each target the key of the position that it follows, such as its slot.
            Several targets may have the same.
        targets: Token ids.
        vocabulary: Decides which logits count, as for rows.
    """

    def __init__(self, keys: _Integers, targets: _Integers, vocabulary: Vocabulary) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._keys, self._targets = keys[self._order], targets[self._order]
        self._vocabulary = vocabulary
        self._parts: list[tuple[_Integers, torch.Tensor]] = []

    def add(self, keys: _Integers, logits: torch.Tensor) -> None:
        """Score the targets that follow some positions.

        Args:
            keys: Keys of positions, none of which was added before; those that no target
                follows are ignored.
            logits: Shape `(len(keys), width)`, any floating dtype, any device.
        """
        begins = np.searchsorted(self._keys, keys, "left")
        counts = np.searchsorted(self._keys, keys, "right") - begins
        rows = np.repeat(np.arange(len(keys)), counts)
        if not len(rows):
            return
        # The targets of each key follow each other.
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        members = np.repeat(begins, counts) + offsets
        logprobs, highest = self._scored(logits, rows, self._targets[members])
        self._parts.append((self._order[members], torch.stack([logprobs, highest])))

    def _scored(
        self, logits: torch.Tensor, rows: _Integers, targets: _Integers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each target, and the highest one of its row."""
        width = min(logits.shape[1], self._vocabulary.size)
        missing = targets >= width
        if self._vocabulary.missing_ids:
            missing |= np.isin(targets, np.array(self._vocabulary.missing_ids))
        moved = np.stack([rows, np.where(missing, 0, targets), missing.astype(np.int64)])
        row, column, is_missing = torch.from_numpy(moved).to(logits.device)
        logits = logits.detach()
        totals, highest = self._normalisers(logits)
        found = logits[row, column].float().masked_fill(is_missing.bool(), -math.inf)
        return found - totals[row], highest[row] - totals[row]

    def _normalisers(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logsumexp and the maximum of each row, a few rows at a time on a CPU."""
        step = len(logits)
        if logits.device.type == "cpu":
            step = max(1, _VALUES_AT_ONCE // logits.shape[1])
        totals, highest = [], []
        for part in torch.split(logits, step):
            known = known_logits(part, self._vocabulary)
            totals.append(known.logsumexp(-1))
            highest.append(known.amax(-1))
        return torch.cat(totals), torch.cat(highest)

    def results(self) -> TokenScores:
        """Return the scores of all targets, in the order in which they were given.

        Raises:
            EvaluationError: A row is not a distribution.
        """
        logprobs, highest = torch.empty(2, len(self._order))
        for members, values in self._parts:
            places = torch.from_numpy(members)
            logprobs[places], highest[places] = values.cpu()
        if not highest.isfinite().all():
            count = int((~highest.isfinite()).sum())
            raise EvaluationError(
                f"the engine computed {count} of {len(highest)} rows that are not "
                f"distributions: logits are NaN, infinite or all -inf. The computation "
                f"overflowed, or the engine does not serve this model correctly: try "
                f"dtype='float32' or another engine"
            )
        return TokenScores(logprobs, logprobs >= highest)


def divided_scores(scores: TokenScores, texts: Sequence[ScoredText]) -> list[TokenScores]:
    """Return the scores of each text, given those of all their targets."""
    sizes = [len(text.targets) for text in texts]
    parts = zip(*(torch.split(each, sizes) for each in scores), strict=True)
    return [TokenScores(logprobs.clone(), is_top.clone()) for logprobs, is_top in parts]


@dataclass(slots=True)
class _Batch:
    """Parts of texts in the current batch of the tree.

    Attributes:
        sequences, nodes, first_positions: As in `TreeBatch`.
        keys: Slots of the positions that targets follow.
        members: Which of all targets these are.
        ends: What is evicted before all others.
        new: Slots of the tokens that it computes and caches.
        again: Slots of cached tokens that it runs again.
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
        """Number of tokens that it runs."""
        return len(self.new) + len(self.again)


class TextScorer:
    """Scores texts with passes over a prefix tree.

    Args:
        tree: The tree.
        run: Computes a batch of the tree, ends it, and passes on the wanted logits; what it is
            given besides is evicted first.
        without_cache: Scores a text that does not fit into the tree.
        vocabulary: The tokenizer's vocabulary.
    """

    def __init__(
        self,
        tree: PrefixTree,
        run: Callable[[TreeBatch, Sequence[End], Receive], None],
        *,
        without_cache: Callable[[ScoredText], TokenScores],
        vocabulary: Vocabulary,
    ) -> None:
        self._tree, self._run = tree, run
        self._without_cache, self._vocabulary = without_cache, vocabulary

    def scores(
        self, adapter: str | None, texts: Sequence[ScoredText], limit: int
    ) -> list[TokenScores]:
        """Score texts in passes of at most `limit` tokens; see `PrefixRows.scores`."""
        targets = np.array([i for text in texts for i in text.targets], np.int64)
        found = TokenScores(
            torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool)
        )
        try:
            for members, scores in self._passes(adapter, texts, targets, limit):
                places = torch.from_numpy(members)
                found.logprobs[places], found.is_top[places] = scores
        except BaseException:
            self._tree.roll_back()
            raise
        return divided_scores(found, texts)

    def next_pass(
        self, adapter: str | None, texts: Sequence[ScoredText], limit: int
    ) -> Sequence[int]:
        """Choose texts that take about one pass; see `PrefixRows.next_score_pass`."""
        total = sum(len(text.sequence) for text in texts)
        if total <= limit:
            return range(len(texts))
        chosen: list[int] = []
        room, passed_over = limit, 0
        ahead = PrefixTree(total)  # what the pass will compute, each token once
        again: set[int] = set()
        for index, text in enumerate(texts):
            missing, cached = self._tokens(adapter, text.sequence, text.first)
            cached -= again
            cost = min(missing, ahead.missing(adapter, text.sequence)) + len(cached)
            if chosen and cost > room:
                passed_over += 1
                if passed_over > _MOST_PASSED_OVER:
                    break
                continue
            while cost > room:  # the beginning takes passes of its own
                cost -= room
            ahead.insert(adapter, text.sequence)
            again |= cached
            chosen.append(index)
            room -= cost
            if not room:
                break
        return chosen

    def _passes(
        self,
        adapter: str | None,
        texts: Sequence[ScoredText],
        targets: _Integers,
        limit: int,
    ) -> Iterator[tuple[_Integers, TokenScores]]:
        """Yield which targets a pass scored, and their scores."""
        batch, begin = _Batch(), 0
        for text in texts:
            members = np.arange(begin, begin + len(text.targets))
            begin += len(text.targets)
            known = len(text.sequence) - self._tree.missing(adapter, text.sequence)
            kept = max(known, text.first)
            while True:
                missing, cached = self._tokens(adapter, text.sequence, text.first)
                tokens = missing + len(cached - batch.new - batch.again)
                fits = tokens <= limit - batch.tokens and self._add(
                    adapter, batch, text.sequence, text.first, members, kept=kept
                )
                if fits or not batch.members:
                    break
                yield self._scored(adapter, batch, targets)
                batch = _Batch()
            if fits:
                continue
            if not self._add(adapter, batch, text.sequence, text.first, members, kept=kept):
                # No token is uncached: this releases the cached prefix.
                self._tree.roll_back()
                yield members, self._without_cache(text)
                continue
            self._tree.roll_back()  # frees its slots, which suffice for every part
            batch = _Batch()
            for sequence, first, part in _parts(text, members, tokens, limit):
                if batch.members:
                    yield self._scored(adapter, batch, targets)
                    batch = _Batch()
                self._add(adapter, batch, sequence, first, part, kept=kept)
        if batch.members:
            yield self._scored(adapter, batch, targets)

    def _tokens(
        self, adapter: str | None, sequence: TokenSequence, first: int
    ) -> tuple[int, set[int]]:
        """Return how many tokens are missing, and the slots of cached ones from `first` on."""
        missing = self._tree.missing(adapter, sequence)
        cached = len(sequence) - missing
        if cached <= first:
            return missing, set()
        node = self._tree.find(adapter, sequence.ids_from(0)[:cached])
        return missing, set(node.path_slots(first, cached).tolist())

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

        What it has after `kept` tokens is evicted before all others.

        Returns:
            Whether there were slots for it.
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

    def _scored(
        self, adapter: str | None, batch: _Batch, targets: _Integers
    ) -> tuple[_Integers, TokenScores]:
        """Compute a batch; return which targets these are, and their scores."""
        members = np.concatenate(batch.members)
        scores = PieceScores(np.concatenate(batch.keys), targets[members], self._vocabulary)
        wanted = TreeBatch(
            self._tree, adapter, batch.sequences, batch.nodes, batch.first_positions
        )
        self._run(wanted, batch.ends, scores.add)
        return members, scores.results()


def _parts(
    text: ScoredText, members: _Integers, tokens: int, limit: int
) -> Iterator[tuple[TokenSequence, int, _Integers]]:
    """Divide a text of which more tokens must be run than a pass may have.

    Yields:
        The text up to the end of a pass; the position of the first token in it that a target
        follows, or its end; and which targets these are.
    """
    length = len(text.sequence)
    ids, begin = text.sequence.token_ids, length - tokens
    while begin < length:
        end = min(begin + limit, length)
        sequence = text.sequence if end == length else TokenSequence.of(ids[:end])
        first = min(max(begin, text.first), end)
        yield sequence, first, members[max(0, first - text.first) : max(0, end - text.first)]
        begin = end
