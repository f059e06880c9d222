"""Requests in vLLM: their parameters, their results, and their completions."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    Query,
    Reduced,
    Reduction,
    SamplingParams,
    TokenScores,
    Vocabulary,
)
from genlm.prefix import TextResult
from genlm_vllm.forks import FORK, Fork
from genlm_vllm.scores import SCORES, Scores, ScoreTargets
from genlm_vllm.transport import pack_outputs, unpack_result
from genlm_vllm.worker import call_workers

__all__ = ["LocalRows", "RemoteRows", "Request", "Result", "capture_row", "params_of"]

_BYTES_PER_CALL = 2**26
"""Rows are fetched from other processes in parts of 64 MiB, because each part is copied several
times."""

Result = torch.Tensor | Reduced | TokenScores | Exception
"""What was computed for a query: its row, what it asks of the row, its scores, or its error."""


@dataclass(frozen=True, slots=True)
class Request:
    """A query and its number in vLLM.

    Attributes:
        query: The query.
        number: Ascending; also the key of the query's result.
        reads_cache: Whether vLLM's prefix cache may serve its beginning.
    """

    query: Query
    number: int
    reads_cache: bool = True

    @property
    def is_drawn(self) -> bool:
        """Whether the query asks for a continuation, which vLLM's output has."""
        return self.query.sampling is not None

    def error(self, output: Any) -> EvaluationError | None:
        """Return the error of a finished output, None if it is complete."""
        reason = output.outputs[0].finish_reason if output.outputs else "nothing"
        if reason in {"length", "stop"}:
            return None
        return EvaluationError(
            f"vLLM ended the request with {reason!r} before it was complete; see its log"
        )

    def completion(self, output: Any, result: Result | None) -> Completion:
        """Make the completion from a finished output and what the worker computed."""
        query_id = self.query.query_id
        error = self.error(output)
        if error is not None:
            return Completion(query_id, error=error)
        if self.query.sampling is None or isinstance(result, Exception):
            return completion(self.query, result)
        return Completion(query_id, _until_stop(output.outputs[0], self.query.sampling))


def completion(query: Query, result: Result | None) -> Completion:
    """Make the completion from what the worker computed, None if it computed nothing."""
    if result is None:
        what = "scores" if query.targets else "row"
        result = EvaluationError(f"vLLM finished the request without computing its {what}")
    if isinstance(result, Exception):
        return Completion(query.query_id, error=result)
    return Completion(query.query_id, result)


def _until_stop(output: Any, sampling: SamplingParams) -> list[int]:
    drawn = list(output.token_ids)
    if drawn and drawn[-1] in sampling.stop_token_ids:
        drawn.pop()
    return drawn


def params_of(request: Request, rows: LocalRows, fork: Fork | None = None) -> Any:
    """Return the `vllm.SamplingParams` of a request.

    `Capture` draws tokens, so vLLM samples greedily and without a seed; vLLM's own seeds fail
    on the CPU when a prompt is computed in chunks.

    Args:
        request: The request.
        rows: Knows how reductions reach the workers.
        fork: What it begins with, if a worker may copy that.
    """
    import vllm

    from genlm_vllm.capture import ARGUMENT, DrawToken

    query, sampling = request.query, request.query.sampling
    length, stops = 1, []
    arguments: dict[str, Any]
    if sampling is not None:
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**64
        temperature = float(sampling.temperature)
        arguments = {ARGUMENT: DrawToken(request.number, seed, temperature, len(query))}
        length, stops = sampling.max_tokens, sorted(sampling.stop_token_ids)
    elif query.targets:
        first = len(query) - len(query.targets)
        [output] = rows.sent(query.outputs)
        arguments = {SCORES: ScoreTargets(request.number, first, query.targets, output)}
    else:
        arguments = capture_row(request.number, query, rows)
    return vllm.SamplingParams(
        max_tokens=length,
        temperature=0.0,
        stop_token_ids=stops,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,  # used by this request only
        skip_reading_prefix_cache=not request.reads_cache,
        extra_args=arguments if fork is None else {**arguments, FORK: fork},
    )


def capture_row(number: int, query: Query, rows: LocalRows) -> dict[str, Any]:
    """Return the extra arguments of a request that asks for a row or for something of it."""
    from genlm_vllm.capture import ARGUMENT, CaptureRow

    outputs = None if query.outputs == (None,) else rows.sent(query.outputs)
    return {ARGUMENT: CaptureRow(number, outputs)}


class LocalRows:
    """Fetches results that this process stores, rows on the engine's device.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Defines the ids of the rows.

    Attributes:
        tokens_copied: Tokens that forked requests copied instead of computing them, as of the
            last rows.
    """

    def __init__(self, engine: Any, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._size = vocabulary.size
        self.tokens_copied = 0
        self._abandoned: list[int] = []
        call_workers(
            engine, "genlm_start_capture", vocabulary.size, list(vocabulary.missing_ids)
        )

    def sent(self, outputs: Sequence[Reduction | None]) -> Sequence[Reduction | bytes | None]:
        """Return what is asked of a row as it is sent to the workers."""
        return outputs

    def abandon(self, key: int) -> None:
        """Have the next `take` drop what may be stored and will not be fetched."""
        self._abandoned.append(key)

    def take(self, keys: Sequence[int]) -> dict[int, Result]:
        """Fetch the results of finished requests.

        Args:
            keys: The requests' keys.

        Returns:
            The stored results by key; rows in memory of their own.
        """
        if not keys and not self._abandoned:
            return {}
        abandoned, self._abandoned = self._abandoned, []
        return self._taken(list(keys), abandoned)

    def _taken(self, keys: list[int], abandoned: list[int]) -> dict[int, Result]:
        results: dict[int, Result]
        results, scores, self.tokens_copied = call_workers(
            self._engine, "genlm_take", keys, abandoned
        )[0]
        return results | {key: _scores(packed) for key, packed in scores.items()}

    def close(self) -> None:
        """Drop all rows."""
        call_workers(self._engine, "genlm_stop_capture")


class RemoteRows(LocalRows):
    """Fetches results that workers store, as bytes, to the CPU.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Defines the ids of the rows.
    """

    def __init__(self, engine: Any, vocabulary: Vocabulary) -> None:
        super().__init__(engine, vocabulary)
        call_workers(engine, "genlm_start_parent_watchdog", os.getpid())

    def sent(self, outputs: Sequence[Reduction | None]) -> Sequence[bytes | None]:
        """Return what is asked of a row as bytes."""
        return pack_outputs(outputs)

    def _taken(self, keys: list[int], abandoned: list[int]) -> dict[int, Result]:
        count = max(1, _BYTES_PER_CALL // (4 * self._size))
        results: dict[int, Result] = {}
        for begin in range(0, max(1, len(keys)), count):
            part = keys[begin : begin + count]
            replies = call_workers(self._engine, "genlm_take_bytes", part, abandoned)
            for found, data, packed, scores, copied in replies:
                if found or packed or scores:  # the worker that stores results
                    self.tokens_copied = copied
                if found:
                    values = np.frombuffer(data, np.float32).reshape(len(found), -1)
                    results |= {key: torch.tensor(row) for key, row in zip(found, values)}
                results |= {key: unpack_result(each) for key, each in packed}
                results |= {key: _scores(each) for key, each in scores}
        return results

    def close(self) -> None:
        """Do nothing: the workers' processes end."""


def _scores(packed: Scores | TextResult) -> Result:
    if isinstance(packed, (Reduced, TokenScores, Exception)):
        return packed
    if isinstance(packed, str):
        return EvaluationError(f"vLLM did not compute the scores: {packed}")
    logprobs, is_top = packed
    found = np.frombuffer(logprobs, np.float32)
    nans = int(np.isnan(found).sum())
    if nans:
        return EvaluationError(
            f"the engine computed NaN for {nans} of {len(found)} targets: try dtype='float32' "
            f"or another engine"
        )
    tops = np.frombuffer(is_top, np.bool_)
    return TokenScores(torch.tensor(found), torch.tensor(tops))
