"""Attention over slots, registered with transformers as an attention function.

The model computes queries, keys and values as always and calls this function
instead of its own attention. It stores the keys and values in their slots and
lets every token attend to the slots of its own past. Nothing depends on
transformers' caches or masks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from genlm_hf.packed.device_plan import DeviceGroup, DevicePlan, DeviceRun
from genlm_hf.packed.layout import AttentionLayout
from genlm_hf.packed.plan import PackedPlan
from genlm_hf.storage import KVStorage

__all__ = ["PACKED_ATTENTION", "packed_step", "register"]

PACKED_ATTENTION = "genlm_packed"

# Most entries of a mask, or of all heads' scores, at once: 4 MiB, or 16 in float32.
_MASK_ENTRIES = 2**22


class _Step(threading.local):
    """What the pass that runs on this thread needs."""

    layout: AttentionLayout
    storage: KVStorage
    plan: PackedPlan
    on_device: dict[torch.device, DevicePlan]


_step = _Step()


@dataclass(frozen=True, slots=True)
class _How:
    """What all tokens of a layer share.

    Attributes:
        scale: Of products of queries and keys.
        window: How many tokens a token sees; None for all.
        softcap: Scores are bent to stay below it; None for no bending.
        sinks: A score for each head that takes its share of the weights for nothing,
            shape (heads of keys, heads of queries for each); None for none.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def register() -> None:
    """Make the function known to transformers, which asks no mask for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)


@contextmanager
def packed_step(
    layout: AttentionLayout,
    storage: KVStorage,
    plan: PackedPlan,
    on_device: dict[torch.device, DevicePlan],
) -> Iterator[None]:
    """Let forward passes on this thread follow `plan`, which may be on devices already."""
    _step.layout, _step.storage = layout, storage
    _step.plan, _step.on_device = plan, on_device
    try:
        with layout.runs(PACKED_ATTENTION):
            yield
    finally:
        del _step.layout, _step.storage, _step.plan, _step.on_device


def _packed_attention(  # noqa: PLR0917 - as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: `query` is `(1, heads, tokens, width)`; returns `(1, tokens, heads, width)`.

    Keyword arguments beyond these were checked when the layout was made. `s_aux` is what
    transformers calls attention sinks.
    """
    assert attention_mask is None  # noqa: S101 - our own mistake
    layer = _step.layout.layer(module)
    plan = _step.on_device.get(query.device)
    if plan is None:
        plan = _step.on_device[query.device] = DevicePlan(_step.plan, query.device)
    keys, values = _step.storage.write(layer.index, plan.writes, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = s_aux.view(keys.shape[0], -1) if s_aux is not None and layer.sinks else None
    how = _How(scale, layer.window, layer.softcap, sinks)
    parts, first = [], 0
    for group in plan.groups:
        part = query[0, :, first : first + group.count]
        parts.append(_rows(part, keys, values, group=group, how=how))
        first += group.count
    for run in plan.runs:
        part = query[0, :, first : first + run.length]
        parts.append(_run(part, keys, values, run=run, how=how))
        first += run.length
    return _joined(parts).transpose(0, 1)[None].contiguous(), None


def _rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    group: DeviceGroup,
    how: _How,
) -> torch.Tensor:
    """Attend from `(heads, rows, width)` to the trunk, read once, and to each row's tail.

    One softmax covers both, in float32.
    """
    heads, count, trunk = keys.shape[0], group.count, group.trunk_length
    per_head = query.shape[0] // heads
    grouped = query.view(heads, per_head, count, -1).transpose(1, 2) * how.scale
    scores = _joined(
        [grouped[:, rows] @ tails.transpose(2, 3) for rows, tails in group.tails_of(keys)]
    )
    if trunk:
        flat = grouped.reshape(heads, count * per_head, -1)
        shared = torch.bmm(flat, group.trunk_of(keys).transpose(1, 2))
        scores = torch.cat([shared.view(heads, count, per_head, trunk), scores], dim=-1)
    weights = _weights(scores, group.hidden(how.window), how).to(query.dtype)
    output = _joined(
        [weights[:, rows, :, trunk:] @ tails for rows, tails in group.tails_of(values)]
    )
    if trunk:
        flat = weights[..., :trunk].reshape(heads, count * per_head, trunk)
        output = output + torch.bmm(flat, group.trunk_of(values)).view(output.shape)
    return output.transpose(1, 2).reshape(query.shape[0], count, -1)


def _run(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    run: DeviceRun,
    how: _How,
) -> torch.Tensor:
    """Attend from the consecutive tokens `(heads, run, width)` to their past and themselves."""
    if how.softcap is not None or how.sinks is not None:
        return _unusual_run(query, keys, values, run=run, how=how)
    own_keys, own_values = run.all_of(keys)[None], run.all_of(values)[None]
    shared_heads = keys.shape[0] != query.shape[0]
    if run.past == 0 and (how.window is None or run.length <= how.window):
        return scaled_dot_product_attention(
            query[None],
            own_keys,
            own_values,
            is_causal=True,
            scale=how.scale,
            enable_gqa=shared_heads,
        )[0]
    rows = max(1, _MASK_ENTRIES // (run.past + run.length))
    parts = []
    for first in range(0, run.length, rows):
        end = min(first + rows, run.length)
        seen = run.seen(first, end, how.window)
        part = scaled_dot_product_attention(
            query[None, :, first:end],
            own_keys[:, :, seen],
            own_values[:, :, seen],
            attn_mask=run.visible(first, end, how.window)[:, seen],
            scale=how.scale,
            enable_gqa=shared_heads,
        )
        parts.append(part[0])
    return _joined(parts)


def _unusual_run(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    run: DeviceRun,
    how: _How,
) -> torch.Tensor:
    """Do as `_run`, where torch's own function knows no caps or sinks."""
    own_keys, own_values = run.all_of(keys), run.all_of(values)
    heads, seen = own_keys.shape[:2]
    grouped = query.view(heads, -1, run.length, query.shape[-1]).transpose(1, 2) * how.scale
    per_head = grouped.shape[2]
    rows = max(1, _MASK_ENTRIES // (seen * query.shape[0]))
    parts = []
    for first in range(0, run.length, rows):
        part = grouped[:, first : first + rows]
        count = part.shape[1]
        flat = part.reshape(heads, count * per_head, -1)
        scores = torch.bmm(flat, own_keys.transpose(1, 2)).view(heads, count, per_head, seen)
        hidden = ~run.visible(first, first + count, how.window)
        weights = _weights(scores, hidden, how).to(query.dtype)
        found = torch.bmm(weights.view(heads, count * per_head, seen), own_values)
        parts.append(found.view(heads, count, per_head, -1))
    return _joined(parts).transpose(1, 2).reshape(query.shape[0], run.length, -1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put parts one after the other along the second dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)


def _weights(scores: torch.Tensor, hidden: torch.Tensor | None, how: _How) -> torch.Tensor:
    """From scores (heads of keys, rows, heads for each, keys) to weights, in float32.

    Args:
        scores: Scaled products of queries and keys.
        hidden: What a row must not see, (rows, keys); None if every row sees all.
        how: Caps and sinks.
    """
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if how.sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    sinks = how.sinks[:, None, :, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
