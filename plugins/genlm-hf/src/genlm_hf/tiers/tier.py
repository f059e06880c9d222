"""What a tier is: one way to compute rows with one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from genlm import Vocabulary

__all__ = ["PrefixTier", "ServedModel", "Tier"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and what all tiers need to know of it.

    Attributes:
        model: Of transformers' interface.
        vocabulary: The tokenizer's.
        device: Where the model takes its input.
        embedding_rows: Ids from 0 up to here can be embedded.
        pad_id: Fills up batches.
        max_context: The most tokens it takes, None for no limit.
        max_tokens: The most positions in one forward pass; without a cache a longer
            context still passes, alone.
        max_rows: The most results of one forward pass, which bounds its logits.
    """

    model: Any
    vocabulary: Vocabulary
    device: torch.device
    embedding_rows: int
    pad_id: int
    max_context: int | None
    max_tokens: int
    max_rows: int


class Tier(Protocol):
    """Computes rows; which adapter is at work in the model is the caller's business.

    Attributes:
        name: As in the option `tier`.
    """

    name: str

    def rows(self, adapter: str | None, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Compute the next-token row of each sequence.

        Args:
            adapter: Name of the adapter that is at work.
            sequences: At least one; ids that the model can embed, none empty.

        Returns:
            Shape `(len(sequences), vocabulary.size)`, float32, on the model's device.
        """
        ...

    def next_pass(
        self, adapter: str | None, sequences: Sequence[tuple[int, ...]]
    ) -> Sequence[int]:
        """Choose sequences whose rows take one forward pass, if the first alone does.

        Args:
            adapter: Under which they will be asked for.
            sequences: At least one, the most urgent first.

        Returns:
            Their places, 0 among them.
        """
        ...

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return what was computed; called from any thread."""
        ...


@runtime_checkable
class PrefixTier(Tier, Protocol):
    """A tier that keeps what it computed."""

    def keep(self, adapter: str | None, token_ids: tuple[int, ...]) -> None:
        """Compute a prefix and keep it until `clear`."""
        ...

    def clear(self) -> None:
        """Forget everything computed."""
        ...
