"""Next-token rows and scores of batches of sequences from a prefix tree.

`PrefixRows` owns the tree, its budget and its roll-backs. `TreePasses` divides sequences into
passes, and a `ForwardFn` runs the model over the uncached tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from genlm.core.base.errors import EvaluationError
from genlm.core.base.statistics import Count
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.logits import rows_from_logits
from genlm.core.rows.text_scores import PieceScores
from genlm.core.vocab import Vocabulary
from genlm.prefix.forward import ForwardFn, TokenBatch
from genlm.prefix.node import Paths, slots_within
from genlm.prefix.passes import TreePasses
from genlm.prefix.populations import Populations
from genlm.prefix.segment_forward import PassLogits
from genlm.prefix.tree import PrefixTree
from genlm.prefix.uncached import UncachedPath

if TYPE_CHECKING:
    import torch

    from genlm.core.queries.generations import Integers64
    from genlm.core.queries.query import GroupQuery, Query
    from genlm.core.rows.text_scores import TextResult

# Maximum number of sequences that `next_pass` skips: it takes microseconds for each.
_MAX_SKIPPED = 256


class PrefixRows:
    """Computes the rows of batches of sequences with a prefix tree.

    A batch that needs more slots than can be freed, or a context of more tokens than the
    maximum of a pass, is computed in several passes. The methods `..._by_pass` are generators
    that stop after each pass, so that other batches can be computed in between: the computed
    tokens of a long context are pinned until the generator ends or is closed.

    Args:
        forward: Function that runs the model over uncached tokens.
        uncached: Path that computes sequences which are too long for the whole budget.
        vocabulary: The tokenizer's vocabulary.
        budget_bytes: Maximum memory of keys and values.
        bytes_per_token: Memory of the keys and values of one token.
        max_tokens: Maximum number of new tokens in one pass.
        max_rows: Maximum number of results of one pass, which limits its logits.
        make_room: Called before `uncached` computes a sequence; see `TreePasses`. By default
            such sequences are computed at once.

    Attributes:
        forward, budget_bytes, bytes_per_token: As above.
        populations: Block tables of populations.
    """

    def __init__(
        self,
        forward: ForwardFn,
        *,
        uncached: UncachedPath,
        vocabulary: Vocabulary,
        budget_bytes: int,
        bytes_per_token: int,
        max_tokens: int,
        max_rows: int,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.forward, self._uncached = forward, uncached
        self._vocabulary = vocabulary
        self.budget_bytes, self.bytes_per_token = budget_bytes, bytes_per_token
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._make_room = make_room
        self._tree = PrefixTree(max(0, slots_within(budget_bytes, bytes_per_token) - 1))
        self._forwards = self._tokens_computed = self._contexts_without_cache = 0
        self.populations = Populations(self._tree, max_tokens=max_tokens, max_rows=max_rows)

    def rows(self, adapter: str | None, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Compute the next-token rows of sequences; see `logits_by_pass`."""
        *_, logits = self.logits_by_pass(adapter, sequences)
        assert logits is not None  # noqa: S101 - the last result
        return rows_from_logits(logits, self._vocabulary)

    def logits_by_pass(
        self, adapter: str | None, sequences: Sequence[TokenSequence]
    ) -> Generator[torch.Tensor | None, None, None]:
        """Compute the next-token logits of sequences, in one or several passes.

        After an exception, the tree contains only computed tokens.

        Args:
            adapter: Name of the adapter that is active in the model during each pass.
            sequences: At least one sequence of ids that the model can embed.

        Yields:
            None after a pass over a part of a long context; at last the logits, shape
            `(len(sequences), width of the model's output)`. The next pass may overwrite them.
        """
        self.populations.tables.share_prefixes(adapter, sequences)
        requested = PassLogits(np.arange(len(sequences)))
        lasts = [len(sequence) - 1 for sequence in sequences]
        with self._rolled_back_on_error():
            for result in self._passes(adapter, self._max_tokens).run(sequences, lasts):
                if isinstance(result, int):
                    self._contexts_without_cache += 1
                    places = [result]
                    [computed] = self._uncached.logits_by_pass(adapter, [sequences[result]])
                else:
                    parts, _, computed = result
                    places = [part.place for part in parts if part.first < len(part.sequence)]
                if places:
                    requested.add(np.array(places), computed)
                else:
                    yield None
        yield requested.logits

    def is_long(self, query: Query) -> bool:
        """Whether a query takes more than one pass."""
        limit = self._score_limit if query.targets else self._max_tokens
        if len(query) <= limit:
            return False
        _, cached = self._tree.match(query.adapter, query.sequence)
        return len(query) - min(query.first_target, cached) > limit

    def next_pass(
        self,
        adapter: str | None,
        sequences: Sequence[TokenSequence],
        firsts: Sequence[int] | None = None,
    ) -> Sequence[int]:
        """Choose sequences for one pass: the first, and others that fit.

        A first sequence that is longer than a pass is chosen alone. Free slots are not
        considered.

        Args:
            adapter: Adapter of all sequences.
            sequences: At least one sequence, the most urgent first.
            firsts: The position in each sequence from which on logits are requested; None for
                the last positions only.

        Returns:
            Indices of the sequences, ascending, including 0.
        """
        limit = self._max_tokens if firsts is None else self._score_limit
        if len(sequences) <= self._max_rows and sum(map(len, sequences)) <= limit:
            return range(len(sequences))
        indices: list[int] = []
        skipped, room = 0, limit
        ahead = PrefixTree(limit)  # new tokens of the pass, by where they leave the tree
        recomputed: set[int] = set()  # slots of cached tokens
        for index, sequence in enumerate(sequences):
            node, cached = self._tree.match(adapter, sequence)
            new, first = len(sequence) - cached, firsts[index] if firsts else len(sequence) - 1
            repeated = (
                node.computed_slots(first, cached) - recomputed if first < cached else set()
            )
            branch = None
            if new > 1:
                suffix = TokenSequence.of(sequence.ids_from(cached)) if cached else sequence
                branch = f"{id(node)} {cached}"
                new = ahead.missing(branch, suffix)
            cost = new + len(repeated)
            if not indices and cost > limit:
                return [0]
            if cost > room:
                skipped += 1
                if skipped > _MAX_SKIPPED:
                    break
                continue
            if branch:
                ahead.insert(branch, suffix)
            recomputed |= repeated
            indices.append(index)
            room -= cost
            if not room or len(indices) == self._max_rows:
                break
        return indices

    def scores_by_pass(
        self, adapter: str | None, texts: Sequence[Query]
    ) -> Generator[list[TextResult] | None, None, None]:
        """Score texts in few passes, with one computation per uncached position.

        After an exception, the tree contains only computed tokens.

        Args:
            adapter: Name of the adapter that is active in the model during each pass.
            texts: At least one text of ids that the model can embed.

        Yields:
            None after each pass that is followed by others; at last `PieceScores.results`.
        """
        scores = PieceScores(texts, self._vocabulary)
        sequences = [text.sequence for text in texts]
        self.populations.tables.share_prefixes(adapter, sequences)
        firsts = [text.first_target for text in texts]
        passes = self._passes(adapter, self._score_limit, scored=True)
        with self._rolled_back_on_error():
            for result in passes.run(sequences, firsts):
                if isinstance(result, int):
                    self._contexts_without_cache += 1
                    [[score]] = self._uncached.scores_by_pass(adapter, [texts[result]])
                    scores.put(result, score)
                    continue
                parts, batch, logits = result
                keys, members, paths = [], [], Paths()
                for index, sequence, first, node in parts:
                    keys.append(paths.slots(node, len(sequence))[first:])
                    before = scores.ends[index] - firsts[index]
                    members.append(before + np.arange(first, len(sequence)))
                scores.expect(np.concatenate(keys), np.concatenate(members))
                scores.add(batch.result_slots, logits)
                del result, logits  # before the next pass allocates its logits
                if not scores.is_complete:
                    yield None
        yield scores.results()

    @property
    def _score_limit(self) -> int:
        """Maximum number of tokens of a pass of texts; all of their logits may be requested."""
        return min(self._max_tokens, self._max_rows)

    def group_logits(
        self, parts: Sequence[tuple[GroupQuery, Integers64]]
    ) -> torch.Tensor | None:
        """Compute the logits of sequences of populations; see `Populations.logits`."""
        with self._rolled_back_on_error():
            return self.populations.logits(parts, self._run)

    def pin(self, adapter: str | None, sequence: TokenSequence) -> None:
        """Compute a prefix and pin it until `clear`.

        Raises:
            EvaluationError: The prefix does not fit into the budget with the pinned prefixes.
        """
        before = self._contexts_without_cache
        list(self.logits_by_pass(adapter, [sequence]))
        if self._contexts_without_cache > before:
            raise EvaluationError(
                f"a prefix of {len(sequence)} tokens does not fit into the "
                f"{self._tree.capacity} tokens of kv_budget_bytes={self.budget_bytes} beside "
                f"the pinned prefixes; raise kv_budget_bytes or call clear_kv_cache first"
            )
        self._tree.pin(adapter, sequence)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Evict a context before other tokens; see `PrefixTree.release`."""
        self._tree.release(adapter, key)

    def drop(self, adapter: str) -> None:
        """Remove all tokens computed with an adapter, including pinned prefixes."""
        self.populations.tables.drop(adapter)
        self._tree.drop(adapter)

    def clear(self) -> None:
        """Remove all computed tokens, including pinned prefixes."""
        self.populations.tables.clear()
        self._tree.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counters and the state of the cache. Thread-safe."""
        used = self._tree.slots_used
        return {
            "tokens_computed": Count(self._tokens_computed),
            "tokens_evicted": Count(self._tree.tokens_evicted),
            "forwards": Count(self._forwards),
            "contexts_without_cache": Count(self._contexts_without_cache),
            "kv_tokens": used,
            "kv_bytes_used": used * self.bytes_per_token,
            "kv_budget_bytes": self.budget_bytes,
        }

    def restore(self) -> None:
        """Remove tokens that were not computed, after a failed pass."""
        self._tree.roll_back()

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def _passes(
        self, adapter: str | None, max_tokens: int, *, scored: bool = False
    ) -> TreePasses:
        return TreePasses(
            self._tree,
            self._run,
            adapter,
            max_tokens=max_tokens,
            max_rows=self._max_rows,
            make_room=self._make_room,
            scored=scored,
        )

    def _run(self, batch: TokenBatch) -> torch.Tensor:
        """Compute and count a pass; return its logits."""
        result = self.forward(batch)
        self._forwards += result.forwards
        self._tokens_computed += result.tokens
        return result.logits
