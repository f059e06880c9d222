"""Published class `AsyncTransformer` for transformers models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

import genlm
from genlm.backend.cache import TokenTrie
from genlm.backend.llm.served import ServedLM, with_rows_on_cpu

if TYPE_CHECKING:
    from genlm.core.model.context import TokenIds

__all__ = ["AsyncTransformer", "Query"]


class Query:
    """Token ids and a future of their logits; maps to `genlm.Query`.

    Attributes:
        prompt: Token ids.
        future: Receives the logits.
        past: Keys and values of preceding tokens, or None.
        lora_name: Name of the adapter, None for the base model.
        past_len: Number of tokens in `past`.
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
        """Return `"keys"` or `"values"` of a layer, zero-padded, `(1, h, to_length, d)`."""
        _, heads, _, width = past_shape
        padded = torch.zeros(1, heads, to_length, width, dtype=dtype, device=device)
        if self.past is not None:
            padded[:, :, : self.past_len] = getattr(self.past.layers[layer], side).detach()
        return padded

    def prompt_padded(self, pad_token: int, to_length: int) -> list[int]:
        """Return the token ids, padded with `pad_token` on the right."""
        return list(self.prompt) + [pad_token] * (to_length - len(self.prompt))

    def attention_mask(self, total_past_length: int, total_seq_length: int) -> list[int]:
        """Return 1 for tokens of the past and the prompt, and 0 for the padding after them."""
        mask = [0] * (total_past_length + total_seq_length)
        mask[: self.past_len] = [1] * self.past_len
        begin = total_past_length
        mask[begin : begin + len(self.prompt)] = [1] * len(self.prompt)
        return mask

    def position_ids(self, total_past_length: int, total_seq_length: int) -> list[int]:
        """Return the positions of the prompt after the past, and 0 for the padding."""
        del total_past_length  # padding of the past has no positions
        positions = list(range(self.past_len, self.past_len + len(self.prompt)))
        return positions + [0] * (total_seq_length - len(self.prompt))


class AsyncTransformer(ServedLM):
    """Maps to `genlm.load_model(name, backend="hf")`; rows are on the CPU, as published.

    Args:
        hf_model: A decoder-only transformers model, which no other code may run while
            requests are pending. The active adapters of a `peft.PeftModel` remain active.
            Adapters of `hf_model.load_adapter` are deactivated and used by name.
        hf_tokenizer: Tokenizer of the model.
        batch_size: Maximum number of sequences in a batch; None for no limit.
        timeout: Ignored; batches are dispatched without a timer.

    Attributes:
        model: The argument `hf_model`.
        device: Device of the rows, the CPU. The model is on `model.device`.
        queries: Queries collected by `add_query`.
    """

    def __init__(
        self,
        hf_model: Any,
        hf_tokenizer: Any,
        batch_size: int | None = None,
        timeout: float = 0.02,
    ) -> None:
        from genlm_hf.engine import HFEngine

        hf_model.eval()
        if getattr(hf_model, "_hf_peft_config_loaded", False):
            hf_model.disable_adapters()
        super().__init__(
            lambda: with_rows_on_cpu(HFEngine.from_model(hf_model, hf_tokenizer)),
            name="hf",
            batch_size=batch_size,
        )
        self.model = hf_model
        self.device = torch.device("cpu")
        self.batch_size = batch_size
        self.timeout = timeout
        self.queries: list[Query] = []
        self._tasks: set[asyncio.Task[None]] = set()
        # Adapters and token ids of the prefixes of `cache_kv`.
        self._pinned: set[tuple[str | None, tuple[int, ...]]] = set()

    @classmethod
    def from_name(  # type: ignore[override]
        cls,
        model_id: str | os.PathLike[str],
        bitsandbytes_opts: dict[str, Any] | None = None,
        hf_opts: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_id: Hub id, folder, or `"demo"`.
            bitsandbytes_opts: Arguments of `BitsAndBytesConfig`.
            hf_opts: Arguments of `from_pretrained`. By default the dtype of the checkpoint
                and, with several GPUs, `device_map="auto"`.
            **kwargs: Further arguments of the class.

        Raises:
            ModelLoadError: The model does not exist or cannot be served.
            MissingRequirementError: A library is missing.
        """
        from genlm_hf.loading import LoadOptions, load_checkpoint

        options: dict[str, Any] = {"dtype": "auto"}
        if torch.cuda.device_count() > 1:
            options["device_map"] = "auto"
        options |= hf_opts or {}
        if "torch_dtype" in options:
            options["dtype"] = options.pop("torch_dtype")
        trust = bool(options.pop("trust_remote_code", False))
        loading = LoadOptions(
            hf_opts=options, bitsandbytes_opts=bitsandbytes_opts, trust_remote_code=trust
        )
        return cls(*load_checkpoint(model_id, loading), **kwargs)

    def next_token_logprobs_uncached(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Compute a row without the output cache, and block until it is computed."""
        return self.next_token_logprobs_sync(token_ids, lora_name, use_cache=False)

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute and pin a prefix until `clear_kv_cache`."""
        super().cache_kv(prompt_tokens, lora_name)
        if genlm.Capability.PREFIX_CACHE in self.capabilities:
            ids: Any = prompt_tokens
            if isinstance(prompt_tokens, genlm.Context):
                ids = prompt_tokens.token_ids
            self._pinned.add((lora_name or self.lora_name, tuple(map(int, ids))))

    def add_new_lora(
        self,
        lora_path: str | os.PathLike[str],
        lora_name: str = "lora_1",
        *,
        replace: bool = True,
    ) -> None:
        """Load a LoRA adapter; see `ServedLM.add_new_lora`."""
        super().add_new_lora(lora_path, lora_name, replace=replace)
        self._forget_pinned(lora_name)

    def remove_lora(self, lora_name: str) -> None:
        """Unload an adapter; see `ServedLM.remove_lora`."""
        super().remove_lora(lora_name)
        self._forget_pinned(lora_name)

    def with_lora(self, lora_name: str | None) -> Self:
        """Return this model with another default adapter and a separate queue."""
        bound = super().with_lora(lora_name)
        bound.queries = []
        return bound

    def _forget_pinned(self, lora_name: str) -> None:
        # In place, because models of `with_lora` share the set and the engine's prefixes.
        self._pinned.difference_update([key for key in self._pinned if key[0] == lora_name])

    def clear_kv_cache(self) -> None:
        """Free the cached prefixes of the engine, if any."""
        self._pinned.clear()
        super().clear_kv_cache()

    def clear_cache(self) -> None:
        """Clear cached rows, keys and values. Results do not change."""
        super().clear_cache()
        self.clear_kv_cache()

    # -- the queue and the cache tree of the published class ---------------------------

    def add_query(
        self,
        query: Sequence[int],
        future: asyncio.Future[Any],
        past: None,
        lora_name: str | None = None,
    ) -> None:
        """Add a sequence whose logits are computed in the next batch.

        Args:
            query: Token ids.
            future: Receives the log-probabilities after each token, shape
                `(len(query), vocabulary)`.
            past: None, because the engine caches prefixes itself.
            lora_name: Name of the adapter.

        Raises:
            ValueError: `past` is not None.
            TypeError: `future` is not a future of asyncio.
        """
        if not asyncio.isfuture(future):
            raise TypeError(
                f"future={future!r}; expected a future, such as loop.create_future()"
            )
        if past is not None:
            raise ValueError(
                "past is not None, and external keys and values cannot be used; pass the whole "
                "sequence, of which the engine computes only uncached tokens"
            )
        self.queries.append(Query(list(query), future, None, lora_name))
        if len(self.queries) == 1:
            future.get_loop().call_soon(self.batch_evaluate_queries)

    def batch_evaluate_queries(self) -> None:
        """Submit the collected queries; the event loop completes their futures."""
        queries, self.queries = self.queries, []
        for query in queries:
            task = query.future.get_loop().create_task(self._compute(query))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _compute(self, query: Query) -> None:
        prefixes = [query.prompt[: end + 1] for end in range(len(query.prompt))]
        try:
            # The method of this class would return a `PrefixRows`.
            rows = await genlm.AsyncLM.batch_next_token_logprobs(
                self, prefixes, lora_name=self._check_adapter(query.lora_name)
            )
        except Exception as error:  # noqa: BLE001 - passed to the future
            if not query.future.done():
                query.future.set_exception(error)
        else:
            if not query.future.done():
                query.future.set_result(rows)

    def reset_async_queries(self) -> None:
        """End all pending requests with `QueryResetError`; the model remains usable."""
        self.batch_evaluate_queries()
        super().reset_async_queries()

    def walk_cache(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> tuple[TokenTrie, int, None, int]:
        """Find the longest prefix whose row is cached or that `cache_kv` has pinned.

        Returns:
            A node with the row, the length of the prefix, None, and 0. The engine has the keys
            and values and reuses them for longer sequences.
        """
        lora_name = self._check_adapter(lora_name) or self.lora_name
        ids = tuple(map(int, token_ids))
        for length in range(
            len(ids) or 1, 0, -1
        ):  # `cached_logprobs` rejects an empty sequence
            prefix = ids[:length]
            row = self.cached_logprobs(prefix, lora_name=lora_name)
            if row is None and (lora_name, prefix) in self._pinned:
                row = self.next_token_logprobs_sync(prefix, lora_name)
            if row is not None:
                return TokenTrie(row), length, None, 0
        return TokenTrie(), 0, None, 0
