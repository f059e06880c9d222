"""Tensors of keys and values, within a budget of bytes."""

from __future__ import annotations

import pytest
import torch

from genlm_hf import storage
from genlm_hf.storage import KVStorage, LayerShape, default_budget_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layer(device: torch.device = CPU) -> LayerShape:
    """A layer of 40 bytes for each token."""
    return LayerShape(2, 4, 6, torch.float16, device)


def test_keys_and_values_are_stored_in_their_slots_of_a_layer() -> None:
    tensors = KVStorage([layer(), layer(), layer()], 5 * 120 + 119)
    assert (tensors.layers, tensors.bytes_per_token) == (3, 120)
    generator = torch.Generator().manual_seed(0)
    written = [
        [torch.randn(2, 2, width, generator=generator).half() for width in (4, 6)]
        for _ in range(3)
    ]
    slots = torch.tensor([4, 1])
    for index, (keys, values) in enumerate(written):
        tensors.write(index, slots, keys, values)
    nothing = torch.empty(0, dtype=torch.long)
    for index, pair in enumerate(written):
        empty = [states[:, :0] for states in pair]
        for stored, states in zip(tensors.write(index, nothing, *empty), pair, strict=True):
            assert stored.shape == (2, 5, states.shape[2])
            assert torch.equal(stored[:, slots], states)


@pytest.mark.parametrize(
    ("free", "tokens"),
    [(4 * 120 * 10, 10), (4 * 120 * 10 - 1, 9), (0, 0), (2**50, 2**20)],
)
def test_the_default_budget_is_a_quarter_of_the_free_memory_for_whole_tokens(
    free: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "free_memory_bytes", lambda _: free)
    assert default_budget_bytes([layer(), layer(), layer()]) == tokens * 120


@pytest.mark.parametrize(("free", "tokens"), [(4 * 40 * 7, 5), (4 * 40 * 3, 3)])
def test_the_device_with_the_least_room_limits_the_default_budget(
    free: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {CPU: free, CUDA: 2 * 80 * 5}  # a half of that of the accelerator
    monkeypatch.setattr(storage, "free_memory_bytes", memory.__getitem__)
    assert default_budget_bytes([layer(CUDA), layer(), layer(CUDA)]) == tokens * 120
