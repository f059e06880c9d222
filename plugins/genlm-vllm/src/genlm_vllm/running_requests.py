"""`RunningRequests`: requests that stay in vLLM's running list between steps.

vLLM's scheduler skips a request without a next token. The request keeps its KV blocks and its
place in the batch until the caller's token is appended to it. Further children of a request are
forks: they share its full blocks, and vLLM's copy-on-write copies the last one. Except for a
setting in `lifecycle`, this is the only module that uses vLLM's scheduler and KV cache manager.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from genlm.plugin import Turns
from genlm_vllm.adapters import Adapters
from genlm_vllm.long_prompts import LongPrompts
from genlm_vllm.row_sampler import REQUEST_PREFIX
from genlm_vllm.workers import Workers

Integers64 = npt.NDArray[np.int64]

Room = Integers64
"""Number of places in vLLM's batch and of KV blocks, shape `(2,)`."""

_UNUSED_STEPS = 16
"""Number of steps after which an idle request may belong to a population that its caller keeps
without further queries, or to a member that has finished."""

_NUMBERS = itertools.count()


def why_not_resident(config: Any) -> str | None:
    """Return why requests cannot stay in the running list of an engine, None if they can.

    Args:
        config: The `vllm.VllmConfig`.
    """
    model = config.model_config
    reasons = {
        "pipelines": config.parallel_config.pipeline_parallel_size > 1,
        "offloaded KV blocks": config.kv_transfer_config is not None,
        "the model's architecture": model.is_encoder_decoder or model.has_inner_state,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _block_table(kv_cache_manager: Any) -> Any | None:
    """Return the manager of KV blocks if it is the only one and frees blocks with requests."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    managers: Sequence[Any] = kv_cache_manager.coordinator.single_type_managers
    kinds = [type(manager) for manager in managers]
    return managers[0] if kinds == [FullAttentionManager] else None


class ResidentRequest:
    """A request that stays in vLLM until it is ended or nothing refers to this object.

    Attributes:
        name: The request's id in vLLM.
        request: vLLM's request.
        adapter: Name of its adapter, None for the base model.
    """

    __slots__ = ("_dropped", "adapter", "name", "request")

    def __init__(self, request: Any, adapter: str | None, dropped: deque[str]) -> None:
        self._dropped = dropped
        self.name: str = request.request_id
        self.request = request
        self.adapter = adapter

    def __del__(self) -> None:
        self._dropped.append(self.name)


class Parent(NamedTuple):
    """The request that a sequence extends.

    Attributes:
        resident: Request that has the first tokens of the sequence.
        length: Number of these tokens.
        added: The further tokens.
    """

    resident: ResidentRequest
    length: int
    added: list[int]


class RunningRequests:
    """Begins, feeds, forks and ends resident requests.

    Args:
        engine: The `vllm.LLMEngine`.
        adapters: The loaded adapters.
        workers: vLLM's workers, which receive the tokens.

    Attributes:
        by_name: vLLM's requests by id, least recently used first.
        block_size: Tokens of a KV block in vLLM's configuration.
        block_tokens: Tokens of a KV block of the requests; None if the number of blocks that
            they need is not known, as with sliding windows.
        turns: Turns of the requests that wait in vLLM for their first step.
        steps: Number of vLLM's steps.
        tokens_computed: Number of tokens that vLLM has scheduled.
    """

    def __init__(self, engine: Any, adapters: Adapters, workers: Workers) -> None:
        from vllm import SamplingParams
        from vllm.v1.core.sched.request_queue import PriorityRequestQueue
        from vllm.v1.request import RequestStatus

        core = engine.engine_core.engine_core
        self._running = RequestStatus.RUNNING
        self._workers = workers
        self._adapters = adapters
        self._scheduler = core.scheduler
        manager = core.scheduler.kv_cache_manager
        # None with sliding windows, for one: forks then begin from the prefix cache.
        self._manager: Any = _block_table(manager)
        self.block_tokens: int | None = self._manager and self._manager.block_size
        self.block_size: int = engine.vllm_config.cache_config.block_size
        self._pool = manager.block_pool
        self._hasher = core.request_block_hasher
        self._hash_block_size = core.scheduler.hash_block_size
        self._params = SamplingParams(
            max_tokens=1 << 30,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            skip_clone=True,
        )
        self.turns = Turns()
        core.scheduler.waiting = PriorityRequestQueue()  # by turn, then by age
        self._vllm_schedule, core.scheduler.schedule = core.scheduler.schedule, self._schedule
        self.steps = self.tokens_computed = 0
        lora = engine.vllm_config.lora_config
        self._max_batch_adapters = 0 if lora is None else lora.max_loras
        self._dropped: deque[str] = deque()
        self.by_name: dict[str, Any] = {}
        self._long_prompts = LongPrompts(
            core.scheduler.scheduler_config,
            self.by_name,
            has_free_chunks=self.block_tokens is not None,
        )
        self._last_steps: dict[str, int] = {}  # in which requests received their last token

    def _schedule(self, *arguments: Any) -> Any:
        """Limit long prompts, call vLLM's `schedule`, and record the turn and the tokens."""
        waiting = self._scheduler.waiting
        if waiting:
            self.turns.begin_step(waiting.peek_request().priority)
        held = self._long_prompts.limit()
        if held:
            waiting.remove_requests(held)
        try:
            output = self._vllm_schedule(*arguments)
        finally:
            for request in held:
                waiting.add_request(request)
        self.steps += 1
        self.tokens_computed += output.total_num_scheduled_tokens
        return output

    def extend(self, parent: Parent) -> ResidentRequest | None:
        """Continue or fork a request, or return it if it is computing the same sequence.

        Returns:
            The request of the extended sequence; None if it needs a new request.
        """
        resident, length, added = parent
        if resident.name not in self.by_name:
            return None
        is_computed = self._has_computed(parent)
        if resident.request.num_tokens == length:
            if is_computed and len(added) == 1:
                self._feed(resident, added[0])
                return resident
            if not is_computed and not added:
                return resident
        return self.fork(parent, self.turns.current)

    def _has_computed(self, parent: Parent) -> bool:
        """Whether a request has computed its first tokens.

        The last block of a fork is copied in its first step, before which it must not be copied
        again.
        """
        request = parent.resident.request
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return bool(request.status == self._running and computed >= parent.length)

    def may_stay(self, adapter: str | None) -> bool:
        """Whether requests of an adapter may stay when they are idle.

        vLLM limits the adapters of a batch when it admits requests, and idle requests count
        as admitted.
        """
        return adapter is None or len(self._adapters.names) <= self._max_batch_adapters

    # -- tokens -----------------------------------------------------------------------

    def begin(
        self,
        token_ids: Iterable[int],
        adapter: str | None,
        turn: int,
        *,
        reads_cache: bool = True,
    ) -> ResidentRequest:
        """Add a request.

        Args:
            token_ids: Tokens of the request.
            adapter: Name of its adapter.
            turn: Its turn.
            reads_cache: Whether the request may begin from the prefix cache.
        """
        request = self._add(list(token_ids), adapter, turn, reads_cache=reads_cache)
        return ResidentRequest(request, adapter, self._dropped)

    def restart(self, resident: ResidentRequest) -> None:
        """Replace a request by a new one with the same id and tokens and without blocks."""
        token_ids, turn = list(resident.request.all_token_ids), resident.request.priority
        self.end([resident.name])
        resident.request = self._add(token_ids, resident.adapter, turn, name=resident.name)

    def _feed(self, resident: ResidentRequest, token_id: int) -> None:
        """Append a token to a computed request."""
        name = resident.name
        self._workers.inputs.tokens[name] = token_id
        self.by_name[name] = self.by_name.pop(name)  # the most recently used ones are last
        self._last_steps[name] = self.steps
        resident.request.append_output_token_ids(token_id)

    def fork(self, parent: Parent, turn: int) -> ResidentRequest | None:
        """Add a request that shares the computed tokens of another one.

        Without further tokens, the last common token is computed again, because rows are not
        stored.

        Args:
            parent: The other request, and the tokens.
            turn: Turn of the new request.

        Returns:
            The new request. None if the other request has not computed the tokens, if vLLM's
            batch is full, or if no KV block can be shared.
        """
        if not self._has_computed(parent):
            return None
        (resident, computed, added), original = parent, parent.resident.request
        if not added:
            computed -= 1
            added = [int(original.all_token_ids[computed])]
        if len(self.by_name) >= self.places or not computed or self.block_tokens is None:
            return None
        blocks = -(-(computed + len(added)) // self.block_tokens)
        if blocks - computed // self.block_tokens > self._pool.get_num_free_blocks():
            return None
        tokens = [*original.all_token_ids[:computed], *added]
        share = functools.partial(self._share_blocks, original, computed)
        request = self._add(tokens, resident.adapter, turn, share)
        return ResidentRequest(request, resident.adapter, self._dropped)

    def _add(
        self,
        token_ids: list[int],
        adapter: str | None,
        turn: int,
        prepare: Callable[[Any], None] | None = None,
        *,
        name: str | None = None,
        reads_cache: bool = True,
    ) -> Any:
        from vllm.v1.request import Request

        number = next(_NUMBERS)
        request = Request(
            name or f"{REQUEST_PREFIX}{number}",
            token_ids,
            self._params,
            None,
            arrival_time=float(number),
            priority=turn,
            lora_request=self._adapters.request(adapter),
            block_hasher=self._hasher if prepare is None else None,
        )
        request.skip_reading_prefix_cache = not reads_cache
        # Model runners copy an array faster than a list when a request joins a batch.
        if prepare is None:
            request.prompt_token_ids = np.array(token_ids, np.int32)
        else:
            prepare(request)
        self.by_name[request.request_id] = request
        self._long_prompts.add(request.request_id)
        self._last_steps[request.request_id] = self.steps
        self._scheduler.add_request(request)
        return request

    def _share_blocks(self, original: Any, computed: int, child: Any) -> None:
        """Share the blocks of another request's first computed tokens with a new request."""
        blocks_of, cached = self._manager.req_to_blocks, self._manager.num_cached_block
        full, rest = divmod(computed, self._manager.block_size)
        if self._hasher is not None:
            child._block_hasher = self._hasher  # noqa: SLF001 - hashes only further blocks
            child.block_hashes = original.block_hashes[: computed // self._hash_block_size]
            child.update_block_hashes()
        child.num_computed_tokens = computed
        child.prefill_stats = None
        ids = np.append(original.prompt_token_ids, np.int32(original.output_token_ids))
        further = np.int32(child.prompt_token_ids[computed:])
        child.prompt_token_ids = np.append(ids[:computed], further)
        parents = blocks_of[original.request_id]
        blocks = list(parents[:full])
        self._pool.touch(blocks)
        if rest:
            (copy,) = self._pool.get_new_blocks(1)
            self._pool.touch([parents[full], copy])  # until the copy has run
            self._manager._pending_cow_copies.append((parents[full], copy))  # noqa: SLF001
            blocks.append(copy)
        blocks_of[child.request_id] = blocks
        cached[child.request_id] = min(full, cached.get(original.request_id, 0))

    # -- ends -------------------------------------------------------------------------

    def end(self, names: Collection[str]) -> None:
        """End requests. Their full blocks stay in the prefix cache."""
        from vllm.v1.request import RequestStatus

        ended = [name for name in names if self.by_name.pop(name, None) is not None]
        for name in ended:
            del self._last_steps[name]
        if ended:
            self._scheduler.finish_requests(ended, RequestStatus.FINISHED_ABORTED)

    def end_dropped(self) -> None:
        """End the unreferenced requests."""
        if self._dropped:
            self.end([self._dropped.popleft() for _ in range(len(self._dropped))])

    # -- places and blocks ------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of requests that vLLM has not admitted."""
        _, waiting = self._scheduler.get_request_counts()
        return int(waiting - self._scheduler.num_waiting_for_streaming_input)

    @property
    def places(self) -> int:
        """Maximum number of requests in vLLM's batch."""
        return int(self._scheduler.max_num_active_reqs)

    @property
    def free_places(self) -> int:
        """Number of places without a request, negative if more requests wait for one."""
        return self.places - int(sum(self._scheduler.get_request_counts()))

    def free_room(self, computing: Iterable[str]) -> Room:
        """Return the free room without the blocks that some requests have yet to allocate.

        Args:
            computing: Names of these requests.

        Returns:
            Room; a number is negative if more requests wait for a place, or need blocks.
        """
        if self.block_tokens is None:
            return np.array([self.free_places, 0])
        missing = self._unallocated_blocks([self.by_name[name] for name in computing])
        return np.array([self.free_places, self._pool.get_num_free_blocks() - missing])

    def _unallocated_blocks(self, requests: Iterable[Any]) -> int:
        """Return the number of blocks that vLLM's requests have yet to allocate."""
        missing, new, size = 0, [], self._manager.block_size
        for request in requests:
            held = len(self._manager.req_to_blocks.get(request.request_id, ()))
            full, rest = divmod(request.num_tokens, size)
            if held:
                missing += max(0, full + bool(rest) - held)
            else:
                missing += bool(rest)
                new.append((request, full))  # the prefix cache may have its full blocks
        return missing + self.missing_blocks(new)

    def count_to_end(self, names: Sequence[str], room: Room) -> int | None:
        """Return how many of the first of some requests must end to free room.

        Returns None if the end of all of them does not free it.
        """
        places, blocks = room.tolist()
        uses: Counter[int] = Counter()
        for count, name in enumerate(names):
            if places <= 0 and blocks <= 0:
                return count
            places -= 1
            if self.block_tokens is not None:
                for block in self._manager.req_to_blocks.get(name, ()):
                    uses[block.block_id] += 1
                    blocks -= uses[block.block_id] == block.ref_cnt
        return None if places > 0 or blocks > 0 else len(names)

    def missing_blocks(self, prefixes: Iterable[tuple[Any, int]]) -> int:
        """Return the number of KV blocks of prefixes that no request has.

        Args:
            prefixes: vLLM's requests without blocks, and the number of full blocks of their
                prefixes. Equal blocks are counted once, except those of None, whose tokens are
                not known.
        """
        missing, step = 0, self._manager.block_size // self._hash_block_size
        hashes: set[Any] = set()
        for request, count in prefixes:
            if request is None or self._hasher is None:
                missing += count
            else:
                hashes.update(request.block_hashes[step - 1 : count * step : step])
        group = [self._manager.kv_cache_group_id]
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, group)
            missing += not found or not found[0].ref_cnt
        return missing

    def unused(self) -> list[str]:
        """Return the requests that have not begun or received a token for 16 steps."""
        last = self._last_steps
        return [name for name in self.by_name if self.steps - last[name] >= _UNUSED_STEPS]

    @property
    def lacks_blocks(self) -> bool:
        """Whether the free blocks do not suffice for the first waiting request.

        If the number of its blocks is not known, twice its tokens must fit.
        """
        queue = self._scheduler.kv_holding_waiting or self._scheduler.waiting
        if not queue:
            return False
        first, free = queue.peek_request(), self._pool.get_num_free_blocks()
        if self.block_tokens is not None:
            return bool(self._unallocated_blocks([first]) > free)
        return bool(free * self.block_size < 2 * first.num_tokens)

    def preempted(self) -> list[str]:
        """Return the requests that vLLM has preempted."""
        from vllm.v1.request import RequestStatus

        preempted = RequestStatus.PREEMPTED
        return [name for name, request in self.by_name.items() if request.status == preempted]

    def stuck(self) -> list[str]:
        """Return the forks that have blocks and wait for more."""
        from vllm.v1.request import RequestStatus

        return [
            request.request_id
            for request in self._scheduler.kv_holding_waiting
            if request.request_id in self.by_name and request.status == RequestStatus.WAITING
        ]
