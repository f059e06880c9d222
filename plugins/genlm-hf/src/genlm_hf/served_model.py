"""A model with the properties and limits that its execution paths use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from genlm.plugin import Vocabulary
from genlm_hf.quantised import is_quantised

# Maximum errors in log-probability. Other dtypes and quantised weights round more.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 3e-2}
_COARSE_TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with the properties that all execution paths use.

    Attributes:
        model: A transformers model.
        vocabulary: The tokenizer's vocabulary.
        device: Device of the model's input.
        embedding_rows: Number of ids, from 0 on, that the model can embed.
        max_context: Maximum number of tokens of a context, None for no limit.
        max_tokens: Maximum number of positions in one forward pass; without a cache a longer
            context still runs, in a separate pass.
        max_rows: Maximum number of results of one pass, which bounds its logits.
    """

    model: Any
    vocabulary: Vocabulary
    device: torch.device
    embedding_rows: int
    max_context: int | None
    max_tokens: int
    max_rows: int

    @property
    def row_tolerance(self) -> float:
        """Largest error in log-probability that rounding explains."""
        tolerances = {} if is_quantised(self.model) else _TOLERANCE
        return tolerances.get(self.model.dtype, _COARSE_TOLERANCE)


def embedding_rows(model: Any) -> int | None:
    """Return how many ids the model can embed, None if that is unknown."""
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if isinstance(rows, int):
        return rows
    weight = getattr(embedding, "weight", None)
    return int(weight.shape[0]) if weight is not None and weight.ndim == 2 else None


def input_device(model: Any) -> torch.device:
    """Return the device of a model's input; the model may be spread over several devices."""
    device: torch.device = model.get_input_embeddings().weight.device
    # Offloaded weights are on "meta"; accelerate then moves the inputs.
    return torch.device("cpu") if device.type == "meta" else device


def is_offloaded(model: Any) -> bool:
    """Whether weights stay on disk or a CPU until a pass needs them."""
    return any(parameter.is_meta for parameter in model.parameters())
