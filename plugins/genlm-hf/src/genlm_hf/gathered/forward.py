"""Tier `gathered`: every token once, through the model's own attention and cache.

For decoder-only models whose layers keep plain keys and values, but attend in code of
their own. What it costs beside the packed tier is the gathering of every sequence's
whole past, which the model's own cache would copy as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm.prefix import (
    Computed,
    Segment,
    SegmentBatch,
    SegmentLimits,
    TreeBatch,
    group_segments,
    places_of,
    waves_of,
)
from genlm_hf.forward import accepted, evaluation_mode, head_sees
from genlm_hf.gathered.cache import RecordingCache, SlotCache
from genlm_hf.storage import KVStorage, LayerShape
from genlm_hf.tiers.tier import ServedModel
from genlm_hf.unfit import UnfitModelError

__all__ = ["GatheredForward", "read_cache"]

_NEEDED = ("past_key_values", "attention_mask", "use_cache")


class GatheredForward:
    """Runs a model over what is fresh in a tree, in padded batches; see `Computing`.

    Args:
        served: The model.
        shapes: What its layers keep of a token.
    """

    def __init__(self, served: ServedModel, shapes: Sequence[LayerShape]) -> None:
        self.shapes = shapes
        self._served = served
        self._limits = SegmentLimits(served.max_tokens, served.max_context)

    def compute(self, batch: TreeBatch, storage: KVStorage) -> Computed:
        """Run wave after wave, each in as few passes as padding allows."""
        wanted = set(batch.last_slots)
        parts: list[torch.Tensor] = []
        places: dict[int, int] = {}
        tokens = forwards = 0
        for wave in waves_of(batch):
            for segments in group_segments(wave, self._limits):
                ends = places_of(segments, wanted)
                for slot, _, _ in ends:
                    places[slot] = len(places)
                results = np.array([end[1:] for end in ends], np.int64).reshape(-1, 2)
                side_by_side = SegmentBatch(segments, self._served.pad_id)
                parts.append(self._logits(side_by_side, storage, results))
                tokens += sum(len(segment.tokens) for segment in segments)
                forwards += 1
        logits = torch.cat(parts)
        order = torch.tensor([places[slot] for slot in batch.last_slots], device=logits.device)
        return Computed(logits[order], tokens, forwards)

    def _logits(
        self, batch: SegmentBatch, storage: KVStorage, results: np.ndarray[Any, Any]
    ) -> torch.Tensor:
        """Run one pass; logits at the given (segment, token) places."""
        device, model = self._served.device, self._served.model
        where = torch.from_numpy(results).to(device)
        inputs = _inputs(model, batch, device)
        taken = False

        def take(states: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            taken = True
            rows, tokens = where.to(states.device).unbind(1)
            return states[rows, tokens][None]

        with (
            torch.inference_mode(),
            evaluation_mode(model),
            head_sees(model, batch.tokens.shape, take),
        ):
            output = model(**inputs, past_key_values=SlotCache(storage, batch))
            logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
            return (logits if taken else take(logits))[0]


def read_cache(served: ServedModel, length: int) -> list[LayerShape]:
    """Return what each layer of a model hands to its cache, found out by running it once.

    Args:
        served: The model.
        length: How many tokens to run.

    Raises:
        UnfitModelError: It has no such cache, or puts other things into it.
    """
    model, device = served.model, served.device
    missing = [name for name in _NEEDED if not accepted(model, {name: None})]
    if missing:
        raise UnfitModelError(f"its forward takes no {missing[0]}")
    cache = RecordingCache()
    slots = np.arange(1, length + 1, dtype=np.int64)
    batch = SegmentBatch([Segment((0,) * length, slots, slots)], served.pad_id)
    try:
        with torch.inference_mode(), evaluation_mode(model):
            model(**_inputs(model, batch, device), past_key_values=cache)
    except Exception as error:
        raise UnfitModelError(
            f"with another cache its forward pass raises {type(error).__name__}: {error}"
        ) from error
    if cache.problems:
        raise UnfitModelError(cache.problems[0])
    if sorted(cache.shapes) != list(range(len(cache.shapes))):
        raise UnfitModelError(f"only its layers {sorted(cache.shapes)} use the cache")
    return [cache.shapes[index] for index in range(len(cache.shapes))]


def _inputs(model: Any, batch: SegmentBatch, device: torch.device) -> dict[str, Any]:
    inputs = {
        "input_ids": torch.from_numpy(batch.tokens).to(device),
        "attention_mask": torch.from_numpy(batch.is_token).to(device).long(),
        "use_cache": True,
        "position_ids": torch.from_numpy(batch.positions).to(device),
        "return_dict": True,
    }
    return accepted(model, inputs)
