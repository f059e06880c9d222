"""Execution path `packed`: one packed forward pass over all uncached tokens.

For decoder-only models whose layers mix tokens by plain attention only. The model computes
queries, keys and values and calls an attention function that is registered with transformers.
The function stores keys and values in their slots, and every token attends to the slots of
its past. It does not use transformers' caches or masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from genlm.prefix import ForwardResult, TokenBatch
from genlm_hf.packed.device_plan import (
    DeviceChunk,
    DeviceChunks,
    DeviceGroup,
    DevicePlan,
)
from genlm_hf.packed.kernel_steps import KernelSteps
from genlm_hf.packed.layout import AttentionLayer, AttentionLayout
from genlm_hf.packed.plan import PackedPlan, SharedLengths, plan_pass
from genlm_hf.served_model import ServedModel
from genlm_hf.storage import KVStorage

# Maximum entries of a mask, or of the scores of all heads, at once: 4 MiB, or 16 in float32.
_MASK_ENTRIES = 2**22

# Scores of a head between the tokens of a group and their prefix from which torch's attention
# for CPUs is faster than matrix products: by 15 % with 200 tokens and 512 slots, 2.5 times with
# 1,000, as scores no longer fit into the cache. With 50 tokens and 512 slots it is slower.
_MANY_SCORES = 2**16

# Devices with fused kernels that take a causal flag, or a mask if heads are not shared.
_FUSED_DEVICES = {"cuda", "xpu"}

# Also returns the log-sum-exps that merge attention over parts of the past.
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001

# Computes sequences of different lengths in one call. Its public counterpart,
# `torch.nn.attention.varlen.varlen_attn`, does not support shared heads in torch 2.11.
_flash_on_cuda = torch.ops.aten._flash_attention_forward  # noqa: SLF001
_MAX_FLASH_WIDTH = 256


class PackedForward:
    """Runs a model over the tokens of a batch, as one sequence."""

    def __init__(
        self, served: ServedModel, layout: AttentionLayout, storage: KVStorage
    ) -> None:
        self.storage, self._layout = storage, layout
        self._served, self._device = served, served.device
        self._kernels: KernelSteps | None = None
        self._shared_lengths = SharedLengths()

    def use_kernels(self, *, graphs: bool) -> KernelSteps:
        """Create the kernels that compute steps from now on, and return them.

        Args:
            graphs: Whether steps are replayed from CUDA graphs.

        Raises:
            UnsupportedModelError: The kernels cannot compute steps of this model.
        """
        self._kernels = KernelSteps(self._served, self._layout, self.storage, graphs=graphs)
        return self._kernels

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        """Run one pass with explicit positions and without a mask."""
        plan = plan_pass(batch, self._shared_lengths)
        if self._kernels is None:
            logits = self._logits(plan)
        else:
            logits = self._kernels(plan, batch.adapter, self._logits)
        return ForwardResult(logits, tokens=len(plan.tokens), forwards=1)

    def _logits(self, plan: PackedPlan) -> torch.Tensor:
        device_plan = functools.cache(functools.partial(DevicePlan, plan))
        first = device_plan(self._device)
        attend = functools.partial(_attend, device_plan, self.storage)
        logits = self._layout.compute_logits(
            first.tokens, first.positions, first.results, attend
        )
        return logits.to(self._device)


def _attend(  # noqa: PLR0917 - as `Attend`
    device_plan: Callable[[torch.device], DevicePlan],
    storage: KVStorage,
    layer: AttentionLayer,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Store the keys and values of a pass, and attend group by group, chunk by chunk."""
    query, key, value = states
    plan = device_plan(query.device)
    keys, values = storage.write(layer.index, plan.writes, key, value)
    attention = _Attention(layer, keys, values, scale=scale, sinks=sinks)
    parts, first = [], 0
    for group in plan.groups:
        parts.append(attention.group(query[:, first : first + group.count], group))
        first += group.count
    if attention.merges_chunks(query):
        for chunks in plan.merged_chunks:
            parts.append(attention.chunks(query[:, first : first + chunks.length], chunks))
            first += chunks.length
        return _concatenate(parts).transpose(0, 1).contiguous()
    for chunk in plan.chunks:
        parts.append(attention.chunk(query[:, first : first + chunk.length], chunk))
        first += chunk.length
    return _concatenate(parts).transpose(0, 1).contiguous()


class _Attention:
    """Attention of one layer, from queries `(heads, tokens, width)` to slots.

    Args:
        layer: The layer.
        keys: Keys of all slots, `(key heads, slots, width)`.
        values: Values of all slots.
        scale: Factor of the products of queries and keys.
        sinks: Attention sinks, a score for each query head; None without sinks.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        self._keys, self._values, self._scale = keys, values, scale
        self._window, self._softcap = layer.window, layer.softcap
        self._sinks = None if sinks is None else sinks.view(len(keys), 1, -1, 1)
        self._is_plain = layer.softcap is None and sinks is None

    def group(self, query: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
        """Attend to the shared prefix and to each token's suffix.

        One softmax covers both, in float32.
        """
        keys, values, hidden = self._keys, self._values, group.hidden(self._window)
        on_cpu = query.device.type == "cpu" and keys.shape[2] == values.shape[2]
        is_large = group.count * group.prefix_length >= _MANY_SCORES
        if self._is_plain and hidden is None and on_cpu and is_large:
            return self._compute_plain_group(query, group)
        heads, count, prefix = keys.shape[0], group.count, group.prefix_length
        grouped = query.view(heads, -1, count, query.shape[2]).transpose(1, 2) * self._scale
        per_head = grouped.shape[2]
        scores = _concatenate(
            [
                grouped[:, tokens] @ suffixes.transpose(2, 3)
                for tokens, suffixes in group.suffixes_of(keys)
            ]
        )
        if prefix:
            flat = grouped.reshape(heads, count * per_head, -1)
            shared = torch.bmm(flat, group.prefix.select(keys).transpose(1, 2))
            scores = torch.cat([shared.view(heads, count, per_head, prefix), scores], dim=-1)
        weights = self._weights(scores, hidden).to(query.dtype)
        output = _concatenate(
            [
                weights[:, tokens, :, prefix:] @ suffixes
                for tokens, suffixes in group.suffixes_of(values)
            ]
        )
        if prefix:
            flat = weights[..., :prefix].reshape(heads, count * per_head, prefix)
            output = output + torch.bmm(flat, group.prefix.select(values)).view(output.shape)
        return output.transpose(1, 2).reshape(query.shape[0], count, -1)

    def _compute_plain_group(self, query: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
        """Compute `group` on a CPU: prefix and suffixes separately, then merged."""
        heads, count, scale = self._keys.shape[0], group.count, self._scale
        grouped = query.view(heads, -1, count, query.shape[2])
        per_head = grouped.shape[1]
        flat = grouped.transpose(1, 2).reshape(1, heads, count * per_head, -1)
        prefixes = (group.prefix.select(states)[None] for states in (self._keys, self._values))
        prefix_output, prefix_sums = _flash_on_cpu(flat, *prefixes, scale=scale)
        by_token = grouped.permute(2, 0, 1, 3)
        parts, sums = [], []
        for (tokens, keys), (_, values) in zip(
            group.suffixes_of(self._keys), group.suffixes_of(self._values), strict=True
        ):
            suffixes = (keys.transpose(0, 1), values.transpose(0, 1))
            part, part_sums = _flash_on_cpu(by_token[tokens], *suffixes, scale=scale)
            parts.append(part.transpose(0, 1))
            sums.append(part_sums.view(-1, heads, per_head).transpose(0, 1))
        # Shape (key heads, tokens, query heads per key head, ...).
        output, output_sums = _concatenate(parts), _concatenate(sums)
        share = torch.sigmoid(prefix_sums.view(output_sums.shape) - output_sums)[..., None]
        output = torch.lerp(output, prefix_output.view(output.shape), share.to(output.dtype))
        return output.transpose(1, 2).reshape(query.shape[0], count, -1)

    def merges_chunks(self, query: torch.Tensor) -> bool:
        """Whether `chunks` can compute the attention of these queries."""
        width = query.shape[2]
        return (
            self._is_plain
            and query.dtype in {torch.float16, torch.bfloat16}
            and width == self._values.shape[2]
            and width % 8 == 0
            and width <= _MAX_FLASH_WIDTH
            and _has_flash(query.device)
        )

    def chunks(self, query: torch.Tensor, chunks: DeviceChunks) -> torch.Tensor:
        """Attend from each of several chunks to its past and itself, in one call.

        On a GPU, a call for each chunk takes longer to launch than to compute.
        """
        window = None if self._window is None else self._window - 1  # tokens before a token
        output: torch.Tensor = _flash_on_cuda(
            query.transpose(0, 1),
            chunks.slots.select(self._keys).transpose(0, 1),
            chunks.slots.select(self._values).transpose(0, 1),
            chunks.ends,
            chunks.total_ends,
            chunks.max_length,
            chunks.max_total,
            0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=self._scale,
            window_size_left=window,
        )[0]
        return output.transpose(0, 1)

    def chunk(self, query: torch.Tensor, chunk: DeviceChunk) -> torch.Tensor:
        """Attend from a chunk to its past and itself."""
        if not self._is_plain:
            return self._compute_chunk(query, chunk)
        keys, values = (chunk.slots.select(each)[None] for each in (self._keys, self._values))
        window, total = self._window, chunk.past + chunk.length
        fused = query.device.type in _FUSED_DEVICES
        if (window is None or total <= window) and (chunk.past == 0 or fused):
            return _attend_causally(query, keys, values, chunk.past, self._scale)
        if fused:  # kernels with masks do not support shared heads
            keys, values = _repeat_heads(keys, query), _repeat_heads(values, query)
        step = max(1, _MASK_ENTRIES // total)
        parts = []
        for first in range(0, chunk.length, step):
            end = min(first + step, chunk.length)
            visible = chunk.visible_range(first, end, window)
            part = scaled_dot_product_attention(
                query[None, :, first:end],
                keys[:, :, visible],
                values[:, :, visible],
                attn_mask=chunk.visible(first, end, window)[:, visible],
                scale=self._scale,
                enable_gqa=keys.shape[1] != query.shape[0],
            )
            parts.append(part[0])
        return _concatenate(parts)

    def _compute_chunk(self, query: torch.Tensor, chunk: DeviceChunk) -> torch.Tensor:
        """Compute `chunk` with caps and sinks, which torch's attention function lacks."""
        keys, values = chunk.slots.select(self._keys), chunk.slots.select(self._values)
        heads, total = keys.shape[:2]
        grouped = query.view(heads, -1, chunk.length, query.shape[-1]).transpose(1, 2)
        grouped = grouped * self._scale
        per_head = grouped.shape[2]
        step = max(1, _MASK_ENTRIES // (total * query.shape[0]))
        parts = []
        for first in range(0, chunk.length, step):
            part = grouped[:, first : first + step]
            count = part.shape[1]
            flat = part.reshape(heads, count * per_head, -1)
            scores = torch.bmm(flat, keys.transpose(1, 2)).view(heads, count, per_head, total)
            hidden = ~chunk.visible(first, first + count, self._window)
            weights = self._weights(scores, hidden).to(query.dtype)
            output = torch.bmm(weights.view(heads, count * per_head, total), values)
            parts.append(output.view(heads, count, per_head, -1))
        return _concatenate(parts).transpose(1, 2).reshape(query.shape[0], chunk.length, -1)

    def _weights(self, scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute attention weights from scores, which are overwritten, in float32.

        Args:
            scores: Scaled products, (key heads, tokens, query heads per key head, keys).
            hidden: Keys that are hidden from each token, (tokens, keys); None if all are
                visible.
        """
        if self._softcap is not None:
            scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if hidden is not None:
            scores = scores.masked_fill_(hidden[:, None], float("-inf"))
        if self._sinks is None:
            return scores.softmax(-1, dtype=torch.float32)
        sinks = self._sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]


def _attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float
) -> torch.Tensor:
    """Attend from the last tokens, `(heads, tokens, width)`, by a kernel without a mask.

    Args:
        query: Queries of the last tokens.
        keys: Keys of all tokens, `(1, heads, past + tokens, width)`.
        values: Values of all tokens.
        past: Number of tokens before these.
        scale: Factor of the scores.
    """
    shared_heads = keys.shape[1] != query.shape[0]
    if shared_heads and query.device.type in _FUSED_DEVICES and query.dtype == torch.float32:
        # Flash attention supports shared heads, the kernel for float32 does not.
        keys, values = _repeat_heads(keys, query), _repeat_heads(values, query)
        shared_heads = False
    mask = causal_lower_right(query.shape[1], keys.shape[2]) if past else None
    return scaled_dot_product_attention(
        query[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=shared_heads,
    )[0]


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch's flash attention runs on a device."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _repeat_heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values, `(1, heads, tokens, width)`, for each head of the queries."""
    return states.repeat_interleave(query.shape[0] // states.shape[1], dim=1)


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts along the second dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)
