"""Parameters of vLLM's requests, and results that are fetched from the workers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from genlm.plugin import (
    PackedCompletions,
    Query,
    Reduced,
    TokenScores,
    Vocabulary,
)
from genlm_vllm.processes import TRANSPORT
from genlm_vllm.row_buffer import Outputs
from genlm_vllm.scores import SCORES, ScoreTargets
from genlm_vllm.worker import call_workers

__all__ = ["FORK", "Fork", "LocalRows", "RemoteRows", "Result", "capture_row", "params_of"]

_BYTES_PER_CALL = 2**26
"""Rows are fetched from other processes in parts of 64 MiB, because each part is copied several
times."""

FORK = "genlm_fork"
"""Key in `SamplingParams.extra_args`."""


class Fork(NamedTuple):
    """A request begins with the first tokens of another one.

    Attributes:
        source: The other request's id.
        length: Number of shared tokens.
    """

    source: str
    length: int


Result = torch.Tensor | Reduced | TokenScores | Exception
"""Result of a query: its row, outputs of the row, its scores, or its error."""


def params_of(
    query: Query,
    number: int,
    rows: LocalRows,
    *,
    reads_cache: bool = True,
    fork: Fork | None = None,
) -> Any:
    """Return the `vllm.SamplingParams` of a request.

    `Capture` draws tokens, so vLLM samples greedily and without a seed; vLLM's own seeds fail
    on the CPU when a prompt is computed in chunks.

    Args:
        query: The query.
        number: Key under which the workers store what they compute.
        rows: Packs reductions for the workers.
        reads_cache: Whether vLLM's prefix cache may serve its beginning.
        fork: The request whose KV blocks a worker may copy.
    """
    import vllm

    from genlm_vllm.capture import ARGUMENT, DrawToken

    sampling = query.sampling
    length, stops = 1, []
    arguments: dict[str, Any]
    if sampling is not None:
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**64
        temperature = float(sampling.temperature)
        arguments = {ARGUMENT: DrawToken(number, seed, temperature, len(query))}
        length, stops = sampling.max_tokens, sorted(sampling.stop_token_ids)
    elif query.targets:
        first = len(query) - len(query.targets)
        outputs = rows.sent(query.outputs)
        arguments = {SCORES: ScoreTargets(number, first, query.targets, outputs)}
    else:
        arguments = capture_row(number, query, rows)
    return vllm.SamplingParams(
        max_tokens=length,
        temperature=0.0,
        stop_token_ids=stops,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,  # used by this request only
        skip_reading_prefix_cache=not reads_cache,
        extra_args=arguments if fork is None else {**arguments, FORK: fork},
    )


def capture_row(number: int, query: Query, rows: LocalRows) -> dict[str, Any]:
    """Return the extra arguments of a request for a row or for outputs of it."""
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

    def sent(self, outputs: Outputs) -> Outputs | bytes:
        """Return the requested outputs of a row in the form that workers receive."""
        return outputs

    def abandon(self, key: int) -> None:
        """Have the next `take` drop results that will not be fetched."""
        self._abandoned.append(key)

    def take(self, keys: Sequence[int]) -> dict[int, Result]:
        """Fetch the results of finished requests.

        Args:
            keys: The requests' keys.

        Returns:
            The stored results by key; rows do not share memory.
        """
        if not keys and not self._abandoned:
            return {}
        abandoned, self._abandoned = self._abandoned, []
        return self._taken(list(keys), abandoned)

    def _taken(self, keys: list[int], abandoned: list[int]) -> dict[int, Result]:
        results: dict[int, Result]
        results, self.tokens_copied = call_workers(self._engine, "genlm_take", keys, abandoned)[
            0
        ]
        return results

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

    def sent(self, outputs: Outputs) -> bytes:
        """Return the requested outputs of a row as bytes."""
        return TRANSPORT.pack_outputs(outputs)

    def _taken(self, keys: list[int], abandoned: list[int]) -> dict[int, Result]:
        count = max(1, _BYTES_PER_CALL // (4 * self._size))
        results: dict[int, Result] = {}
        for begin in range(0, max(1, len(keys)), count):
            part = keys[begin : begin + count]
            replies = call_workers(self._engine, "genlm_take_bytes", part, abandoned)
            for data, row_bytes, copied in replies:
                if not data:  # of a worker that stores no results
                    continue
                self.tokens_copied = copied
                rows = np.frombuffer(row_bytes, np.float32).reshape(-1, self._size)
                for key, result, error in TRANSPORT.unpack_completions(
                    PackedCompletions(data, rows)
                ):
                    results[key] = cast("Result", result if error is None else error)
        return results

    def close(self) -> None:
        """Do nothing: the workers' processes end."""
