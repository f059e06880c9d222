"""`Query`: a request of `AsyncTransformer.add_query`."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

__all__ = ["Query"]


class Query:
    """Maps to `genlm.Query`: token ids, whose logits a future waits for.

    Attributes:
        prompt: The token ids.
        future: Gets the logits.
        past: Keys and values of what comes before, None if nothing does.
        lora_name: The adapter, None for the base model.
        past_len: Tokens in `past`.
    """

    def __init__(
        self,
        prompt: list[int],
        future: asyncio.Future[Any],
        past: Any = None,
        lora_name: str | None = None,
    ) -> None:
        self.prompt = prompt
        self.future = future
        self.past = past
        self.lora_name = lora_name
        self.past_len = 0 if past is None else int(past.get_seq_length())

    def past_padded(
        self,
        layer: int,
        side: str,
        to_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        past_shape: Any,
    ) -> torch.Tensor:
        """A layer's `"keys"` or `"values"`, zeros after the end, `(1, h, to_length, d)`."""
        _, heads, _, width = past_shape
        padded = torch.zeros(1, heads, to_length, width, dtype=dtype, device=device)
        if self.past is not None:
            padded[:, :, : self.past_len] = getattr(self.past.layers[layer], side).detach()
        return padded

    def prompt_padded(self, pad_token: int, to_length: int) -> list[int]:
        """The token ids with `pad_token` after the end."""
        return list(self.prompt) + [pad_token] * (to_length - len(self.prompt))

    def attention_mask(self, total_past_length: int, total_seq_length: int) -> list[int]:
        """1 for the past and the prompt, 0 for the padding after each."""
        mask = [0] * (total_past_length + total_seq_length)
        mask[: self.past_len] = [1] * self.past_len
        begin = total_past_length
        mask[begin : begin + len(self.prompt)] = [1] * len(self.prompt)
        return mask

    def position_ids(self, total_past_length: int, total_seq_length: int) -> list[int]:
        """Positions of the prompt after the past, 0 for the padding."""
        del total_past_length  # padding of the past takes no positions
        positions = list(range(self.past_len, self.past_len + len(self.prompt)))
        return positions + [0] * (total_seq_length - len(self.prompt))
