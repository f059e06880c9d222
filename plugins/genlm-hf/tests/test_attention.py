"""Attention of prefill chunks against a float64 softmax over every visible key."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from genlm_hf.packed import attention, device_plan
from genlm_hf.packed.attention import _attend_causally, _Attention, _repeat_heads
from genlm_hf.packed.device_plan import DevicePlan
from genlm_hf.packed.layout import AttentionLayer
from genlm_hf.packed.plan import Chunk, PackedPlan
from genlm_hf.storage import LayerShape


def expected(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    keys, values = (_repeat_heads(x, query)[0].double() for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * scale
    place = torch.arange(keys.shape[1], device=query.device)
    last = place[past : past + query.shape[1], None]
    visible = place <= last
    if window is not None:
        visible &= place > last - window
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


def flash_in_float64(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    total_ends: torch.Tensor,
    max_length: int,
    max_total: int,
    dropout: float,
    *,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float,
    window_size_left: int | None,
) -> tuple[torch.Tensor]:
    """torch's flash attention for sequences of different lengths, which needs a GPU."""
    assert ends.dtype == total_ends.dtype == torch.int32
    assert is_causal
    assert not return_debug_mask
    assert dropout == 0
    window = None if window_size_left is None else window_size_left + 1
    parts = []
    bounds = zip(itertools.pairwise(ends.tolist()), itertools.pairwise(total_ends.tolist()))
    for (begin, end), (total_begin, total_end) in bounds:
        assert end - begin <= max_length
        assert total_end - total_begin <= max_total
        states = (x[total_begin:total_end].transpose(0, 1)[None] for x in (keys, values))
        past = total_end - total_begin - (end - begin)
        part = query[begin:end].transpose(0, 1)
        parts.append(expected(part, *states, past, scale, window).transpose(0, 1))
    return (torch.cat(parts).to(query.dtype),)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("slots_at_once", [1, 40, 2**16])
def test_chunks_attend_to_their_own_past_only(
    device: str,
    window: int | None,
    is_contiguous: bool,
    slots_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        monkeypatch.setattr(attention, "_flash_on_cuda", flash_in_float64)
        monkeypatch.setattr(attention, "_has_flash", lambda _: True)
    monkeypatch.setattr(device_plan, "_GATHERED_SLOTS", slots_at_once)
    generator = torch.Generator().manual_seed(3)
    sizes = [(0, 9), (7, 12), (0, 1), (30, 10)]  # tokens of the past and of the chunk
    order = np.arange(100) if is_contiguous else np.random.default_rng(1).permutation(100)
    ends = np.cumsum([past + length for past, length in sizes])
    slots = np.split(order[: ends[-1]].astype(np.int64), ends[:-1])
    chunks = [Chunk(at, length) for (_, length), at in zip(sizes, slots, strict=True)]
    total = sum(length for _, length in sizes)
    none = np.zeros(total, np.int64)
    plan = DevicePlan(PackedPlan(none, none, none, [], chunks, none[:1]), torch.device(device))
    query = torch.randn(6, total, 16, generator=generator)
    keys, values = (torch.randn(2, 100, 16, generator=generator) for _ in range(2))
    query, keys, values = (x.to(device, torch.bfloat16) for x in (query, keys, values))
    shape: Any = LayerShape(2, 16, 16, torch.bfloat16, torch.device(device))
    layer = AttentionLayer(0, window, shape, 3, None, sinks=False)
    computed = _Attention(layer, keys, values, scale=0.3, sinks=None)
    assert computed.merges_chunks(query)
    first = 0
    outputs = []
    for merged in plan.merged_chunks:
        outputs.append(computed.chunks(query[:, first : first + merged.length], merged))
        first += merged.length
    assert first == total
    assert len(outputs) == {1: 4, 40: 2, 2**16: 1}[slots_at_once]
    output, first = torch.cat(outputs, dim=1), 0
    for (past, length), at in zip(sizes, slots, strict=True):
        states = (x[None, :, torch.from_numpy(at).to(device)] for x in (keys, values))
        part = query[:, first : first + length]
        wanted = expected(part, *states, past, 0.3, window)
        found = output[:, first : first + length].double()
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
        first += length


@pytest.mark.parametrize("past", [0, 1, 9])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("length", [1, 5])
def test_the_last_tokens_see_the_past_and_themselves(
    past: int, heads: int, length: int
) -> None:
    generator = torch.Generator().manual_seed(past + heads)
    query = torch.randn(6, length, 8, generator=generator)
    keys, values = (
        torch.randn(1, heads, past + length, 8, generator=generator) for _ in range(2)
    )
    output = _attend_causally(query, keys, values, past, 0.3)
    expected_output = expected(query, keys, values, past, 0.3)
    torch.testing.assert_close(output.double(), expected_output, atol=1e-6, rtol=0)


def test_heads_are_repeated_in_the_order_of_the_queries() -> None:
    states = torch.arange(2.0).view(1, 2, 1, 1)
    query = torch.zeros(6, 1, 1)
    assert _repeat_heads(states, query).flatten().tolist() == [0, 0, 0, 1, 1, 1]


def test_chunks_that_see_all_have_no_mask_beside_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is one of devices; a tensor of another device stands for them."""
    masks = []

    def recorded(*_: torch.Tensor, attn_mask: torch.Tensor | None = None, **__: object) -> None:
        masks.append(attn_mask)
        return torch.zeros(1, 4, 3, 8, device="meta")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    query = torch.zeros(4, 3, 8, device="meta")
    keys = torch.zeros(1, 2, 10, 8, device="meta")
    _attend_causally(query, keys, keys, 7, 1.0)
    assert masks[0].variant.name == "LOWER_RIGHT"
