"""`Request`: a query inside vLLM, from its parameters to its answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch

from genlm import Completion, EvaluationError, Query, SamplingParams

__all__ = ["Request", "params_of"]


@dataclass(frozen=True, slots=True)
class Request:
    """A query and the number under which vLLM has it.

    Attributes:
        query: What was asked.
        number: Ascends; also the key of its row.
    """

    query: Query
    number: int

    @property
    def wants_row(self) -> bool:
        """Whether it asks for a row, not for a continuation."""
        return self.query.sampling is None

    def error(self, output: Any) -> EvaluationError | None:
        """Return why a finished output is no answer, None if it is one."""
        reason = output.outputs[0].finish_reason if output.outputs else "nothing"
        if reason in {"length", "stop"}:
            return None
        return EvaluationError(
            f"vLLM ended the request with {reason!r} instead of an answer; its log says more"
        )

    def completion(self, output: Any, row: torch.Tensor | None) -> Completion:
        """Make the answer of a finished output, and of the row if it asks for one."""
        query_id = self.query.query_id
        error = self.error(output)
        if error is None and self.wants_row and row is None:
            error = EvaluationError("vLLM finished the request without computing its row")
        if error is not None:
            return Completion(query_id, error=error)
        if self.query.sampling is None:
            return Completion(query_id, row)
        return Completion(query_id, _until_stop(output.outputs[0], self.query.sampling))


def _until_stop(output: Any, sampling: SamplingParams) -> list[int]:
    drawn = list(output.token_ids)
    if drawn and drawn[-1] in sampling.stop_token_ids:
        drawn.pop()
    return drawn


def params_of(request: Request) -> Any:
    """Make vLLM's parameters of a request.

    `genlm_vllm.capture` draws, so vLLM itself is always greedy and has no seed: its own
    seeds fail on the CPU when a prompt is computed in chunks.
    """
    import vllm

    from genlm_vllm.capture import ARGUMENT, Draw, WantedRow

    sampling = request.query.sampling
    wish: WantedRow | Draw = WantedRow(request.number)
    length, stops = 1, []
    if sampling is not None:
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**64
        wish = Draw(seed, float(sampling.temperature), len(request.query.token_ids))
        length, stops = sampling.max_tokens, sorted(sampling.stop_token_ids)
    return vllm.SamplingParams(
        max_tokens=length,
        temperature=0.0,
        stop_token_ids=stops,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,  # made for this request alone
        extra_args={ARGUMENT: wish},
    )
