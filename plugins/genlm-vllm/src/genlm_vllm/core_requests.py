"""`CoreRequests`: requests of vLLM's engine core, and the core's load.

Requests go to the engine core directly, like those of `vllm.AsyncLLM`. `LLMEngine` does not
know them, so their outputs are removed from the step's outputs before `LLMEngine` sees them.

A resumable request, of vLLM's streaming input, is parked by vLLM's scheduler with its KV blocks
when it has generated its maximum number of tokens. When it is sent again, under the same id
and with further tokens, vLLM drops its sampled token and computes the further ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from packaging.version import Version

from genlm_vllm.versions import check_version

__all__ = ["CoreRequests", "Load", "Output", "obstacle"]

_PREFIX = "genlm-"
"""Prefix of these requests' ids; ids of `LLMEngine`'s own requests lack it."""

_SAMPLED_HASHES_DROPPED = Version("0.32")
"""The first vLLM that drops the hash of a block which the token that it sampled completed."""

_SETTLING_S = 0.005
"""Within this time of a change, another process's figures may predate the change."""


class Load(NamedTuple):
    """Load of vLLM's scheduler.

    Attributes:
        running: Number of requests that it computes, without parked and waiting ones.
        free_tokens: Tokens for which the KV cache has free blocks, cached prefixes included.
        is_settled: Whether this includes all earlier requests. With other processes, whose
            idle steps are fast, True at most once in a short time.
    """

    running: int
    free_tokens: float
    is_settled: bool


class Output(NamedTuple):
    """Output of a step for a request.

    Attributes:
        name: The request's id.
        token_ids: The tokens that were sampled.
        cached: Number of cached tokens of a request that has just begun; else 0.
        is_finished: Whether vLLM has stopped or parked the request.
        reason: Reason of an early stop, None without one.
    """

    name: str
    token_ids: Sequence[int]
    cached: int
    is_finished: bool
    reason: str | None


def obstacle(engine: Any) -> str | None:
    """Return why requests cannot stay in an engine of vLLM, None if they can."""
    config = engine.vllm_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipelines"
    if config.kv_transfer_config is not None:
        return "a KV connector"
    if config.scheduler_config.scheduler_cls is not None:
        return "another scheduler"
    if config.model_config.is_encoder_decoder or config.model_config.has_inner_state:
        return "the model's architecture"
    return None


class CoreRequests:
    """Sends requests to the engine core, and collects their outputs.

    Args:
        engine: The `vllm.LLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.v1.engine import FinishReason

        self._complete = {FinishReason.LENGTH, FinishReason.STOP}
        self._engine = engine
        self._client = engine.engine_core
        self._tasks = engine.get_supported_tasks()
        self._outputs: list[Any] = []
        self._progressed = self._has_sent = False
        self._stats: Any = None
        self._stats_time_s = self._changed_s = 0.0
        config = engine.vllm_config
        block_size = config.cache_config.block_size
        self._cache_tokens = config.cache_config.num_gpu_blocks * block_size
        self._hash_tokens = 0
        keeps_hashes = Version(check_version()) < _SAMPLED_HASHES_DROPPED
        if keeps_hashes and config.cache_config.enable_prefix_caching:
            # Blocks of several groups of layers may differ in size.
            self._hash_tokens = math.gcd(block_size, 16)
        # `LLMEngine.step` calls it; the instance's attribute hides the method.
        self._get_output = self._client.get_output
        self._client.get_output = self._other_outputs

    def close(self) -> None:
        """Leave the engine core's client as it was."""
        del self._client.get_output

    @property
    def slots(self) -> int:
        """Maximum number of requests that vLLM runs or keeps parked."""
        config = self._engine.vllm_config.scheduler_config
        return int(getattr(config, "max_num_active_seqs", None) or config.max_num_seqs)

    def can_continue(self, length: int) -> bool:
        """Whether a parked request of a length may be continued.

        Before 0.32 vLLM keeps the hash of a block that its own sampled token completed. The
        token that takes its place would enter the prefix cache under that hash.
        """
        return not self._hash_tokens or (length + 1) % self._hash_tokens != 0

    # -- requests ---------------------------------------------------------------------

    def new(
        self,
        number: int,
        token_ids: Sequence[int],
        params: Any,
        lora_request: Any,
        *,
        resumable: bool,
    ) -> Any:
        """Return a new request that vLLM has built and checked, ready to send.

        Raises:
            Exception: vLLM refuses it.
        """
        from vllm.inputs import tokens_input

        return self._engine.input_processor.process_inputs(
            f"{_PREFIX}{number}",
            tokens_input(list(token_ids)),
            params,
            supported_tasks=self._tasks,
            lora_request=lora_request,
            resumable=resumable,
        )

    def send(self, core_request: Any) -> None:
        """Send a new or parked request for the next step."""
        self._client.add_request(core_request)
        self._has_sent = True

    def extend(
        self, core_request: Any, token_ids: Sequence[int], extra_args: dict[str, Any]
    ) -> None:
        """Continue a parked request with further tokens and other extra arguments."""
        core_request.prompt_token_ids = list(token_ids)
        core_request.sampling_params.extra_args = extra_args
        self.send(core_request)

    def end(self, names: Sequence[str]) -> None:
        """End requests; their full blocks stay in vLLM's prefix cache."""
        self._client.abort_requests(list(names))
        self._changed_s = time.monotonic()

    # -- outputs ----------------------------------------------------------------------

    def _other_outputs(self) -> Any:
        """Run a step; return its outputs without those of these requests."""
        if self._has_sent:
            self._has_sent, self._changed_s = False, time.monotonic()
        core_outputs = self._get_output()
        self._progressed = bool(core_outputs.outputs)
        self._stats, self._stats_time_s = core_outputs.scheduler_stats, core_outputs.timestamp
        others: list[Any] = []
        for core_output in core_outputs.outputs:
            own = core_output.request_id.startswith(_PREFIX)
            (self._outputs if own else others).append(core_output)
        core_outputs.outputs = others
        return core_outputs

    def take(self) -> list[Output]:
        """Return the outputs of the last step."""
        core_outputs, self._outputs = self._outputs, []
        outputs = []
        for each in core_outputs:
            reason, prefilled = each.finish_reason, each.prefill_stats
            is_complete = reason in self._complete and each.new_token_ids
            cached = 0 if prefilled is None else prefilled.num_cached_tokens
            problem = None if reason is None or is_complete else str(reason)
            outputs.append(
                Output(each.request_id, each.new_token_ids, cached, reason is not None, problem)
            )
        return outputs

    @property
    def progressed(self) -> bool:
        """Whether the last step had outputs, of any request."""
        return self._progressed

    def load(self) -> Load | None:
        """Return the scheduler's load after the last step; None if it was not reported."""
        core = getattr(self._client, "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        if scheduler is not None:  # in this process
            usage, settled = scheduler.kv_cache_manager.usage, True
            running = len(scheduler.running)
        elif self._stats is not None:
            usage, running = self._stats.kv_cache_usage, self._stats.num_running_reqs
            settled = self._stats_time_s >= self._changed_s + _SETTLING_S
            if settled:
                self._changed_s = self._stats_time_s
        else:
            return None
        return Load(running, (1.0 - usage) * self._cache_tokens, settled)
