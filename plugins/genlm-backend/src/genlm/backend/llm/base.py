"""`AsyncLM`, the base of every published model class, and `MockAsyncLM`.

The base class is for user-defined models, which implement two methods. Models that the core
serves derive from `genlm.backend.llm.served.ServedLM`, which derives from this.
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
from genlm.backend.llm.continuation import sampled_continuation
from genlm.backend.tokenization import decode_vocab
from genlm.plugin import stream_seeds

__all__ = ["AdapterView", "AsyncLM", "BatchAbandoned", "MockAsyncLM", "temper"]


class BatchAbandoned(RuntimeError):
    """Never raised; defined for programs that catch it."""


def temper(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities at another temperature: divided by it, and normalised.

    Args:
        row: Log-probabilities over the last dimension; not changed. What is -inf stays.
        temperature: Finite and above 0.

    Returns:
        A tensor of the same shape, float64 for a float64 row, else float32. At temperature 1
        `row` itself.

    Raises:
        ValueError: Another temperature.
    """
    if temperature == 1:
        return row
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected a finite number above 0")
    wide = row.to(torch.float32 if row.device.type == "mps" else torch.float64)
    # The largest becomes 0 before the division, which could take all of them to -inf.
    tempered = torch.log_softmax((wide - wide.amax(-1, keepdim=True)) / temperature, dim=-1)
    tempered = torch.where(wide.isneginf(), wide, tempered)
    return tempered.to(torch.promote_types(row.dtype, torch.float32))


class AdapterView:
    """The row methods of a model with one adapter for all requests; see `AsyncLM.lora_view`.

    Args:
        llm: The model.
        lora_name: Name of the adapter.
    """

    def __init__(self, llm: AsyncLM, lora_name: str) -> None:
        self._llm = llm
        self._lora_name = lora_name

    async def next_token_logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of every next token with the adapter."""
        return await self._llm.next_token_logprobs(token_ids, self._lora_name)

    def next_token_logprobs_sync(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The same, waiting for it."""
        return self._llm.next_token_logprobs_sync(token_ids, self._lora_name)

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Return the rows of several sequences with the adapter."""
        return await self._llm.batch_next_token_logprobs(token_ids_list, self._lora_name)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """The same, waiting for it."""
        return self._llm.batch_next_token_logprobs_sync(token_ids_list, self._lora_name)


class AsyncLM(abc.ABC):
    """The published interface; a class derived from it needs the two abstract methods.

    Maps to `genlm.AsyncLM`, which is not a base class but serves any engine.

    Args:
        tokenizer: A tokenizer that `decode_vocab` accepts.

    Attributes:
        supports_burst: Whether the class has `run_burst`, with which a sampler drives the
            engine.
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
        """Compute log-probabilities of all next tokens, shape `(len(byte_vocab),)`."""

    @abc.abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Blocking form of `next_token_logprobs`."""

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the rows of several sequences, concurrently; `(0, vocabulary)` for none."""
        named = _named(lora_name)
        asked = [self.next_token_logprobs(token_ids, **named) for token_ids in token_ids_list]
        return self._table(await asyncio.gather(*asked))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return rows of several sequences, one after the other; `(0, vocabulary)` for none."""
        named = _named(lora_name)
        return self._table(
            [self.next_token_logprobs_sync(token_ids, **named) for token_ids in token_ids_list]
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
        """Draw a continuation; see `genlm.AsyncLM.sample`."""
        drawn = await self.batch_sample(
            [prompt_token_ids], max_tokens, eos_token_ids, temperature, seed, lora_name
        )
        return drawn[0]

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Draw a continuation of each prompt; see `genlm.AsyncLM.batch_sample`.

        Raises:
            ValueError: A negative number of tokens, or a temperature that is negative or
                not finite.
        """
        if max_tokens < 0 or not 0 <= temperature < math.inf:
            raise ValueError(
                f"max_tokens={max_tokens}, temperature={temperature}: neither may be "
                "negative, and the temperature must be finite"
            )
        stop = frozenset(map(int, eos_token_ids))

        def rows(token_ids: list[int]) -> Any:
            return self.next_token_logprobs(token_ids, **_named(lora_name))

        seeds = stream_seeds(seed, len(prompt_token_ids_list))
        continuations = [
            sampled_continuation(
                rows, tuple(map(int, prompt)), max_tokens, temperature, stop, stream
            )
            for prompt, stream in zip(prompt_token_ids_list, seeds, strict=True)
        ]
        return list(await asyncio.gather(*continuations))

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter; classes that serve adapters override it.

        Raises:
            UnsupportedCapabilityError: This class serves no adapters.
        """
        raise genlm.UnsupportedCapabilityError(genlm.Capability.LORA, type(self).__name__)

    def remove_lora(self, lora_name: str) -> None:
        """Remove a LoRA adapter; as `add_new_lora`."""
        raise genlm.UnsupportedCapabilityError(genlm.Capability.LORA, type(self).__name__)

    def set_lora(self, lora_path: str | None = None, lora_name: str = "lora_1") -> None:
        """Use an adapter for all later requests; as `add_new_lora`."""
        raise genlm.UnsupportedCapabilityError(genlm.Capability.LORA, type(self).__name__)

    def lora_view(self, lora_name: str | None) -> Any:
        """Return a model whose rows are those of an adapter; None for this model itself."""
        return self if lora_name is None else AdapterView(self, lora_name)

    def clear_lora(self) -> None:  # noqa: B027 - optional for subclasses
        """Use the base model for all later requests; nothing by default."""

    def clear_cache(self) -> None:  # noqa: B027 - optional for subclasses
        """Clear the caches; nothing by default."""

    def cleanup(self) -> None:  # noqa: B027 - optional for subclasses
        """Free the model; nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cleanup()

    def _table(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, len(self.byte_vocab))
        return torch.stack(tuple(rows))


class MockAsyncLM(AsyncLM):
    """A model for tests: rows are random and depend on nothing except the token ids.

    Each sequence of token ids has a row of its own, the same in every process: the softmax
    of uniform numbers, computed on the caller's thread.

    Args:
        tokenizer: Tokenizer of the vocabulary.

    Attributes:
        device: Device of the rows, the CPU.
    """

    device = torch.device("cpu")

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> Self:
        """Take the tokenizer of a model, whose weights are not loaded.

        Args:
            model_name: A hub id or folder.
            **kwargs: Further arguments of the class.
        """
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model_name), **kwargs)

    async def next_token_logprobs(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Draw the row of a sequence, which may be empty.

        Raises:
            UnknownAdapterError: An adapter was named.
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
        return torch.log_softmax(torch.from_numpy(logits), dim=-1)


def _named(lora_name: str | None) -> dict[str, str]:
    """Omit the argument where it is None: older subclasses lack the parameter."""
    return {} if lora_name is None else {"lora_name": lora_name}
