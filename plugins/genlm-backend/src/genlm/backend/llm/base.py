"""`AsyncLM`, the base of all published model classes, and `MockAsyncLM`.

User-defined models derive from `AsyncLM` and implement two methods. Models of the core derive
from its subclass `genlm.backend.llm.served.ServedLM`.
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

import genlm
from genlm.backend.tokenization import decode_vocab

__all__ = ["AsyncLM", "BatchAbandoned", "MockAsyncLM", "temper"]


class BatchAbandoned(RuntimeError):
    """Never raised; defined for programs that catch it."""


def temper(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide log-probabilities by a temperature, and normalise them.

    Args:
        row: Log-probabilities over the last dimension; not changed. Entries of -inf remain.
        temperature: Temperature, finite and above 0.

    Returns:
        A tensor of the same shape, float64 for a float64 row, else float32; `row` itself at
        temperature 1.

    Raises:
        ValueError: The temperature is out of range.
    """
    if temperature == 1:
        return row
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected a finite number above 0")
    wide = row.to(torch.float32 if row.device.type == "mps" else torch.float64)
    # The largest is subtracted first; else the division could make all of them -inf.
    tempered = torch.log_softmax((wide - wide.amax(-1, keepdim=True)) / temperature, dim=-1)
    tempered = torch.where(wide.isneginf(), wide, tempered)
    return tempered.to(torch.promote_types(row.dtype, torch.float32))


class AsyncLM(abc.ABC):
    """Published base class with two abstract methods.

    It maps to `genlm.AsyncLM`, which serves any engine and is not meant to be subclassed.

    Args:
        tokenizer: A tokenizer that `decode_vocab` accepts.

    Attributes:
        supports_burst: Whether the class has the method `run_burst`.
    """

    tokenizer: Any
    supports_burst = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.byte_vocab, self.str_vocab = decode_vocab(tokenizer)

    @abc.abstractmethod
    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of all next tokens, shape `(len(byte_vocab),)`."""

    @abc.abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Blocking form of `next_token_logprobs`."""

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """Compute the rows of sequences concurrently, shape `(n, len(byte_vocab))`."""
        rows = [self.next_token_logprobs(ids, lora_name=lora_name) for ids in token_ids_list]
        return self._table(await asyncio.gather(*rows))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """Compute the rows of sequences one after the other, shape `(n, len(byte_vocab))`."""
        return self._table(
            [self.next_token_logprobs_sync(ids, lora_name=lora_name) for ids in token_ids_list]
        )

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Draw a continuation token by token.

        Args:
            prompt_token_ids: Token ids of the prompt.
            max_tokens: Maximum number of tokens, 0 or more.
            eos_token_ids: Tokens before which the continuation ends.
            temperature: Finite and not negative; 0 selects the most likely tokens.
            seed: Random seed.
            lora_name: Name of the adapter.

        Returns:
            The drawn ids, without the token that ended the continuation.

        Raises:
            ValueError: `max_tokens` or `temperature` is out of range.
        """
        if max_tokens < 0 or not 0 <= temperature < math.inf:
            raise ValueError(
                f"max_tokens={max_tokens}, temperature={temperature}: neither may be "
                "negative, and the temperature must be finite"
            )
        [stream] = _streams(seed, 1)
        ends, generator = frozenset(map(int, eos_token_ids)), torch.Generator()
        generator.manual_seed(stream)
        ids = list(map(int, prompt_token_ids))
        for _ in range(max_tokens):
            row = await self.next_token_logprobs(ids, lora_name=lora_name)
            token_id = _draw(row, temperature, generator)
            if token_id in ends:
                break
            ids.append(token_id)
        return ids[len(prompt_token_ids) :]

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Call `sample` for each prompt, with a seed for each that is derived from `seed`."""
        adapter: dict[str, Any] = {} if lora_name is None else {"lora_name": lora_name}
        return await asyncio.gather(
            *(
                self.sample(prompt, max_tokens, eos_token_ids, temperature, stream, **adapter)
                for prompt, stream in zip(
                    prompt_token_ids_list,
                    _streams(seed, len(prompt_token_ids_list)),
                    strict=True,
                )
            )
        )

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter, if a subclass supports adapters.

        Raises:
            UnsupportedCapabilityError: The class does not support adapters.
        """
        raise genlm.UnsupportedCapabilityError(genlm.Capability.LORA, type(self).__name__)

    def remove_lora(self, lora_name: str) -> None:
        """Remove a LoRA adapter; see `add_new_lora`."""
        raise genlm.UnsupportedCapabilityError(genlm.Capability.LORA, type(self).__name__)

    def set_lora(self, lora_path: str, lora_name: str) -> None:
        """Raise an error, because requests name their adapters.

        Raises:
            RuntimeError: Always, as published.
        """
        raise RuntimeError("set_lora was removed; pass lora_name= to each call")

    def clear_lora(self) -> None:
        """Raise an error, because requests without `lora_name` use the base model.

        Raises:
            RuntimeError: Always, as published.
        """
        raise RuntimeError("clear_lora was removed; omit lora_name for the base model")

    def lora_view(self, lora_name: str | None) -> Self:
        """Return a model that uses an adapter by default, or this model for None.

        Raises:
            UnsupportedCapabilityError: The class does not support adapters.
        """
        if lora_name is not None:
            raise genlm.UnsupportedCapabilityError(genlm.Capability.LORA, type(self).__name__)
        return self

    def clear_cache(self) -> None:  # noqa: B027 - optional for subclasses
        """Clear the caches, if a subclass has any."""

    def _normalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Normalise logits; cut those beyond the vocabulary, and pad missing ones by -inf."""
        size = len(self.byte_vocab)
        rows = torch.log_softmax(logits[..., :size], dim=-1, dtype=torch.float32)
        return torch.nn.functional.pad(rows, (0, size - rows.shape[-1]), value=-math.inf)

    def _table(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, len(self.byte_vocab), dtype=torch.float32)
        return torch.stack(tuple(rows))


class MockAsyncLM(AsyncLM):
    """Model for tests, whose rows are random functions of the token ids.

    The row of a sequence is the softmax of uniform numbers and the same in every process. The
    caller's thread computes it.

    Args:
        tokenizer: Tokenizer of the vocabulary.

    Attributes:
        device: Device of the rows, the CPU.
    """

    device = torch.device("cpu")

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> Self:
        """Create a model with the tokenizer of a checkpoint; no weights are loaded.

        Args:
            model_name: Hub id or folder.
            **kwargs: Further arguments of the class.
        """
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model_name), **kwargs)

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the row of a sequence, which may be empty.

        Raises:
            UnknownAdapterError: `lora_name` is not None.
        """
        return self.next_token_logprobs_sync(token_ids, lora_name)

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Blocking form of `next_token_logprobs`."""
        if lora_name is not None:
            raise genlm.UnknownAdapterError(lora_name)
        content = np.array([int(token) for token in token_ids], dtype="<i8").tobytes()
        seed = int.from_bytes(hashlib.sha256(content).digest(), "big")
        logits = np.random.default_rng(seed).random(len(self.byte_vocab), dtype=np.float32)
        return self._normalize(torch.from_numpy(logits))


def _streams(seed: int | None, count: int) -> list[int]:
    """Return seeds of independent random streams; None for other streams in each call."""
    streams: list[int] = np.random.SeedSequence(seed).generate_state(count, np.uint64).tolist()
    return streams


def _draw(row: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(row.argmax())
    probabilities = temper(row.cpu().double(), temperature).exp()
    return int(torch.multinomial(probabilities, 1, generator=generator))
