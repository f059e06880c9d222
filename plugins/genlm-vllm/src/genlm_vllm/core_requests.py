"""`CoreRequests`: requests of vLLM's engine core.

Requests go to the engine core directly, like those of `vllm.AsyncLLM`. `LLMEngine` does not
know them, so their outputs are removed from the step's outputs before `LLMEngine` sees them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from genlm_vllm.row_sampler import OWN

__all__ = ["CoreRequests", "Output"]

_NUMBERS = itertools.count()


class Output(NamedTuple):
    """Output of a step for a request.

    Attributes:
        name: The request's id.
        token_ids: The tokens that were sampled.
        cached: Number of cached tokens of a request that has just begun; else 0.
        is_finished: Whether vLLM has stopped the request.
        reason: Reason of an early stop, None without one.
    """

    name: str
    token_ids: Sequence[int]
    cached: int
    is_finished: bool
    reason: str | None


class CoreRequests:
    """Sends requests to the engine core, and collects their outputs.

    Args:
        engine: The `vllm.LLMEngine`.

    Attributes:
        has_run: Whether the last step executed the model.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs, FinishReason

        self._complete = {FinishReason.LENGTH, FinishReason.STOP}
        self._nothing = EngineCoreOutputs
        self._engine = engine
        self._client = engine.engine_core
        self._tasks = engine.get_supported_tasks()
        self._outputs: list[Any] = []
        self.has_run = False
        # `LLMEngine.step` calls it; the instance's attribute hides the method.
        self._client.get_output = self._other_outputs

    def close(self) -> None:
        """Leave the engine core's client as it was."""
        del self._client.get_output

    def begin(
        self, prefix: str, token_ids: Sequence[int], params: Any, lora_request: Any
    ) -> str:
        """Send a new request for the next step and return its id.

        Raises:
            Exception: vLLM refuses it.
        """
        from vllm.inputs import tokens_input

        request = self._engine.input_processor.process_inputs(
            f"{prefix}{next(_NUMBERS)}",
            tokens_input(list(token_ids)),
            params,
            supported_tasks=self._tasks,
            lora_request=lora_request,
        )
        self._client.add_request(request)
        name: str = request.request_id
        return name

    def end(self, names: Sequence[str]) -> None:
        """End requests; their full blocks stay in vLLM's prefix cache."""
        self._client.abort_requests(list(names))

    def _other_outputs(self) -> Any:
        """Run a step; return its outputs without those of these requests."""
        core = self._client.engine_core
        outputs, self.has_run = core.step_fn()
        core.post_step(model_executed=self.has_run)
        core_outputs = (outputs and outputs.get(0)) or self._nothing()
        others: list[Any] = []
        for core_output in core_outputs.outputs:
            own = core_output.request_id.startswith(OWN)
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
