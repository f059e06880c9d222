"""The two execution paths: a prefix tree over slots, or mlx-lm's cache for every context.

The prefix tree supports models whose layers keep plain keys and values of their past. A
self-test at loading compares its rows with those of mlx-lm's cache.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache

from genlm.plugin import TokenSequence, Vocabulary
from genlm.prefix import (
    BatchLimits,
    Integers64,
    PathChoice,
    PrefixRows,
    SegmentLimits,
    SelfTest,
    ServeOptions,
    UncachedPath,
    choose_path,
)
from genlm_mlx.forward import LOGITS_PER_PASS, SlotCacheForward, as_tensor

PATHS = ("slot_cache", "uncached")
"""Execution paths, fastest first."""

DEFAULT_TOKENS_PER_BATCH = 2048


def choose_execution_path(
    model: Any,
    vocabulary: Vocabulary,
    options: ServeOptions,
    *,
    max_context: int | None,
    embedding_rows: int,
) -> PathChoice:
    """Return the faster execution path that gives the right rows, or the requested one.

    Args:
        model: An mlx-lm model.
        vocabulary: The tokenizer's vocabulary.
        options: Options of the engine.
        max_context: Maximum number of tokens of a context.
        embedding_rows: Number of ids, from 0 on, that the model can embed.

    Raises:
        ModelLoadError: The requested path does not support the model.
    """
    max_tokens = options.max_tokens_per_batch or DEFAULT_TOKENS_PER_BATCH
    uncached = ModelCachePath(model, vocabulary, max_tokens)

    def slot_cache(budget: int | None) -> SlotCachePath:
        limits = SegmentLimits(max_tokens, max_context)
        forward = SlotCacheForward(model, budget, limits)
        return SlotCachePath(
            forward,
            uncached=uncached,
            vocabulary=vocabulary,
            budget_bytes=forward.budget_bytes,
            bytes_per_token=forward.bytes_per_token,
            max_tokens=max_tokens,
            max_rows=max(1, LOGITS_PER_PASS // forward.width),
        )

    def self_test(path: SlotCachePath) -> float:
        text = range(min(embedding_rows, vocabulary.size))
        tolerance = path.forward.tolerance
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


class ModelCachePath(UncachedPath):
    """Recomputes every context through mlx-lm's cache; batches contexts of one length.

    Args:
        model: An mlx-lm model.
        vocabulary: The tokenizer's vocabulary.
        max_tokens: Maximum number of new positions in one pass.
    """

    def __init__(self, model: Any, vocabulary: Vocabulary, max_tokens: int) -> None:
        max_rows = max(1, min(max_tokens, LOGITS_PER_PASS // vocabulary.size))
        # Batches have any number of tokens, which run in several passes: recurrent layers
        # compute the tokens of a sequence one after the other.
        limits = BatchLimits(sys.maxsize, max_rows, equal_lengths=True)
        super().__init__(vocabulary, limits)
        self._model, self._max_tokens = model, max_tokens

    @property
    def score_limits(self) -> BatchLimits:
        """Limits of a batch of texts; `run` limits the logits of its passes."""
        return self.limits

    def next_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see PrefixRows
        sequences: Sequence[TokenSequence],
        firsts: Sequence[int] | None = None,  # noqa: ARG002 - `run` limits logits
    ) -> Sequence[int]:
        """Choose the first sequences, up to about the number of tokens of one pass."""
        totals = itertools.accumulate(map(len, sequences))
        return range(max(1, sum(total <= self._max_tokens for total in totals)))

    def run(
        self, sequences: Sequence[Sequence[int]], firsts: Integers64
    ) -> Iterator[tuple[Integers64, torch.Tensor]]:
        """Run sequences of one length through mlx-lm's cache; see `UncachedPath`."""
        ids = np.array(sequences, np.int32)
        count, length = ids.shape
        cache = make_prompt_cache(self._model)
        is_requested = np.arange(length) >= firsts[:, None]
        first = int(firsts.min())  # MLX does not compute the logits before it
        pieces = [(0, first, self._max_tokens), (first, length, self.limits.max_rows)]
        bounds = [
            (begin, min(begin + step, stop))
            for start, stop, max_positions in pieces
            for step in [max(1, max_positions // count)]
            for begin in range(start, stop, step)
        ]
        for begin, end in bounds:
            logits = self._model(mx.array(ids[:, begin:end]), cache=cache)
            indices = np.argwhere(is_requested[:, begin:end]).T
            results = [logits[tuple(map(mx.array, indices))]] if indices.size else []
            mx.eval([layer.state for layer in cache], *results)
            if results:
                indices[1] += begin
                yield indices, as_tensor(results[0])
        self.count(sequences, len(bounds))


class SlotCachePath(PrefixRows):
    """Computes every token once, from a prefix tree."""

    forward: SlotCacheForward

    def restore(self) -> None:
        """Remove tokens that were not computed, or all tokens if a write failed half-way."""
        super().restore()
        if self.forward.storage.is_corrupt:
            self.clear()

    def clear(self) -> None:
        """Remove all cached tokens, pinned prefixes included, and free their memory."""
        super().clear()
        self.forward.clear()
