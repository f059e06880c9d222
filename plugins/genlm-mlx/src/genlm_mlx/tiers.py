"""Two ways to compute rows: every token once, from a prefix tree, or every context anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import torch

from genlm import Vocabulary, rows_from_logits
from genlm.prefix import BatchLimits, PrefixRows, SegmentLimits, plan_batches, slots_within
from genlm_mlx.forward import GatheredForward, own_logits, read_shapes, read_windows
from genlm_mlx.rotary import PublishedRoPE
from genlm_mlx.storage import KVStorage, default_budget_bytes

__all__ = ["GatheredTier", "ServeOptions", "Tier", "UncachedTier"]

# Logits of one pass: 2**26 in float32 are 256 MiB.
_LOGITS_PER_PASS = 2**26


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; the fields are `MLXEngine`'s arguments.

    Raises:
        ValueError: A limit makes no sense.
    """

    max_tokens_per_batch: int
    kv_budget_bytes: int | None = None
    tier: str | None = None
    self_test: bool = True
    max_context: int | None = None
    unverified: str = "warn"

    def __post_init__(self) -> None:
        most = self.max_tokens_per_batch
        if not (isinstance(most, int) and most >= 1):
            raise ValueError(f"max_tokens_per_batch={most!r}; a whole number, at least 1")
        budget = self.kv_budget_bytes
        if budget is not None and not (isinstance(budget, int) and budget >= 0):
            raise ValueError(f"kv_budget_bytes={budget!r}; a whole number of bytes, at least 0")
        context = self.max_context
        if context is not None and not (isinstance(context, int) and context >= 1):
            raise ValueError(f"max_context={context!r}; a whole number of tokens, at least 1")
        if self.tier not in {None, "gathered", "uncached"}:
            raise ValueError(
                f"no tier {self.tier!r}; the tiers are 'gathered', 'uncached', None chooses"
            )


class Tier(Protocol):
    """Computes rows; which adapter is at work in the model is the caller's business.

    Attributes:
        name: As in the option `tier`.
        reason: Why it was chosen.
    """

    name: str
    reason: str

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return the row of each sequence, shape `(len(sequences), vocabulary.size)`."""
        ...

    def next_pass(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]]
    ) -> Sequence[int]:
        """Choose what a step computes, about one pass; their places, 0 among them."""
        ...

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return what was computed; called from any thread."""
        ...


class UncachedTier:
    """Every context anew, through the model's own cache, those of one length together."""

    name = "uncached"

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        options: ServeOptions,
        rotary: Sequence[PublishedRoPE] = (),
    ) -> None:
        self.reason = "asked for"
        self._rotary = rotary
        self._model, self._vocabulary = model, vocabulary
        self._piece = options.max_tokens_per_batch
        self._forwards = self._tokens_computed = 0

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:  # noqa: ARG002 - see Tier
        """Compute rows in as few passes as limits and lengths allow."""
        rows = torch.empty(len(sequences), self._vocabulary.size)
        for batch in self._batches([len(sequence) for sequence in sequences]):
            chosen = [sequences[i] for i in batch]
            piece = max(1, self._piece // len(chosen))
            for rope in self._rotary:
                rope.set_length(len(chosen[0]))
            logits = own_logits(self._model, chosen, piece)
            rows[batch] = rows_from_logits(logits, self._vocabulary)
            self._forwards += 1 + -(-(len(chosen[0]) - 1) // piece)
            self._tokens_computed += sum(map(len, chosen))
        return rows

    def next_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see Tier
        sequences: Sequence[tuple[int, ...]],
    ) -> Sequence[int]:
        """Choose the first and others, of about as many tokens in all as a pass may have."""
        totals = itertools.accumulate(map(len, sequences))
        return range(max(1, sum(total <= self._piece for total in totals)))

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        most = max(1, min(self._piece, _LOGITS_PER_PASS // self._vocabulary.size))
        unlimited = max(lengths) * most
        return plan_batches(lengths, BatchLimits(unlimited, most, equal_lengths=True))

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work."""
        return {"tokens_computed": self._tokens_computed, "forwards": self._forwards}


class GatheredTier:
    """Every token once, from a prefix tree.

    Attributes:
        is_exact: Whether the model computes in float32.

    Raises:
        UnfitModelError: The model keeps something else than keys and values of its past.
    """

    name = "gathered"

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        options: ServeOptions,
        *,
        max_context: int | None,
        uncached: UncachedTier,
    ) -> None:
        self.reason = "asked for" if options.tier else "the fastest"
        windows = read_windows(model)
        shapes, width = read_shapes(model, len(windows))
        token_bytes = sum(shape.bytes_per_token for shape in shapes)
        budget = options.kv_budget_bytes
        if budget is None:
            budget = default_budget_bytes(token_bytes)
        self._storage = KVStorage(shapes, slots_within(budget, token_bytes))
        self.is_exact = all(shape.dtype == mx.float32 for shape in shapes)
        self._forward = GatheredForward(
            model,
            windows,
            self._storage,
            limits=SegmentLimits(options.max_tokens_per_batch, max_context),
            width=width,
            budget_bytes=budget,
        )
        self._rows = PrefixRows(
            self._forward,
            without_cache=lambda sequence: uncached.rows(None, [sequence]),
            vocabulary=vocabulary,
            budget_bytes=budget,
            bytes_per_token=token_bytes,
            max_tokens=options.max_tokens_per_batch,
            max_rows=max(1, _LOGITS_PER_PASS // width),
        )

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Compute rows in one pass, or in several where limits or memory ask for it."""
        try:
            return self._rows.rows(adapter, sequences)
        except BaseException:
            if self._storage.lost:
                self.clear()
            raise

    def next_pass(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]]
    ) -> Sequence[int]:
        """Choose the first and what fits beside it."""
        return self._rows.next_pass(adapter, sequences)

    def keep(self, adapter: str | None, token_ids: tuple[int, ...]) -> None:
        """Compute a prefix and keep it until `clear`.

        Raises:
            EvaluationError: It does not fit into the budget beside what is kept.
        """
        self._rows.keep(adapter, token_ids)

    def clear(self) -> None:
        """Forget everything computed, kept or not."""
        self._rows.clear()
        self._forward.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work and the state of the cache."""
        return self._rows.statistics()
