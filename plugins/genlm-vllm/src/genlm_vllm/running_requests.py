"""`RunningRequests`: requests that stay in vLLM's running list between steps.

A request without a next token has nothing to compute, so vLLM's scheduler passes over it. It
keeps its KV blocks and its place in the batch until the caller's token is fed to it. Further
children of a request are forks: they share its full blocks, and vLLM's copy-on-write copies the
last one. The module is the only one that touches vLLM's scheduler and KV cache manager;
`obstacle` names each part of them, and why requests cannot stay where one is missing.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from genlm_vllm.adapters import Adapters
from genlm_vllm.row_sampler import Receive, sampler_of

__all__ = ["LivingRequest", "RunningRequests", "obstacle"]

_NAMES = itertools.count()

# Path of each part from the engine core; then its attributes.
_SCHEDULER = (
    *("add_request", "finish_requests", "get_request_counts", "running", "waiting"),
    *("kv_holding_waiting", "max_num_active_reqs", "num_waiting_for_streaming_input"),
    *("kv_cache_manager", "hash_block_size"),
)
_RUNNER = {
    False: ("sampler", "discard_request_mask", "input_batch", "requests"),
    True: ("sampler", "req_states"),
}
_BATCH = ("req_ids", "req_id_to_index", "token_ids_cpu", "is_token_ids", "num_tokens_no_spec")
_STATES = ("req_id_to_index", "last_sampled_tokens")
_BLOCKS = ("req_to_blocks", "num_cached_block", "_pending_cow_copies", "block_size")
_POOL = ("touch", "get_new_blocks", "get_num_free_blocks")


def obstacle(engine: Any) -> str | None:
    """Return why requests cannot stay in the running list of an engine, None if they can."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        return "vLLM computes in processes of its own"
    config = engine.vllm_config
    model, parallel = config.model_config, config.parallel_config
    reasons = {
        "async scheduling": config.scheduler_config.async_scheduling,
        "several workers": parallel.world_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "the model's architecture": model.is_encoder_decoder or model.has_inner_state,
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or _missing_seam(engine, core)


def _missing_seam(engine: Any, core: Any) -> str | None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    seams: list[tuple[str, Callable[[], Any], Sequence[str]]] = [
        ("EngineCore", lambda: core, ("scheduler", "request_block_hasher")),
        ("Scheduler", lambda: core.scheduler, _SCHEDULER),
        ("ModelRunner", lambda: _runner_of(engine), ("sampler",)),
    ]
    if missing := _first_missing(seams):
        return missing
    runner = _runner_of(engine)
    second = hasattr(runner, "req_states")
    seams = [("ModelRunner", lambda: runner, _RUNNER[second])]
    if second:
        seams.append(("RequestState", lambda: runner.req_states, _STATES))
    else:
        seams.append(("InputBatch", lambda: runner.input_batch, _BATCH))
    manager = core.scheduler.kv_cache_manager
    seams += [
        ("KVCacheCoordinator", lambda: manager.coordinator, ("single_type_managers",)),
        ("BlockPool", lambda: manager.block_pool, _POOL),
    ]
    if missing := _first_missing(seams):
        return missing
    managers = manager.coordinator.single_type_managers
    if [type(each) for each in managers] != [FullAttentionManager]:
        return "KV blocks that do not all stay to the end of a request"
    return _first_missing([("FullAttentionManager", lambda: managers[0], _BLOCKS)])


def _first_missing(
    seams: Sequence[tuple[str, Callable[[], Any], Sequence[str]]],
) -> str | None:
    for part, find, names in seams:
        try:
            found = find()
        except AttributeError as error:
            return f"this vLLM has no {part}: {error}"
        for name in names:
            if not hasattr(found, name):
                return f"this vLLM's {part} has no {name}"
    return None


def _runner_of(engine: Any) -> Any:
    return engine.model_executor.driver_worker.worker.model_runner


class LivingRequest:
    """A request that vLLM keeps until nothing refers to this object, or until it is ended.

    Attributes:
        name: The request's id in vLLM.
        request: vLLM's request.
        adapter: Name of its adapter, None for the base model.
        length: Number of its tokens.
        added: Tokens that the model computes for the last ones; None if the prefix cache
            may serve some.
    """

    __slots__ = ("_dropped", "adapter", "added", "length", "name", "request")

    def __init__(
        self, request: Any, adapter: str | None, added: int | None, dropped: deque[str]
    ) -> None:
        self._dropped = dropped
        self.adapter = adapter
        self.replace(request, added)

    def replace(self, request: Any, added: int | None) -> None:
        """Refer to another request from now on."""
        self.request = request
        self.name: str = request.request_id
        self.length: int = request.num_tokens
        self.added = added

    def __del__(self) -> None:
        self._dropped.append(self.name)

    @property
    def computed(self) -> int:
        """Number of tokens that the model computed for the last row."""
        if self.added is not None:
            return self.added
        stats = self.request.prefill_stats
        return self.length - (0 if stats is None else stats.num_cached_tokens)


class RunningRequests:
    """Begins, feeds, forks and ends requests that stay.

    Args:
        engine: The `vllm.LLMEngine`, for which `obstacle` returns None.
        adapters: The loaded adapters.
        receive: Takes the logits of each batch; see `RowSampler`.

    Attributes:
        living: vLLM's requests by id, oldest first.
    """

    def __init__(self, engine: Any, adapters: Adapters, receive: Receive) -> None:
        from vllm import SamplingParams

        core = engine.engine_core.engine_core
        self._adapters = adapters
        self._scheduler = core.scheduler
        self._hasher = core.request_block_hasher
        manager = core.scheduler.kv_cache_manager
        (self._manager,) = manager.coordinator.single_type_managers
        self._pool = manager.block_pool
        self._hash_tokens = core.scheduler.hash_block_size
        self._params = SamplingParams(
            max_tokens=1 << 30,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            skip_clone=True,
        )
        lora = engine.vllm_config.lora_config
        self._adapters_at_once = 0 if lora is None else lora.max_loras
        self._dropped: deque[str] = deque()
        self.living: dict[str, Any] = {}
        self._sampler = sampler_of(_runner_of(engine), receive)
        self._sampler.install()

    def close(self) -> None:
        """Restore vLLM's sampler."""
        self._sampler.remove()

    def is_alive(self, living: LivingRequest) -> bool:
        """Whether vLLM still has a request."""
        return living.name in self.living

    def may_stay(self, adapter: str | None) -> bool:
        """Whether requests of an adapter may rest.

        vLLM limits the adapters of a batch when it admits requests, and resting requests
        are admitted.
        """
        return adapter is None or len(self._adapters.names) <= self._adapters_at_once

    def names_of(self, adapter: str) -> set[str]:
        """Return the requests of an adapter."""
        lora = self._adapters.request(adapter)
        return {name for name, each in self.living.items() if each.lora_request is lora}

    # -- tokens -----------------------------------------------------------------------

    def begin(self, token_ids: Iterable[int], adapter: str | None) -> LivingRequest:
        """Add a request, of which the prefix cache may serve the beginning."""
        request = self._added(list(token_ids), adapter)
        return LivingRequest(request, adapter, None, self._dropped)

    def begin_again(self, living: LivingRequest) -> None:
        """Replace a request by a new one of the same tokens, without blocks."""
        old = living.request
        self.end([living.name])
        living.replace(self._added(list(old.all_token_ids), living.adapter), None)

    def feed(self, livings: Sequence[LivingRequest], token_ids: Sequence[int]) -> None:
        """Append a token to each of some computed requests."""
        if not livings:
            return
        self._sampler.feed([each.name for each in livings], token_ids)
        for living, token_id in zip(livings, token_ids, strict=True):
            living.request.append_output_token_ids(token_id)
            living.length += 1
            living.added = 1

    def fork(
        self, parent: LivingRequest, computed: int, token_ids: Sequence[int]
    ) -> LivingRequest:
        """Add a request that has the first computed tokens of another one, and further ones.

        No token is recomputed if the KV cache has room. Otherwise the request starts like a
        new one.

        Args:
            parent: Has computed these tokens and at most one more.
            computed: Number of common tokens.
            token_ids: The further tokens, at least one.
        """
        original, adapter = parent.request, parent.adapter
        tokens = [*original.all_token_ids[:computed], *token_ids]
        if (
            len(self.living) >= self.places
            or not computed
            or self._pool.get_num_free_blocks() < 2
        ):
            return self.begin(tokens, adapter)
        share = functools.partial(self._share_blocks, original, computed)
        request = self._added(tokens, adapter, share)
        return LivingRequest(request, adapter, len(token_ids), self._dropped)

    def _added(
        self,
        token_ids: list[int],
        adapter: str | None,
        prepare: Callable[[Any], None] | None = None,
    ) -> Any:
        from vllm.v1.request import Request

        request = Request(
            f"member-{next(_NAMES)}",
            token_ids,
            self._params,
            None,
            arrival_time=0.0,
            lora_request=self._adapters.request(adapter),
            block_hasher=self._hasher if prepare is None else None,
        )
        if prepare is not None:
            prepare(request)
        self.living[request.request_id] = request
        self._scheduler.add_request(request)
        return request

    def _share_blocks(self, original: Any, computed: int, child: Any) -> None:
        """Share the blocks of another request's first computed tokens with a new request."""
        blocks_of, cached = self._manager.req_to_blocks, self._manager.num_cached_block
        full, rest = divmod(computed, self._manager.block_size)
        if self._hasher is not None:
            child._block_hasher = self._hasher  # noqa: SLF001 - hashes only what follows
            child.block_hashes = original.block_hashes[: computed // self._hash_tokens]
            child.update_block_hashes()
        child.num_computed_tokens = computed
        child.prefill_stats = None
        ids = self._sampler.computed_ids(original.request_id, computed)
        if ids is not None:
            further = child.prompt_token_ids[computed:]
            child.prompt_token_ids = np.append(ids, np.array(further, ids.dtype))
        parents = blocks_of[original.request_id]
        blocks = list(parents[:full])
        self._pool.touch(blocks)
        if rest:
            (copy,) = self._pool.get_new_blocks(1)
            self._pool.touch([parents[full], copy])  # both are kept until the copy has run
            self._manager._pending_cow_copies.append((parents[full], copy))  # noqa: SLF001
            blocks.append(copy)
        blocks_of[child.request_id] = blocks
        cached[child.request_id] = min(full, cached.get(original.request_id, 0))

    # -- ends -------------------------------------------------------------------------

    def end(self, names: Collection[str]) -> None:
        """End requests; their full blocks stay in the prefix cache."""
        from vllm.v1.request import RequestStatus

        ended = [name for name in names if self.living.pop(name, None) is not None]
        if ended:
            self._scheduler.finish_requests(ended, RequestStatus.FINISHED_ABORTED)

    def end_dropped(self) -> None:
        """End the unreferenced requests."""
        if self._dropped:
            self.end([self._dropped.popleft() for _ in range(len(self._dropped))])

    # -- room -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of requests that vLLM has not begun, without parked ones."""
        _, waiting = self._scheduler.get_request_counts()
        return int(waiting - self._scheduler.num_waiting_for_streaming_input)

    @property
    def places(self) -> int:
        """Number of requests that vLLM computes at once."""
        return int(self._scheduler.max_num_active_reqs)

    @property
    def free_places(self) -> int:
        """Number of further requests that vLLM would run or keep."""
        scheduler = self._scheduler
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        return int(scheduler.max_num_active_reqs - taken)

    @property
    def lacks_blocks(self) -> bool:
        """Whether there may be too few free blocks for the first waiting request."""
        queue = self._scheduler.kv_holding_waiting or self._scheduler.waiting
        if not queue:
            return False
        free = self._pool.get_num_free_blocks() * self._manager.block_size
        return bool(free < 2 * queue.peek_request().num_tokens)

    def preempted(self) -> list[str]:
        """Return the requests that vLLM has preempted, which wait first."""
        from vllm.v1.request import RequestStatus

        first = itertools.takewhile(
            lambda request: request.status == RequestStatus.PREEMPTED, self._scheduler.waiting
        )
        return [each.request_id for each in first if each.request_id in self.living]

    def stuck(self) -> list[str]:
        """Return the forks that wait for further blocks while they hold some."""
        holding = self._scheduler.kv_holding_waiting
        return [each.request_id for each in holding if each.request_id in self.living]
