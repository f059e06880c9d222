"""Rows of batches of sequences, every token computed once and every prefix shared.

The tree, its budget and its roll-backs are the same however the model is run; that is a
`Computing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from genlm.core.errors import EvaluationError
from genlm.core.rows import rows_from_logits
from genlm.core.vocab import Vocabulary
from genlm.prefix.computing import Computing, TreeBatch
from genlm.prefix.slots import slots_within
from genlm.prefix.tree import OutOfSlotsError, PrefixTree

if TYPE_CHECKING:
    import torch

__all__ = ["PrefixRows"]

_Batch = list[tuple[int, int]]
"""Index of a sequence and the slot of its last token."""

# Looking at a sequence takes microseconds; with thousands waiting it must stay that little.
_MOST_PASSED_OVER = 256


class PrefixRows:
    """Answers batches of sequences from a prefix tree.

    A batch that needs more room than there is, is served in parts, and so is a context
    of more tokens than one pass may have.

    Args:
        computing: Runs the model over what is not in the tree yet.
        without_cache: Returns the row of a sequence too long for the whole budget, shape
            `(1, vocabulary.size)`, float32.
        vocabulary: The tokenizer's.
        budget_bytes: The most that keys and values take.
        bytes_per_token: What they take of one token.
        max_tokens: The most new tokens in one pass.
        max_rows: The most results of one pass, which bounds its logits.
    """

    def __init__(
        self,
        computing: Computing,
        *,
        without_cache: Callable[[tuple[int, ...]], torch.Tensor],
        vocabulary: Vocabulary,
        budget_bytes: int,
        bytes_per_token: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._computing, self._without_cache = computing, without_cache
        self._vocabulary = vocabulary
        self._budget, self._token_bytes = budget_bytes, bytes_per_token
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._tree = PrefixTree(max(0, slots_within(budget_bytes, bytes_per_token) - 1))
        self._forwards = self._tokens_computed = self._contexts_without_cache = 0

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Compute the next-token row of each sequence, in one pass or in several.

        Whatever is raised, the tree holds computed tokens only.

        Args:
            adapter: Name of the adapter that is at work in the model.
            sequences: At least one; ids that the model can embed, none empty.

        Returns:
            Shape `(len(sequences), vocabulary.size)`, float32, where the logits are.
        """
        rows: torch.Tensor | None = None
        try:
            for chosen, found in self._parts(adapter, sequences):
                if len(chosen) == len(sequences):
                    return found
                if rows is None:
                    rows = found.new_empty((len(sequences), found.shape[1]))
                rows[chosen] = found
        except BaseException:
            self._tree.roll_back()
            raise
        assert rows is not None  # noqa: S101 - there is at least one sequence
        return rows

    def next_pass(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]]
    ) -> Sequence[int]:
        """Choose sequences whose rows take one pass: the first, then whatever still fits.

        The beginning of a first one longer than a pass has passes of its own. Whether the
        tree has room for them all is not looked at.

        Args:
            adapter: Under which they will be asked for.
            sequences: At least one, the most urgent first.

        Returns:
            Their places, in order, 0 among them.
        """
        total = sum(map(len, sequences))
        if len(sequences) <= self._max_rows and total + len(sequences) <= self._max_tokens:
            return range(len(sequences))
        chosen: list[int] = []
        passed_over, room = 0, self._max_tokens
        ahead: PrefixTree | None = None  # what the pass will compute, nothing of it twice
        for index, sequence in enumerate(sequences):
            new = self._tree.missing(adapter, sequence)
            if new > 1:
                ahead = ahead or PrefixTree(total)
                new = min(new, ahead.missing(adapter, sequence))
            if chosen and new > room:
                passed_over += 1
                if passed_over > _MOST_PASSED_OVER:
                    break
                continue
            while new > room:
                new -= room
            if ahead is not None:
                ahead.insert(adapter, sequence)
            chosen.append(index)
            room -= new + 1  # a last token that is known is run again
            if len(chosen) == self._max_rows:
                break
        return chosen

    def keep(self, adapter: str | None, token_ids: tuple[int, ...]) -> None:
        """Compute a prefix and keep it until `clear`.

        Raises:
            EvaluationError: It does not fit into the budget beside what is kept.
        """
        before = self._contexts_without_cache
        self.rows(adapter, [token_ids])
        if self._contexts_without_cache > before:
            raise EvaluationError(
                f"a prefix of {len(token_ids)} tokens does not fit into the "
                f"{self._tree.capacity} tokens of kv_budget_bytes={self._budget} beside "
                f"what is kept already; raise kv_budget_bytes or call clear_kv_cache first"
            )
        self._tree.pin(adapter, token_ids)

    def clear(self) -> None:
        """Forget everything computed, kept or not."""
        self._tree.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work and the state of the cache; from any thread."""
        used = self._tree.slots_used
        return {
            "tokens_computed": self._tokens_computed,
            "tokens_evicted": self._tree.tokens_evicted,
            "forwards": self._forwards,
            "contexts_without_cache": self._contexts_without_cache,
            "kv_tokens": used,
            "kv_bytes_used": used * self._token_bytes,
            "kv_budget_bytes": self._budget,
        }

    def _parts(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield places of sequences, oldest first, and their rows."""
        batch: _Batch = []
        for index, sequence in enumerate(sequences):
            if batch and self._is_full(adapter, sequence, len(batch)):
                yield self._run(adapter, sequences, batch)
                batch = []
            slot = self._insert(adapter, sequence)
            if slot is None and batch:
                yield self._run(adapter, sequences, batch)
                batch = []
                slot = self._insert(adapter, sequence)
            if slot is not None and self._tree.fresh_tokens > self._max_tokens:
                slot = self._insert_in_pieces(adapter, sequence)
            if slot is None:
                # Nothing is fresh: this lets go of the prefix that was found.
                self._tree.roll_back()
                self._contexts_without_cache += 1
                yield [index], self._without_cache(sequence)
            else:
                batch.append((index, slot))
        if batch:
            yield self._run(adapter, sequences, batch)

    def _is_full(self, adapter: str | None, sequence: tuple[int, ...], members: int) -> bool:
        """Whether a sequence would make the current batch larger than one pass may be."""
        if members >= self._max_rows:
            return True
        room = self._max_tokens - self._tree.fresh_tokens - members
        return len(sequence) > room and self._tree.missing(adapter, sequence) > room

    def _insert(self, adapter: str | None, sequence: tuple[int, ...]) -> int | None:
        try:
            return self._tree.insert(adapter, sequence)
        except OutOfSlotsError:
            return None

    def _insert_in_pieces(self, adapter: str | None, sequence: tuple[int, ...]) -> int:
        """Compute the beginning of the one sequence of a batch, as much at a time as may be.

        Returns:
            What inserting the sequence again returned.
        """
        self._tree.roll_back()  # its slots are free now, enough for every piece
        limit = self._max_tokens
        while (missing := self._tree.missing(adapter, sequence)) > limit:
            piece = sequence[: len(sequence) - missing + limit]
            slot = self._tree.insert(adapter, piece)
            self._compute(TreeBatch(self._tree, adapter, [piece], [slot]))
        return self._tree.insert(adapter, sequence)

    def _run(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]], batch: _Batch
    ) -> tuple[list[int], torch.Tensor]:
        """Compute the rows of a batch and end it."""
        chosen = [index for index, _ in batch]
        wanted = TreeBatch(
            self._tree, adapter, [sequences[i] for i in chosen], [slot for _, slot in batch]
        )
        return chosen, rows_from_logits(self._compute(wanted), self._vocabulary)

    def _compute(self, wanted: TreeBatch) -> torch.Tensor:
        """Compute a batch of the tree, end it, and return the logits asked for."""
        computed = self._computing(wanted)
        self._tree.commit()
        self._forwards += computed.forwards
        self._tokens_computed += computed.tokens
        return computed.logits
