"""Requests in vLLM: their parameters, their rows, and their completions."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from genlm.plugin import Completion, EvaluationError, Query, SamplingParams, Vocabulary
from genlm_vllm.forks import FORK, Fork
from genlm_vllm.worker import call_workers

__all__ = ["LocalRows", "RemoteRows", "Request", "params_of"]

_BYTES_PER_CALL = 2**26
"""Rows are fetched from other processes in parts of 64 MiB, because each part is copied several
times."""


@dataclass(frozen=True, slots=True)
class Request:
    """A query and its number in vLLM.

    Attributes:
        query: The query.
        number: Ascending; also the key of the query's row.
    """

    query: Query
    number: int

    @property
    def wants_row(self) -> bool:
        """Whether the query asks for a row, not for a continuation."""
        return self.query.sampling is None

    def error(self, output: Any) -> EvaluationError | None:
        """Return the error of a finished output, None if it is complete."""
        reason = output.outputs[0].finish_reason if output.outputs else "nothing"
        if reason in {"length", "stop"}:
            return None
        return EvaluationError(
            f"vLLM ended the request with {reason!r} before it was complete; see its log"
        )

    def completion(self, output: Any, row: torch.Tensor | None) -> Completion:
        """Make the completion from a finished output and, for a row query, the row."""
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


def params_of(request: Request, fork: Fork | None = None) -> Any:
    """Return the `vllm.SamplingParams` of a request.

    `Capture` draws tokens, so vLLM samples greedily and without a seed; vLLM's own seeds fail
    on the CPU when a prompt is computed in chunks.

    Args:
        request: The request.
        fork: What it begins with, if a worker may copy that.
    """
    import vllm

    from genlm_vllm.capture import ARGUMENT, CaptureRequest, CaptureRow, DrawToken

    sampling = request.query.sampling
    capture: CaptureRequest = CaptureRow(request.number)
    length, stops = 1, []
    if sampling is not None:
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**64
        prompt_length = len(request.query.token_ids)
        capture = DrawToken(seed, float(sampling.temperature), prompt_length)
        length, stops = sampling.max_tokens, sorted(sampling.stop_token_ids)
    return vllm.SamplingParams(
        max_tokens=length,
        temperature=0.0,
        stop_token_ids=stops,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,  # used by this request only
        extra_args={ARGUMENT: capture} if fork is None else {ARGUMENT: capture, FORK: fork},
    )


class LocalRows:
    """Fetches rows that this process stores, on the engine's device.

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

    def abandon(self, key: int) -> None:
        """Have the next `take` drop a row that may be stored and will not be fetched."""
        self._abandoned.append(key)

    def take(self, keys: Sequence[int]) -> dict[int, torch.Tensor]:
        """Fetch the rows of finished requests.

        Args:
            keys: The requests' keys.

        Returns:
            The stored rows by key, each in memory of its own.
        """
        if not keys:
            return {}
        abandoned, self._abandoned = self._abandoned, []
        return self._taken(list(keys), abandoned)

    def _taken(self, keys: list[int], abandoned: list[int]) -> dict[int, torch.Tensor]:
        rows: dict[int, torch.Tensor]
        rows, self.tokens_copied = call_workers(
            self._engine, "genlm_take_rows", keys, abandoned
        )[0]
        return rows

    def close(self) -> None:
        """Drop all rows."""
        call_workers(self._engine, "genlm_stop_capture")


class RemoteRows(LocalRows):
    """Fetches rows that workers store, as bytes, to the CPU.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Defines the ids of the rows.
    """

    def __init__(self, engine: Any, vocabulary: Vocabulary) -> None:
        super().__init__(engine, vocabulary)
        call_workers(engine, "genlm_start_parent_watchdog", os.getpid())

    def _taken(self, keys: list[int], abandoned: list[int]) -> dict[int, torch.Tensor]:
        count = max(1, _BYTES_PER_CALL // (4 * self._size))
        rows: dict[int, torch.Tensor] = {}
        for begin in range(0, len(keys), count):
            part = keys[begin : begin + count]
            replies = call_workers(self._engine, "genlm_take_row_bytes", part, abandoned)
            for found, data, copied in replies:
                if found:  # the worker that stores rows
                    self.tokens_copied = copied
                    values = np.frombuffer(data, np.float32).reshape(len(found), -1)
                    rows |= {key: torch.tensor(row) for key, row in zip(found, values)}
        return rows

    def close(self) -> None:
        """Do nothing: the workers' processes end."""
