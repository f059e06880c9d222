"""SGLang's requests that stay after their rows: paused, resumed with a token, shared, ended.

The calls into SGLang that `residents` needs. A request that stays is in one of SGLang's
batches, or paused: in none, with its slots of the KV cache, its row of the table of slots
(`req_to_token_pool`) and its lock on the radix cache. It has drawn one token that is not
computed yet, the last of its `output_ids`. `put_token` replaces that token, and the next decode
computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from genlm.plugin import device_index
from genlm_sgl.lifecycle import copy_to_prefix_cache, release_cache_slots

__all__ = ["ResidentApi", "obstacle_to_stay"]

_UNTESTED = {
    "is_hybrid_swa": "a KV cache of sliding windows",
    "is_hybrid_ssm": "recurrent layers",
    "enable_hisparse": "enable_hisparse",
    "enable_hierarchical_cache": "enable_hierarchical_cache",
    "enable_lmcache": "enable_lmcache",
    "enable_unified_cache_external_linker": "enable_unified_cache_external_linker",
    "enable_unified_memory": "enable_unified_memory",
    "enable_lora_overlap_loading": "enable_lora_overlap_loading",
    "enable_pdmux": "enable_pdmux",
    "enable_priority_preemption": "enable_priority_preemption",
}
"""Attributes of the scheduler that are set where resident requests are untested."""

_UNTESTED_MODELS = {
    "is_encoder_decoder": "an encoder",
    "is_multimodal": "a multimodal model",
}
"""Attributes of its `model_config` that are set where resident requests are untested."""


def obstacle_to_stay(scheduler: Any) -> str | None:
    """Return why requests cannot stay in this scheduler; None if they can."""
    for place, names in ((scheduler, _UNTESTED), (scheduler.model_config, _UNTESTED_MODELS)):
        for name, reason in names.items():
            if getattr(place, name, None):
                return reason
    return None


class ResidentApi:
    """Requests that stay in one scheduler, passed as SGLang's `Req` objects.

    Args:
        scheduler: SGLang's scheduler.
        compute_context: Gives the torch modes and the stream in which SGLang's code runs.
    """

    def __init__(
        self, scheduler: Any, compute_context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._scheduler = scheduler
        self._compute_context = compute_context
        self._shares = not getattr(scheduler.tree_cache, "disable", True)

    # -- one request ------------------------------------------------------------------

    def put_token(self, req: Any, token_id: int) -> None:
        """Replace the token that a request drew last and has not computed."""
        req.output_ids[-1] = token_id
        # Not its last token: SGLang reserves memory for all remaining tokens of a request.
        req.sampling_params.max_new_tokens = len(req.output_ids) + 2

    def has_token(self, req: Any) -> bool:
        """Whether all tokens of a request but the last are computed, and the last is not."""
        length = len(req.origin_input_ids) + len(req.output_ids)
        return bool(
            req.kv.holds_kv and len(req.output_ids) and req.kv.kv_committed_len == length - 1
        )

    def share(self, req: Any, length: int) -> bool:
        """Have the radix cache share the first tokens of a request; False if it cannot."""
        if not (self._shares and req.kv.holds_kv and req.kv.kv_committed_len >= length):
            return False
        page = int(self._scheduler.page_size)
        if req.kv.cache_protected_len < length // page * page:
            with self._compute_context():
                copy_to_prefix_cache(req, self._scheduler.tree_cache, length)
        return True

    def end(self, req: Any) -> None:
        """End a paused request: the radix cache takes its tokens, and its row is free."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        scheduler = self._scheduler
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        with self._compute_context():
            release_cache_slots(req, scheduler.tree_cache)
        scheduler.running_batch.batch_is_full = False

    # -- batches ----------------------------------------------------------------------

    def pause(self, stays: Callable[[str], bool]) -> list[Any]:
        """Take requests out of SGLang's batches.

        Args:
            stays: Whether the request of an id stays; requests that SGLang has finished, or
                computes in chunks, always stay.

        Returns:
            The removed requests.
        """
        scheduler = self._scheduler
        batches = [scheduler.running_batch]
        if scheduler.last_batch is not None and scheduler.last_batch is not batches[0]:
            batches.append(scheduler.last_batch)
        paused: list[Any] = []
        for batch in batches:
            kept = [
                j
                for j, req in enumerate(batch.reqs)
                if stays(req.rid) or req.finished() or req is scheduler.chunked_req
            ]
            if len(kept) < len(batch.reqs):
                indices = set(kept)
                paused += [req for j, req in enumerate(batch.reqs) if j not in indices]
                with self._compute_context():
                    batch.filter_batch(keep_indices=kept)
        if paused:
            scheduler.running_batch.batch_is_full = False
        return paused

    def pass_tokens(self, reqs: Sequence[Any]) -> None:
        """Pass to SGLang the new last tokens of requests in the running batch."""
        if not reqs:
            return
        from sglang.srt.managers.overlap_utils import RelayPayload

        # The next decode reads its input ids from this map, by rows of the table of slots.
        scheduler = self._scheduler
        device = torch.device(scheduler.device)
        with self._compute_context():
            rows = device_index([req.kv.req_pool_idx for req in reqs], device)
            ids = device_index([req.output_ids[-1] for req in reqs], device)
            scheduler.future_map.stash(rows, RelayPayload(bonus_tokens=ids))

    def resume(self, reqs: Sequence[Any]) -> None:
        """Put paused requests, with their new tokens, into the running batch."""
        if not reqs:
            return
        scheduler = self._scheduler
        with self._compute_context():
            # Builds a decode batch of any requests with KV cache slots; its name refers to
            # SGLang's use of it.
            batch = scheduler._build_hisparse_decode_batch(list(reqs))  # noqa: SLF001
            batch.multimodal_inputs = [req.multimodal_inputs for req in reqs]
            if scheduler.running_batch.is_empty():
                scheduler.running_batch = batch
            else:
                scheduler.running_batch.merge_batch(batch)

    def defer_prefill(self) -> bool:
        """Have the next batch be a decode; False while a prompt is computed in chunks."""
        if self._scheduler.chunked_req is None:
            self._scheduler.running_batch.batch_is_full = True
            return True
        return False

    def admit_prefill(self) -> None:
        """Undo `defer_prefill`."""
        self._scheduler.running_batch.batch_is_full = False

    @property
    def computes_chunks(self) -> bool:
        """Whether a prompt is being computed in chunks."""
        return self._scheduler.chunked_req is not None

    # -- room -------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Number of rows of the slot table."""
        return int(self._scheduler.req_to_token_pool.size)

    @property
    def queued(self) -> int:
        """Number of requests in the waiting queue."""
        return len(self._scheduler.waiting_queue)

    @property
    def missing_rows(self) -> int:
        """Number of waiting requests without a row of the slot table."""
        free = self._scheduler.req_to_token_pool.available_size()
        return self.queued - int(free)

    def missing_tokens(self, resumed: Sequence[Any]) -> int:
        """Return the number of KV cache slots that the next iteration lacks.

        They are those of a decode, and of the next chunk of a prompt that has begun: SGLang
        does not check again whether there is room for it.

        Args:
            resumed: The paused requests that it will compute besides those in the batches.
        """
        scheduler = self._scheduler
        reqs = [*scheduler.running_batch.reqs, *resumed]
        last = scheduler.last_batch
        if last is not None and last is not scheduler.running_batch:
            reqs += last.reqs
        page, pages = int(scheduler.page_size), len(reqs)
        if page > 1:
            pages = sum(req.kv.kv_committed_len % page == 0 for req in reqs)
        req = scheduler.chunked_req
        if req is not None:
            left = len(req.origin_input_ids) + len(req.output_ids) - req.kv.kv_allocated_len
            pages += -(-min(left, int(scheduler.chunked_prefill_size)) // page)
        free = scheduler.token_to_kv_pool_allocator.available_size()
        return int(pages * page - free - scheduler.tree_cache.evictable_size())

    def unaccounted_tokens(self, reqs: Iterable[Any]) -> int:
        """Return the number of KV cache slots of no request or prefix, while no request runs.

        Args:
            reqs: The paused requests.
        """
        scheduler, cache = self._scheduler, self._scheduler.tree_cache
        page = int(scheduler.page_size)
        held = 0
        for req in reqs:
            allocated = -(-req.kv.kv_allocated_len // page) * page
            held += allocated - req.kv.cache_protected_len
        held += cache.evictable_size() + cache.protected_size()
        free = scheduler.token_to_kv_pool_allocator.available_size()
        return int(scheduler.max_total_num_tokens - free - held)

    # -- adapters ---------------------------------------------------------------------

    def adapters_fit(self, adapter_ids: Collection[str | None]) -> bool:
        """Whether one batch can serve requests of these adapters; None is the base model."""
        manager = self._scheduler.tp_worker.model_runner.lora_manager
        return bool(manager.validate_lora_batch(set(adapter_ids)))

    def adapter_of(self, req: Any) -> str | None:
        """Return the id of a request's adapter."""
        found: str | None = req.lora_id
        return found

    @property
    def running_adapters(self) -> set[str | None]:
        """The adapters of the requests in SGLang's batches."""
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch)
        reqs = [req for batch in batches if batch is not None for req in batch.reqs]
        return {req.lora_id for req in reqs if not req.finished()}

    @property
    def first_queued(self) -> Any | None:
        """The request that has waited longest for its prefill."""
        queue = self._scheduler.waiting_queue
        return queue[0] if queue else None
