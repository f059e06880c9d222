"""The tiers with a cache: rows from a prefix tree over tensors of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from genlm.prefix import Computed, PrefixRows, TreeBatch
from genlm_hf.storage import KVStorage, LayerShape, default_budget_bytes
from genlm_hf.tiers.padded import PaddedTier
from genlm_hf.tiers.tier import ServedModel

__all__ = ["CachedTier", "StoredForward"]


class StoredForward(Protocol):
    """One way to run a model over what is fresh in a tree."""

    @property
    def shapes(self) -> Sequence[LayerShape]:
        """What each layer keeps of a token, in the order in which layers run."""
        ...

    def compute(self, batch: TreeBatch, storage: KVStorage) -> Computed:
        """Store keys and values of all that is fresh; return the sequences' logits."""
        ...


class CachedTier:
    """Rows of `PrefixRows` with a way to run the model; see `Tier`.

    A context too long for the whole budget is computed by the padded tier, without a cache.

    Args:
        name: Of the tier.
        served: The model.
        forward: Runs it over what is not in the tree yet.
        padded: Serves what does not fit.
        kv_budget_bytes: The most that keys and values take; None for the default.
    """

    def __init__(
        self,
        name: str,
        served: ServedModel,
        forward: StoredForward,
        *,
        padded: PaddedTier,
        kv_budget_bytes: int | None,
    ) -> None:
        if kv_budget_bytes is None:
            kv_budget_bytes = default_budget_bytes(forward.shapes)
        self.name = name
        self._storage = storage = KVStorage(forward.shapes, kv_budget_bytes)
        self._rows = PrefixRows(
            lambda batch: forward.compute(batch, storage),
            without_cache=lambda sequence: padded.rows(None, [sequence]),
            vocabulary=served.vocabulary,
            budget_bytes=kv_budget_bytes,
            bytes_per_token=storage.bytes_per_token,
            max_tokens=served.max_tokens,
            max_rows=served.max_rows,
        )
        self._device = served.device

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Compute rows in one pass, or in several where limits or memory ask for it."""
        return self._rows.rows(adapter, sequences).to(self._device)

    def next_pass(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]]
    ) -> Sequence[int]:
        """Choose the first and whatever fits beside it, computed prefixes left aside."""
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

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work and the state of the cache."""
        return self._rows.statistics()
