"""`KeptRows`: rows between the step that computed them and whoever takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KEPT", "KeptRows", "TokenIds"]


@dataclass(frozen=True)
class TokenIds:
    """What a row needs to know of a vocabulary: a worker has no tokenizer."""

    size: int
    missing_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _KeptRow:
    """A row of a batch on its way: on a GPU it may still be computed."""

    rows: torch.Tensor
    place: int
    computed: Any = None  # torch.cuda.Event

    def owned(self) -> torch.Tensor:
        """The row once it is computed, in memory of its own."""
        if self.computed is None:
            return self.rows[self.place]
        self.computed.synchronize()
        # vLLM computes on a stream of its own. The copy belongs to the stream of
        # whoever gets it, so that its memory is not reused while it is read.
        stream = torch.cuda.default_stream(self.rows.device)
        self.rows.record_stream(stream)
        with torch.cuda.stream(stream):
            return self.rows[self.place].clone()


class KeptRows:
    """The rows that nobody has taken yet, by key; keys ascend.

    Attributes:
        ids: The ids that rows are over.
        active: Whether rows are kept here; of tensor-parallel ranks one does it.
    """

    def __init__(self) -> None:
        self.ids = TokenIds(0)
        self.active = False
        self._rows: dict[int, _KeptRow] = {}

    def begin(self, ids: TokenIds, *, active: bool) -> None:
        """Forget all rows and keep those of another model from now on."""
        self._rows.clear()
        self.ids = ids
        self.active = active

    def put(self, keys: list[int], rows: torch.Tensor) -> None:
        """Keep rows, replacing older ones of the same keys."""
        if rows.is_cuda:
            computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()
            for place, key in enumerate(keys):
                self._rows[key] = _KeptRow(rows, place, computed)
        else:
            copies: Any = torch.unbind_copy(rows)  # type: ignore[func-returns-value]
            for key, row in zip(keys, copies, strict=True):
                self._rows[key] = _KeptRow(row[None], 0)

    def take(self, keys: list[int], oldest: int) -> dict[int, torch.Tensor]:
        """Remove and return rows, those that are here; drop others of keys below `oldest`."""
        taken = {key: self._rows.pop(key) for key in keys if key in self._rows}
        for key in [key for key in self._rows if key < oldest]:
            del self._rows[key]
        return {key: row.owned() for key, row in taken.items()}

    def __len__(self) -> int:
        return len(self._rows)


KEPT = KeptRows()
"""Of this process: vLLM makes processors itself, and a process has one live engine."""
