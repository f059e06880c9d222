"""`GlobalLogprobsCapture`, a logits processor of older versions."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["GlobalLogprobsCapture"]


class GlobalLogprobsCapture:
    """Remembers the log-probabilities of the last batch; models here don't need it.

    What it did is in genlm-vllm, which `AsyncVirtualLM` maps to.

    Args:
        device: Where the logits are; not needed.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self._last: torch.Tensor | None = None
        self._lock = threading.Lock()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Remember the normalised logits, shape `(batch, vocabulary)`; return them as given."""
        rows = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        with self._lock:
            self._last = rows
        return logits

    def is_argmax_invariant(self) -> bool:
        """True: no logit is changed."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing: rows are remembered by their place."""

    def get_logprobs(self, batch_index: int = 0) -> torch.Tensor | None:
        """A copy of one row, None if there is none."""
        with self._lock:
            if self._last is None or batch_index >= len(self._last):
                return None
            return self._last[batch_index].clone()

    def get_all_logprobs(self) -> torch.Tensor | None:
        """A copy of all rows, None if there are none."""
        with self._lock:
            return None if self._last is None else self._last.clone()

    def clear(self) -> None:
        """Forget the rows."""
        with self._lock:
            self._last = None
