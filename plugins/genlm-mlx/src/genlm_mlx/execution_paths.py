"""The two execution paths: a prefix tree over slots, or mlx-lm's cache for each context.

The prefix tree supports models whose layers keep plain keys and values of their past. A
self-test at loading compares its rows with those of mlx-lm's cache.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from genlm.plugin import GroupQuery, Vocabulary, rows_from_logits
from genlm.prefix import (
    BatchLimits,
    PathChoice,
    PieceScores,
    PrefixRows,
    ScoredText,
    SegmentLimits,
    SelfTest,
    ServeOptions,
    Slots,
    TextResult,
    Tokens,
    UnsupportedModelError,
    choose_path,
    plan_batches,
    slots_within,
)
from genlm_mlx.forward import (
    LOGITS_PER_PASS,
    SlotCacheForward,
    own_logits,
    own_pieces,
    read_shapes,
    read_windows,
)
from genlm_mlx.pieces import OutputPieces
from genlm_mlx.rotary import PublishedRoPE
from genlm_mlx.storage import KVStorage, default_budget_bytes

__all__ = [
    "DEFAULT_TOKENS_PER_BATCH",
    "PATHS",
    "SlotCachePath",
    "UncachedPath",
    "choose_execution_path",
]

PATHS = ("slot_cache", "uncached")
"""Execution paths, fastest first."""

DEFAULT_TOKENS_PER_BATCH = 2048

# Largest errors in log-probability in float32 and in half precision.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.3


def choose_execution_path(
    model: Any,
    vocabulary: Vocabulary,
    options: ServeOptions,
    *,
    max_context: int | None,
    embedding_rows: int,
    rotary: Sequence[PublishedRoPE] = (),
) -> PathChoice:
    """Return the faster execution path that gives the right rows, or the requested one.

    Args:
        model: An mlx-lm model.
        vocabulary: The tokenizer's vocabulary.
        options: Options of the engine.
        max_context: Maximum number of tokens of a context.
        embedding_rows: The model can embed ids from 0 up to here.
        rotary: The model's rotary embeddings that depend on the length of the context.

    Raises:
        ModelLoadError: The requested path does not support the model.
    """
    max_tokens = options.max_tokens_per_batch or DEFAULT_TOKENS_PER_BATCH
    uncached = UncachedPath(model, vocabulary, max_tokens, rotary)

    def slot_cache() -> SlotCachePath:
        if rotary:
            longest = rotary[0].longest
            raise UnsupportedModelError(
                f"beyond {longest} tokens its rotary embeddings depend on the length of the "
                f"context; max_context={longest} permits this path"
            )
        return SlotCachePath(
            model,
            vocabulary,
            max_tokens=max_tokens,
            kv_budget_bytes=options.kv_budget_bytes,
            max_context=max_context,
            uncached=uncached,
        )

    def self_test(path: SlotCachePath) -> float:
        text = range(min(embedding_rows, vocabulary.size))
        tolerance = _TOLERANCE if path.is_exact else _COARSE_TOLERANCE
        test = SelfTest(text, uncached, tolerance=tolerance, max_context=max_context)
        return test.largest_error(path)

    return choose_path(
        type(model).__module__,
        {"slot_cache": slot_cache},
        uncached,
        options=options,
        self_test=self_test,
        logger=logging.getLogger("genlm_mlx"),
    )


class UncachedPath:
    """Recomputes every context through mlx-lm's cache; batches contexts of one length.

    Args:
        model: An mlx-lm model.
        vocabulary: The tokenizer's vocabulary.
        max_tokens: Maximum number of new positions in one pass.
        rotary: Rotary embeddings that depend on the length of the context.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        max_tokens: int,
        rotary: Sequence[PublishedRoPE] = (),
    ) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._rotary, self._max_tokens = rotary, max_tokens
        self._forwards = self._tokens_computed = 0
        self._pieces = OutputPieces(model)

    @property
    def can_score(self) -> bool:
        """Whether it scores texts."""
        return True

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:  # noqa: ARG002 - see ExecutionPath
        """Compute rows in as few passes as limits and lengths allow."""
        rows = torch.empty(len(sequences), self._vocabulary.size)
        for batch in self._batches([len(sequence) for sequence in sequences]):
            chosen = [sequences[i] for i in batch]
            piece = max(1, self._max_tokens // len(chosen))
            for rope in self._rotary:
                rope.set_length(len(chosen[0]))
            logits = own_logits(self._model, chosen, piece)
            rows[batch] = rows_from_logits(logits, self._vocabulary)
            self._forwards += 1 + -(-(len(chosen[0]) - 1) // piece)
            self._tokens_computed += sum(map(len, chosen))
        return rows

    def next_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see ExecutionPath
        sequences: Sequence[tuple[int, ...]],
    ) -> Sequence[int]:
        """Choose the first context and others, up to about the tokens of one pass."""
        totals = itertools.accumulate(map(len, sequences))
        return range(max(1, sum(total <= self._max_tokens for total in totals)))

    def scores(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[TextResult]:
        """Score texts of one length together; where rows depend on the length, by rows."""
        scores = PieceScores(texts, self._vocabulary)
        if self._rotary:
            for text, first in zip(texts, scores.ends, strict=False):
                self._score_by_rows(adapter, text, int(first), scores)
        else:
            for batch in self._batches([len(text.sequence) for text in texts]):
                self._score_batch([texts[i] for i in batch], scores.ends[batch], scores)
        return scores.results()

    def next_score_pass(
        self, adapter: str | None, texts: Sequence[ScoredText]
    ) -> Sequence[int]:
        """Choose the first text and others, as `next_pass`; only the first if rows score it."""
        if self._rotary:
            return [0]
        return self.next_pass(adapter, [text.sequence.token_ids for text in texts])

    def _score_batch(
        self, texts: Sequence[ScoredText], first_keys: Any, scores: PieceScores
    ) -> None:
        firsts = np.array([text.first for text in texts])
        sequences = [text.sequence.token_ids for text in texts]
        most = self._max_tokens
        if not self._pieces.are_small:
            most = min(most, LOGITS_PER_PASS // self._vocabulary.size)
        piece = max(1, most // len(texts))

        def receive(where: Any, logits: torch.Tensor) -> None:
            rows, places = where.T
            scores.add(first_keys[rows] + places - firsts[rows], logits)

        own_pieces(
            self._model,
            self._pieces,
            sequences,
            firsts.tolist(),
            piece=piece,
            receive=receive,
        )
        self._forwards += -(-len(sequences[0]) // piece)
        self._tokens_computed += sum(map(len, sequences))

    def _score_by_rows(
        self, adapter: str | None, text: ScoredText, first_key: int, scores: PieceScores
    ) -> None:
        """Score one text by the rows of its prefixes."""
        ids = text.sequence.token_ids
        most = max(1, LOGITS_PER_PASS // self._vocabulary.size)
        for begin in range(0, len(text.targets), most):
            end = min(begin + most, len(text.targets))
            lengths = range(text.first + 1 + begin, text.first + 1 + end)
            rows = self.rows(adapter, [ids[:length] for length in lengths])
            scores.add(first_key + np.arange(begin, end), rows)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        most = max(1, min(self._max_tokens, LOGITS_PER_PASS // self._vocabulary.size))
        unlimited = max(lengths) * most
        return plan_batches(lengths, BatchLimits(unlimited, most, equal_lengths=True))

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work."""
        return {"tokens_computed": self._tokens_computed, "forwards": self._forwards}


class SlotCachePath(PrefixRows):
    """Computes every token once, from a prefix tree.

    Args:
        model: An mlx-lm model.
        vocabulary: The tokenizer's vocabulary.
        max_tokens: Maximum number of new positions in one pass.
        kv_budget_bytes: Maximum size of keys and values; None for the default.
        max_context: Maximum number of tokens of a context, None for no limit.
        uncached: Computes contexts that exceed the budget.

    Attributes:
        is_exact: Whether the model computes in float32.

    Raises:
        UnsupportedModelError: The layers cache state other than keys and values of
            their past.
    """

    forward: SlotCacheForward

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        *,
        max_tokens: int,
        kv_budget_bytes: int | None,
        max_context: int | None,
        uncached: UncachedPath,
    ) -> None:
        windows = read_windows(model)
        shapes, width = read_shapes(model, len(windows))
        token_bytes = sum(shape.bytes_per_token for shape in shapes)
        budget = (
            default_budget_bytes(token_bytes) if kv_budget_bytes is None else kv_budget_bytes
        )
        self.is_exact = all(shape.dtype == mx.float32 for shape in shapes)
        forward = SlotCacheForward(
            model,
            windows,
            KVStorage(shapes, slots_within(budget, token_bytes)),
            limits=SegmentLimits(max_tokens, max_context),
            width=width,
            budget_bytes=budget,
        )
        super().__init__(
            forward,
            without_cache=lambda sequence: uncached.rows(None, [sequence]),
            score_without_cache=lambda text: uncached.scores(None, [text])[0],
            vocabulary=vocabulary,
            budget_bytes=budget,
            bytes_per_token=token_bytes,
            max_tokens=max_tokens,
            max_rows=max(1, LOGITS_PER_PASS // width),
        )

    def rows(self, adapter: str | None, sequences: Sequence[Tokens]) -> torch.Tensor:
        """Compute rows in one pass, or in several if limits or memory require it."""
        try:
            return super().rows(adapter, sequences)
        except BaseException:
            if self.forward.storage.lost:
                self.clear()
            raise

    def group_logits(self, group: GroupQuery, places: Slots) -> torch.Tensor | None:
        """Compute logits of a population; see `PrefixRows.group_logits`."""
        try:
            return super().group_logits(group, places)
        except BaseException:
            if self.forward.storage.lost:
                self.clear()
            raise

    def scores(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[TextResult]:
        """Score texts in few passes; see `PrefixRows.scores`."""
        try:
            return super().scores(adapter, texts)
        except BaseException:
            if self.forward.storage.lost:
                self.clear()
            raise

    def clear(self) -> None:
        """Remove everything computed, kept prefixes included, and free its memory."""
        super().clear()
        self.forward.clear()
