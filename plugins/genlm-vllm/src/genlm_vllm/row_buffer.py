"""`RowBuffer`: rows of finished and unfinished requests, until the engine fetches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from genlm.plugin import EvaluationError, Reduced, Reduction, reduce_logits, reduce_rows

if TYPE_CHECKING:
    from genlm.plugin import Vocabulary

__all__ = ["ROW_BUFFER", "RowBuffer", "VocabularyIds"]

_MOST_FLAGS = 64
"""After so many tokens of a continuation what was noted for each becomes one tensor."""

Outputs = tuple[Reduction | None, ...]
"""What is asked of a row, see `genlm.plugin.Query`."""


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
    """Row `index` of a batch; on a GPU its computation may not have finished.

    Attributes:
        outputs: What is asked of the row; None for the row itself.
    """

    rows: torch.Tensor
    index: int
    computed: Any = None  # torch.cuda.Event
    outputs: Outputs | None = None

    def owned(self) -> torch.Tensor:
        """Wait for the computation and return the row in memory of its own."""
        if self.computed is None:
            return self.rows[self.index]
        with self.on_callers_stream():
            return self.rows[self.index].clone()

    def on_callers_stream(self) -> Any:
        """Wait for the computation; a context in which results belong to the caller's stream.

        vLLM computes on its own stream. Copies belong to the default stream, on which the
        caller reads them, so that their memory is not reused before.
        """
        if self.computed is not None:
            self.computed.synchronize()
        if not self.rows.is_cuda:
            return torch.no_grad()
        stream = torch.cuda.default_stream(self.rows.device)
        self.rows.record_stream(stream)
        return torch.cuda.stream(stream)


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
        self._rows: dict[int, _BufferedRow | Reduced | Exception] = {}
        self._invalid: dict[int, list[torch.Tensor]] = {}  # whether each draw was

    def reset(self, ids: VocabularyIds, *, active: bool) -> None:
        """Drop all rows and set the attributes."""
        self._rows.clear()
        self._invalid.clear()
        self.ids = ids
        self.active = active
        self.tokens_copied = 0

    def put(self, keys: list[int], rows: torch.Tensor) -> None:
        """Store rows, replacing earlier ones of the same keys."""
        if rows.is_cuda:
            computed = _event()
            for index, key in enumerate(keys):
                self._rows[key] = _BufferedRow(rows, index, computed)
        else:
            copies: Any = torch.unbind_copy(rows)  # type: ignore[func-returns-value]
            for key, row in zip(keys, copies, strict=True):
                self._rows[key] = _BufferedRow(row[None], 0)

    def put_batch(self, keys: list[int], rows: torch.Tensor, outputs: list[Outputs]) -> None:
        """Store rows on a device of which something else is asked; they stay in one tensor.

        They are reduced when they are fetched: to do so here would wait for the device.
        """
        computed = _event() if rows.is_cuda else None
        for index, (key, wanted) in enumerate(zip(keys, outputs, strict=True)):
            self._rows[key] = _BufferedRow(rows, index, computed, wanted)

    def put_reduced(
        self, keys: list[int], logits: torch.Tensor, outputs: list[Outputs]
    ) -> None:
        """Store what is asked of the rows of logits on the CPU, without storing rows.

        For a part of a prompt this is of no use, and is replaced in a later step.
        """
        try:
            results = reduce_logits(logits, cast("Vocabulary", self.ids), outputs)
        except Exception as error:  # noqa: BLE001 - out of memory; vLLM goes on
            results = [error] * len(keys)
        self._rows.update(zip(keys, results, strict=True))

    def put_draws(self, keys: list[int], invalid: torch.Tensor) -> None:
        """Note for a token of each continuation whether its row was no distribution, `(n,)`."""
        for key, flag in zip(keys, invalid.unbind(), strict=True):
            flags = self._invalid.setdefault(key, [])
            flags.append(flag)
            if len(flags) == _MOST_FLAGS:
                flags[:] = [torch.stack(flags).any()]

    def take(
        self, keys: list[int], abandoned: list[int]
    ) -> dict[int, torch.Tensor | Reduced | Exception]:
        """Remove the stored rows of `keys` and return what is asked of them.

        Args:
            keys: The keys of finished requests.
            abandoned: Keys of rows to drop.

        Returns:
            For each stored key the row, or a `Reduced`, or the error of a row that is not a
            distribution and of which something else is asked, or of a continuation with one.
        """
        taken = {key: self._rows.pop(key) for key in keys if key in self._rows}
        invalid = [self._invalid.pop(key, []) for key in keys]
        for key in abandoned:
            self._rows.pop(key, None)
            self._invalid.pop(key, None)
        batches: dict[int, list[tuple[int, _BufferedRow]]] = {}
        results: dict[int, torch.Tensor | Reduced | Exception] = {}
        for key, each in taken.items():
            if not isinstance(each, _BufferedRow):
                results[key] = each
            elif each.outputs is None:
                results[key] = each.owned()
            else:
                batches.setdefault(id(each.rows), []).append((key, each))
        for members in batches.values():
            reduced = _reduced([row for _, row in members])
            results |= zip([key for key, _ in members], reduced, strict=True)
        found = {key: results[key] for key in taken}
        for key, flags in zip(keys, invalid, strict=True):
            if flags and bool(torch.stack(flags).any()):
                found[key] = EvaluationError(
                    "vLLM computed a row that is not a distribution in a continuation: NaN or "
                    "infinite logits. Try dtype='float32'"
                )
        return found

    def __len__(self) -> int:
        return len(self._rows) + len(self._invalid)


def _event() -> Any:
    computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    return computed


def _reduced(members: Sequence[_BufferedRow]) -> Sequence[Reduced | Exception]:
    """Reduce rows of one batch, all at once."""
    rows = members[0].rows
    indices = [each.index for each in members]
    outputs = [each.outputs or () for each in members]
    try:
        with torch.inference_mode(False), torch.no_grad(), members[0].on_callers_stream():
            if indices != list(range(len(rows))):
                rows = rows[torch.tensor(indices, device=rows.device)]
            return reduce_rows(rows, outputs, normalised=True)
    except Exception as error:  # noqa: BLE001 - out of memory; vLLM goes on
        return [error] * len(members)


ROW_BUFFER = RowBuffer()
"""The buffer of this process: vLLM creates logits processors itself, for one live engine."""
