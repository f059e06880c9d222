"""Decode passes over rows of slots, without SGLang's requests; slots outside its radix cache.

The calls into SGLang that `populations` needs. A pass borrows rows of SGLang's table of slots
(`req_to_token_pool`), and decodes a token in each. SGLang's queue and batches take no part in
it. Its loop must not run before `give_back` has returned the borrowed rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.prefix import Slots, TableBatch
from genlm_sgl.streams import computed_event, read_on_current_stream

__all__ = ["PopulationApi", "obstacle_to_tables"]

_SPARE = 1024
"""Number of slots that are taken from SGLang at once: it copies its list of free slots."""


def obstacle_to_tables(scheduler: Any) -> str | None:
    """Return why sequences cannot be decoded without requests; None if they can."""
    runner = scheduler.tp_worker.model_runner
    embeddings = getattr(runner, "ngram_embedding_manager", None)
    reasons = {
        "pages of several tokens": int(scheduler.page_size) > 1,
        "enable_two_batch_overlap": getattr(
            scheduler.server_args, "enable_two_batch_overlap", False
        ),
        "n-gram embeddings": embeddings is not None and embeddings.enabled,
        "rotary embeddings of several dimensions": scheduler.model_config.model_is_mrope,
    }
    return next((reason for reason, is_given in reasons.items() if is_given), None)


class PopulationApi:
    """Slots and decode passes of one scheduler.

    Args:
        scheduler: SGLang's scheduler.
        compute_context: Gives the torch modes and the stream in which SGLang's code runs.
        biased: Adds the output bias to logits.

    Attributes:
        slots_used: Number of slots that `take_slots` returned and `free_slots` did not get.
    """

    def __init__(
        self,
        scheduler: Any,
        compute_context: Callable[[], AbstractContextManager[None]],
        biased: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._scheduler = scheduler
        self._compute_context = compute_context
        self._biased = biased
        self._device = torch.device(scheduler.device)
        self.forget()

    def forget(self) -> None:
        """Forget all slots and rows, after SGLang's tables were emptied."""
        self._spare: Slots = np.empty(0, np.int64)
        self._rows: list[int] = []
        self._trunk: Slots | None = None
        self.slots_used = 0

    # -- slots ------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The largest slot."""
        return int(self._scheduler.token_to_kv_pool_allocator.size)

    def take_slots(self, count: int) -> Slots | None:
        """Allocate slots; None if there are too few when the radix cache is evicted."""
        if count > len(self._spare) and not self._refill(count - len(self._spare)):
            return None
        found, self._spare = self._spare[:count], self._spare[count:]
        self.slots_used += count
        return found

    def _refill(self, count: int) -> bool:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        allocator = self._scheduler.token_to_kv_pool_allocator
        count = max(count, min(_SPARE, int(allocator.available_size())))
        with self._compute_context():
            evict_from_tree_cache(self._scheduler.tree_cache, count)
            found = allocator.alloc(count)
        if found is None:
            return False
        self._spare = np.concatenate([self._spare, found.cpu().numpy()])
        return True

    def free_slots(self, slots: Slots) -> None:
        """Free slots that `take_slots` returned."""
        self._spare = np.concatenate([slots, self._spare])
        self.slots_used -= len(slots)

    def slots_of(self, req: Any, length: int) -> Slots:
        """Return the slots of the first tokens of a request that stays."""
        row = self._scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length]
        found: Slots = row.cpu().numpy().astype(np.int64)
        return found

    # -- rows -------------------------------------------------------------------------

    @property
    def most_rows(self) -> int:
        """The number of rows."""
        return int(self._scheduler.req_to_token_pool.size)

    def borrow(self, count: int) -> int:
        """Borrow rows until `give_back`; return the number of borrowed ones, up to `count`."""
        pool = self._scheduler.req_to_token_pool
        more = min(count - len(self._rows), int(pool.available_size()))
        if more > 0:
            self._rows = self._rows + pool.alloc_rows(more)
            self._trunk = None
        return min(count, len(self._rows))

    def give_back(self) -> None:
        """Return borrowed rows and unused slots to SGLang."""
        scheduler = self._scheduler
        if self._rows:
            scheduler.req_to_token_pool.free_rows(self._rows)
            self._rows, self._trunk = [], None
        if len(self._spare):
            with self._compute_context():
                scheduler.token_to_kv_pool_allocator.free(self._on_device(self._spare))
            self._spare = np.empty(0, np.int64)

    # -- passes -----------------------------------------------------------------------

    def decode(self, added: TableBatch, part: npt.NDArray[np.int64], req: Any) -> torch.Tensor:
        """Compute some tokens that follow none of each other.

        Args:
            added: Tokens after rows of a block table.
            part: Indices of the tokens, shape `(n,)`; as many rows must be borrowed.
            req: A request that stays, with the adapter of the sequences; it stands for each.

        Returns:
            Logits, shape `(n, width)`, which the current stream may read.
        """
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        scheduler, count = self._scheduler, len(part)
        with self._compute_context():
            rows = torch.tensor(self._rows[:count])
            self._write(rows.to(self._device), added.trunk, added.slots[added.rows[part]])
            lengths = torch.from_numpy(added.positions[part] + 1)
            on_device = lengths.to(self._device, non_blocking=True)
            batch = ScheduleBatch(
                reqs=[req] * count,
                req_to_token_pool=scheduler.req_to_token_pool,
                token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
                tree_cache=scheduler.tree_cache,
                model_config=scheduler.model_config,
                device=scheduler.device,
                spec_algorithm=scheduler.spec_algorithm,
                forward_mode=ForwardMode.DECODE,
                input_ids=self._on_device(added.tokens[part]),
                req_pool_indices=rows.to(self._device),
                req_pool_indices_cpu=rows,
                seq_lens=on_device,
                seq_lens_cpu=lengths,
                orig_seq_lens=on_device.int(),
                out_cache_loc=self._on_device(added.writes[part]),
            )
            with self._pass_stream():
                # "Verified" logits are those that SGLang draws nothing from.
                result = scheduler.tp_worker.forward_batch_generation(batch, is_verify=True)
                logits: torch.Tensor = self._biased(result.logits_output.next_token_logits)
                if self._device.type != "cpu":  # may be the output of a graph
                    logits = logits.clone()
            computed = computed_event(logits)
        if computed is not None:
            computed.wait()
            read_on_current_stream(logits)
        return logits

    @contextlib.contextmanager
    def _pass_stream(self) -> Iterator[None]:
        """Run on the stream of SGLang's passes, which under overlap is a stream of its own.

        Passes share the buffers of graphs, so none may begin before the previous one has ended.
        """
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            yield
            return
        with scheduler.forward_stream_ctx:
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            yield
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)

    def _write(self, rows: torch.Tensor, trunk: Slots, slots: npt.NDArray[np.int32]) -> None:
        """Write the slots of sequences to the table; the trunk remains from pass to pass."""
        table, begin = self._scheduler.req_to_token_pool.req_to_token, len(trunk)
        if trunk is not self._trunk:
            every = torch.tensor(self._rows, device=self._device)
            shared = self._on_device(trunk.astype(np.int32))
            table[:, :begin].index_copy_(0, every, shared.expand(len(every), begin))
            self._trunk = trunk
        own = table[:, begin : begin + slots.shape[1]]
        own.index_copy_(0, rows, self._on_device(slots))

    def _on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
