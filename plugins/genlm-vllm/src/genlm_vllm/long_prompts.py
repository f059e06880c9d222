"""`LongPrompts`: a limit of the tokens of long prompts in a step of vLLM.

vLLM gives the tokens of a step to requests in the order in which they began, so that shorter
requests would wait until it has computed a long prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_BEGUN = 2
"""Number of incomplete long requests from which no further one begins if others wait."""


class LongPrompts:
    """Leaves a part of each step to requests other than those of long prompts.

    A prompt is long if it has more than half of the tokens of a step. The limit is vLLM's
    `long_prefill_token_threshold`; if the user has set it, or if the model requires that chunks
    have certain lengths, this object does nothing.

    Args:
        config: The `vllm.config.SchedulerConfig`.
        requests: vLLM's unfinished requests by id.
        has_free_chunks: Whether chunks of prompts may have any length.
    """

    def __init__(
        self, config: Any, requests: Mapping[str, Any], *, has_free_chunks: bool
    ) -> None:
        self._config, self._requests = config, requests
        self._step_tokens: int = config.max_num_batched_tokens
        self._is_active = (
            has_free_chunks
            and config.enable_chunked_prefill
            and not config.long_prefill_token_threshold
        )
        self._incomplete: set[str] = set()

    def add(self, name: str) -> None:
        """Note a new request, whose tokens vLLM has not computed."""
        if self._is_active and 2 * self._missing(name) > self._step_tokens:
            self._incomplete.add(name)

    def limit(self) -> list[Any]:
        """Set the limit of the next step, if shorter requests need a part of it.

        Returns:
            Long requests that must not begin in this step, so that few have KV blocks.
        """
        if not self._incomplete:
            return []
        begun, waiting, needed = 0, [], 0
        self._incomplete = {
            name for name in self._incomplete & self._requests.keys() if self._missing(name)
        }
        for name, request in self._requests.items():
            if name not in self._incomplete:
                needed += self._missing(name)
            elif request.num_computed_tokens:
                begun += 1
            elif not request.is_finished():
                waiting.append(request)
        limited = self._step_tokens - min(needed, self._step_tokens // 2)
        is_limited = self._incomplete and needed
        threshold = limited // max(1, begun) if is_limited else 0
        self._config.long_prefill_token_threshold = threshold
        return waiting if is_limited and begun >= _MAX_BEGUN else []

    def _missing(self, name: str) -> int:
        """Return the number of tokens of a request that vLLM has not computed."""
        request = self._requests[name]
        return int(request.num_tokens - request.num_computed_tokens)
