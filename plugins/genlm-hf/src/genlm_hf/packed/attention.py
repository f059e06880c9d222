"""Attention over slots, registered with transformers as an attention function.

The model computes queries, keys and values as always and calls this function
instead of its own attention. It stores the keys and values in their slots and
lets every token attend to the slots of its own past. Nothing depends on
transformers' caches or masks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from torch.nn.functional import scaled_dot_product_attention

from genlm_hf.kv.storage import KVStorage
from genlm_hf.packed.device_plan import DeviceGroup, DevicePlan, DeviceRun
from genlm_hf.packed.layout import AttentionLayout
from genlm_hf.packed.plan import PackedPlan

__all__ = ["PACKED_ATTENTION", "packed_step", "register"]

PACKED_ATTENTION = "genlm_packed"

# Most entries of a mask at once (rows of a run times its keys): 4 MiB of booleans.
_MASK_ENTRIES = 2**22


class _Step(threading.local):
    """What the pass that runs on this thread needs."""

    layout: AttentionLayout
    storage: KVStorage
    plan: PackedPlan
    on_device: dict[torch.device, DevicePlan]


_step = _Step()


class _How(TypedDict):
    """What all tokens of a layer share."""

    scale: float
    window: int | None


def register() -> None:
    """Make the function known to transformers, which asks no mask for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)


@contextmanager
def packed_step(
    layout: AttentionLayout, storage: KVStorage, plan: PackedPlan
) -> Iterator[None]:
    """Let forward passes on this thread follow `plan`."""
    _step.layout, _step.storage, _step.plan, _step.on_device = layout, storage, plan, {}
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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: `query` is `(1, heads, tokens, width)`; returns `(1, tokens, heads, width)`.

    Keyword arguments beyond these were checked when the layout was made.
    """
    assert attention_mask is None  # noqa: S101 - our own mistake
    layer = _step.layout.layer(module)
    plan = _step.on_device.get(query.device)
    if plan is None:
        plan = _step.on_device[query.device] = DevicePlan(_step.plan, query.device)
    keys, values = _step.storage.write(layer.index, plan.writes, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how: _How = {"scale": scale, "window": layer.window}
    parts, first = [], 0
    for group in plan.groups:
        part = query[0, :, first : first + group.count]
        parts.append(_rows(part, keys, values, group=group, **how))
        first += group.count
    for run in plan.runs:
        part = query[0, :, first : first + run.length]
        parts.append(_run(part, keys, values, run=run, **how))
        first += run.length
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return output.transpose(0, 1)[None], None


def _rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    group: DeviceGroup,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend from `(heads, rows, width)` to the trunk, read once, and to each row's tail.

    One softmax covers both, in float32.
    """
    heads, (count, trunk, tail) = keys.shape[0], group.shape
    per_head = query.shape[0] // heads
    grouped = query.view(heads, per_head, count, -1).transpose(1, 2) * scale
    tail_keys = keys.index_select(1, group.tails).view(heads, count, tail, -1)
    tail_values = values.index_select(1, group.tails).view(heads, count, tail, -1)
    scores = torch.matmul(grouped, tail_keys.transpose(2, 3))
    if trunk:
        flat = grouped.reshape(heads, count * per_head, -1)
        shared = torch.bmm(flat, group.trunk_of(keys).transpose(1, 2))
        scores = torch.cat([shared.view(heads, count, per_head, trunk), scores], dim=-1)
    hidden = group.hidden(window)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    output = torch.matmul(weights[..., trunk:], tail_values)
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
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend from the consecutive tokens `(heads, run, width)` to their past and themselves."""
    own_keys, own_values = run.all_of(keys)[None], run.all_of(values)[None]
    shared_heads = keys.shape[0] != query.shape[0]
    if run.past == 0 and (window is None or run.length <= window):
        return scaled_dot_product_attention(
            query[None],
            own_keys,
            own_values,
            is_causal=True,
            scale=scale,
            enable_gqa=shared_heads,
        )[0]
    rows = max(1, _MASK_ENTRIES // (run.past + run.length))
    parts = [
        scaled_dot_product_attention(
            query[None, :, first : first + rows],
            own_keys,
            own_values,
            attn_mask=run.visible(first, min(first + rows, run.length), window),
            scale=scale,
            enable_gqa=shared_heads,
        )[0]
        for first in range(0, run.length, rows)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
