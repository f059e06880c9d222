"""`RowBuffer`: rows of finished and unfinished requests, until the engine fetches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ROW_BUFFER", "RowBuffer", "VocabularyIds"]


@dataclass(frozen=True)
class VocabularyIds:
    """The part of a vocabulary that makes rows; a worker has no tokenizer.

    Attributes:
        size: Number of ids.
        missing_ids: Ids below `size` without a token.
    """

    size: int
    missing_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _BufferedRow:
    """Row `index` of a batch; on a GPU its computation may not have finished."""

    rows: torch.Tensor
    index: int
    computed: Any = None  # torch.cuda.Event

    def owned(self) -> torch.Tensor:
        """Wait for the computation and return the row in memory of its own."""
        if self.computed is None:
            return self.rows[self.index]
        self.computed.synchronize()
        # vLLM computes on its own stream. The copy belongs to the default stream, on which
        # the caller reads it, so that its memory is not reused before.
        stream = torch.cuda.default_stream(self.rows.device)
        self.rows.record_stream(stream)
        with torch.cuda.stream(stream):
            return self.rows[self.index].clone()


class RowBuffer:
    """Rows by the key of their request.

    Attributes:
        ids: The ids of the rows.
        active: Whether this process buffers rows: one of several tensor-parallel ranks does.
        tokens_copied: Tokens of forked requests that were copied instead of computed.
    """

    def __init__(self) -> None:
        self.ids = VocabularyIds(0)
        self.active = False
        self.tokens_copied = 0
        self._rows: dict[int, _BufferedRow] = {}

    def reset(self, ids: VocabularyIds, *, active: bool) -> None:
        """Drop all rows and set the attributes."""
        self._rows.clear()
        self.ids = ids
        self.active = active
        self.tokens_copied = 0

    def put(self, keys: list[int], rows: torch.Tensor) -> None:
        """Store rows, replacing earlier ones of the same keys."""
        if rows.is_cuda:
            computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()
            for index, key in enumerate(keys):
                self._rows[key] = _BufferedRow(rows, index, computed)
        else:
            copies: Any = torch.unbind_copy(rows)  # type: ignore[func-returns-value]
            for key, row in zip(keys, copies, strict=True):
                self._rows[key] = _BufferedRow(row[None], 0)

    def take(self, keys: list[int], abandoned: list[int]) -> dict[int, torch.Tensor]:
        """Remove and return the stored rows of `keys`; drop the `abandoned` ones."""
        taken = {key: self._rows.pop(key) for key in keys if key in self._rows}
        for key in abandoned:
            self._rows.pop(key, None)
        return {key: row.owned() for key, row in taken.items()}

    def __len__(self) -> int:
        return len(self._rows)


ROW_BUFFER = RowBuffer()
"""The buffer of this process: vLLM creates logits processors itself, for one live engine."""
