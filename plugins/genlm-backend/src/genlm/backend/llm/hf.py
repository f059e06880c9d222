"""`AsyncTransformer`: Hugging Face transformers models as published."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

import genlm
from genlm.backend.cache import TokenTrie
from genlm.backend.llm.query import Query
from genlm.backend.llm.served import ServedLM

if TYPE_CHECKING:
    from genlm.core.validation import TokenIds

__all__ = ["AsyncTransformer", "Query"]


class AsyncTransformer(ServedLM):
    """Maps to `genlm.load_model(name, backend="hf")`; rows are on the CPU, as published.

    Args:
        hf_model: A decoder-only transformers model; any thread may run it meanwhile. A
            `peft.PeftModel` is served as it is handed over. Adapters that
            `hf_model.load_adapter` put in are switched off and asked for by name.
        hf_tokenizer: Its tokenizer.
        batch_size: Most sequences in one batch; by default as many as are waiting.
        timeout: Has no effect: batches leave without a timer.

    Attributes:
        model: `hf_model`.
        device: Where rows are: the CPU. The model is on `model.device`.
        queries: What `add_query` collected.
    """

    def __init__(
        self,
        hf_model: Any,
        hf_tokenizer: Any,
        batch_size: int | None = None,
        timeout: float = 0.02,
    ) -> None:
        from genlm.backend.llm.cpu_rows import RowsOnCpu

        hf_model.eval()
        if getattr(hf_model, "_hf_peft_config_loaded", False):
            hf_model.disable_adapters()
        super().__init__(
            lambda: RowsOnCpu.from_model(hf_model, hf_tokenizer),
            name="hf",
            batch_size=batch_size,
        )
        self.model = hf_model
        self.device = torch.device("cpu")
        self.batch_size = batch_size
        self.timeout = timeout
        self.queries: list[Query] = []
        self._answering: set[asyncio.Task[None]] = set()
        # Adapter and token ids of what `cache_kv` had the engine keep.
        self._kept: set[tuple[str | None, tuple[int, ...]]] = set()

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
            model_id: A hub id, a folder, or `"demo"`.
            bitsandbytes_opts: Arguments of `BitsAndBytesConfig`.
            hf_opts: Arguments of `from_pretrained`. By default the checkpoint's own dtype
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

    def next_token_logprobs_uncached(  # type: ignore[override]
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Score every possible next token and wait, never from the output cache."""
        query, _ = self._asked(token_ids, lora_name)
        row: torch.Tensor = self._scheduler.answer_sync([(query, None)])[0]
        return row

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute a prefix and keep it, which `walk_cache` finds until `clear_kv_cache`."""
        super().cache_kv(prompt_tokens, lora_name)
        if genlm.Capability.PREFIX_CACHE in self.capabilities:
            query, _ = self._asked(prompt_tokens, lora_name)
            self._kept.add((query.adapter, query.token_ids))

    def clear_kv_cache(self) -> None:
        """Free the prefixes that the engine keeps, if any."""
        self._kept.clear()
        super().clear_kv_cache()

    def clear_cache(self) -> None:
        """Forget all rows, and all keys and values. Answers do not change."""
        super().clear_cache()
        self.clear_kv_cache()

    # -- the queue and the tree that the published class was made of ------------------

    def add_query(
        self,
        query: Sequence[int],
        future: asyncio.Future[Any],
        past: None,
        lora_name: str | None = None,
    ) -> None:
        """Have the logits of a sequence computed in the next batch.

        Args:
            query: All token ids.
            future: Gets the logits after each of them, `(len(query), vocabulary)`, as
                log-probabilities.
            past: None; the engine keeps prefixes itself.
            lora_name: An adapter.

        Raises:
            ValueError: A past was given.
        """
        if past is not None:
            raise ValueError(
                "past is not None: keys and values from elsewhere cannot be used; pass the "
                "whole sequence, of which the engine computes what it does not have yet"
            )
        self.queries.append(Query(list(query), future, None, lora_name))
        if len(self.queries) == 1:
            future.get_loop().call_soon(self.batch_evaluate_queries)

    def batch_evaluate_queries(self) -> None:
        """Let the collected queries go; their futures are finished by the event loop."""
        queries, self.queries = self.queries, []
        for query in queries:
            task = query.future.get_loop().create_task(self._answer(query))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, query: Query) -> None:
        prefixes = [query.prompt[: end + 1] for end in range(len(query.prompt))]
        try:
            rows = await self.batch_next_token_logprobs(prefixes, query.lora_name)
        except Exception as error:  # noqa: BLE001 - it is the future's
            if not query.future.done():
                query.future.set_exception(error)
        else:
            if not query.future.done():
                query.future.set_result(rows)

    def reset_async_queries(self) -> None:
        """End all unanswered requests with `QueryResetError`; the model stays usable."""
        self.batch_evaluate_queries()
        super().reset_async_queries()

    def walk_cache(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> tuple[TokenTrie, int, None, int]:
        """Find the longest beginning of a sequence that is kept: its row, or by `cache_kv`.

        Returns:
            A node with the row, how many tokens lead to it, and None and 0: the engine has
            the keys and values, and reuses them for whoever asks for the whole sequence.
        """
        query, _ = self._asked(token_ids, lora_name)
        for length in range(len(query.token_ids), 0, -1):
            beginning = query.token_ids[:length]
            row = self._cache.get(self._asked(beginning, lora_name)[1])
            if row is None and (query.adapter, beginning) in self._kept:
                row = self.next_token_logprobs_sync(beginning, lora_name)
            if row is not None:
                return TokenTrie(row), length, None, 0
        return TokenTrie(), 0, None, 0
