"""Fetching the rows that `Capture` kept, from this process or from vLLM's workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm import Vocabulary
from genlm_vllm.worker import ask_workers

__all__ = ["LocalRows", "RemoteRows"]

_BYTES_A_CALL = 2**26
"""Rows are fetched from other processes in parts of 64 MiB, which are copied several
times on their way."""


class LocalRows:
    """Rows that are kept in this process, on the engine's device.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Whose ids rows are over.
    """

    def __init__(self, engine: Any, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._size = vocabulary.size
        ask_workers(engine, "genlm_begin", vocabulary.size, list(vocabulary.missing_ids))

    def take(self, keys: Sequence[int], oldest: int) -> dict[int, torch.Tensor]:
        """Fetch rows of finished requests and drop those of abandoned ones.

        Args:
            keys: The requests' keys.
            oldest: No request below this key will be asked for any more.

        Returns:
            A row by key, each in memory of its own. A row that is missing is left out.
        """
        if not keys:
            return {}
        rows: dict[int, torch.Tensor] = ask_workers(
            self._engine, "genlm_take", list(keys), oldest
        )[0]
        return rows

    def end(self) -> None:
        """Drop all rows."""
        ask_workers(self._engine, "genlm_end")


class RemoteRows(LocalRows):
    """Rows that workers keep; they arrive as bytes, on the CPU.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Whose ids rows are over.
    """

    def __init__(self, engine: Any, vocabulary: Vocabulary) -> None:
        super().__init__(engine, vocabulary)
        ask_workers(engine, "genlm_end_with", os.getpid())

    def take(self, keys: Sequence[int], oldest: int) -> dict[int, torch.Tensor]:
        """Fetch rows as `LocalRows.take` does."""
        count = max(1, _BYTES_A_CALL // (4 * self._size))
        oldest = min(oldest, *keys) if keys else oldest
        rows: dict[int, torch.Tensor] = {}
        for begin in range(0, len(keys), count):
            part = list(keys[begin : begin + count])
            for found, data in ask_workers(self._engine, "genlm_take_bytes", part, oldest):
                if found:  # one worker has rows
                    values = np.frombuffer(data, np.float32).reshape(len(found), -1)
                    rows |= {key: torch.tensor(row) for key, row in zip(found, values)}
        return rows

    def end(self) -> None:
        """Do nothing: the workers end."""
