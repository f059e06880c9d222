"""Attention of prefill chunks against a float64 softmax over every visible key."""

from __future__ import annotations

import pytest
import torch

from genlm_hf.packed import attention
from genlm_hf.packed.attention import _attend_causally, _repeat_heads


def expected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float
) -> torch.Tensor:
    keys, values = (_repeat_heads(x, query)[0].double() for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * scale
    place = torch.arange(keys.shape[1])
    visible = place <= past + torch.arange(query.shape[1])[:, None]
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


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
