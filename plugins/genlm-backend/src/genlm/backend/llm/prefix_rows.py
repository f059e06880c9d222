"""`PrefixRows`: the rows of all prefixes of a text, without holding them.

genlm-control's `PromptedLLM.prefix` and `complete` request the row of every prefix of a context
and gather one entry of each: the log-probability of the token that the next prefix adds. A
table of 512 rows of 128,000 float32 takes 262 MB. Here these entries are computed as the scores
of a text, and only the last row, whose token is not known, is computed as a row. Other uses of
the table compute it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache

if TYPE_CHECKING:
    from genlm.backend.llm.served import ServedLM

__all__ = ["PrefixRows", "PrefixScores", "common_text"]

_FEWEST_PREFIXES = 4
"""Fewer prefixes are computed as rows: they are small, and a beam may have two or three."""

_TEXTS = 4096
"""Most texts whose scores are remembered: one number for each token."""

_METADATA = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
}
"""What needs no row."""


def common_text(sequences: object) -> tuple[int, tuple[int, ...]] | None:
    """Return the text of which sequences are successive prefixes.

    Args:
        sequences: Lists or tuples of token ids, each one token longer than the one before.

    Returns:
        The length of the first sequence, at least 1, and the last sequence; None for fewer than
        four sequences and for all others.
    """
    if not isinstance(sequences, list | tuple) or len(sequences) < _FEWEST_PREFIXES:
        return None
    text = sequences[-1]
    if not isinstance(text, list | tuple) or not sequences[0]:
        return None
    first = len(text) - len(sequences) + 1
    for length, prefix in enumerate(sequences, first):
        if type(prefix) is not type(text) or len(prefix) != length or text[:length] != prefix:
            return None
    return first, tuple(text)


class PrefixRows(torch.Tensor):
    """A table of rows with one known entry in each row but the last, which is known whole.

    `torch.gather` along the vocabulary at the known entries reads them. Every other operation
    computes the table, once, and blocks until it has been computed.

    Args:
        scores: Known entry of each row but the last, shape `(n - 1,)`.
        targets: Ids of these entries.
        last: The last row, shape `(vocab_size,)`.
        table: Computes all rows, shape `(n, vocab_size)`.
    """

    _scores: torch.Tensor
    _targets: torch.Tensor
    _last: torch.Tensor
    _compute: Callable[[], torch.Tensor]
    _table: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[PrefixRows],
        scores: torch.Tensor,
        targets: Sequence[int],
        last: torch.Tensor,
        table: Callable[[], torch.Tensor],
    ) -> PrefixRows:
        """Make a tensor of the table's shape that has one number in memory."""
        # NaN, so that a read past __torch_function__ is noticed.
        shape = (len(scores) + 1, len(last))
        rows = last.new_full((1,), torch.nan).expand(shape).as_subclass(cls)
        vars(rows).update(
            _scores=scores.to(last),
            _last=last,
            _targets=torch.tensor(targets, dtype=torch.int64, device=last.device),
            _compute=table,
            _table=None,
        )
        return rows

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Read known entries, or compute the table and call the function with it."""
        options = dict(kwargs or {})
        if func in _METADATA:
            return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if func in {torch.gather, torch.Tensor.gather} and not options and len(args) == 3:
            rows, dim, index = args
            known = None
            if isinstance(rows, PrefixRows) and dim in {1, -1}:
                known = rows.known(index)
            if known is not None:
                return known
        return func(*_whole(args), **_whole(options))

    def __repr__(self) -> str:  # type: ignore[override]
        # asyncio represents results of tasks; that must not compute the table.
        return f"PrefixRows({len(self._scores) + 1} rows of {len(self._last)})"

    def known(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return the gathered entries; None if others than the known ones are wanted."""
        if isinstance(index, PrefixRows) or index.shape != (len(self._scores) + 1, 1):
            return None
        if index.device != self._targets.device or not index[:-1, 0].equal(self._targets):
            return None
        return torch.cat([self._scores, self._last.gather(0, index[-1])])[:, None]

    def whole(self) -> torch.Tensor:
        """Return the table as a plain tensor, computed the first time."""
        if self._table is None:
            self._table = self._compute()
        return self._table


def _whole(value: Any) -> Any:
    """Replace tables in arguments by plain tensors."""
    if isinstance(value, PrefixRows):
        return value.whole()
    if type(value) in {list, tuple}:
        return type(value)(map(_whole, value))
    return value


class PrefixScores:
    """Scores of texts, so that a text which grows by one token is not scored again.

    Shared by the models that `with_lora` returns. Safe to use from several threads.

    Attributes:
        useful: Whether callers have read known entries only. One that needs whole rows, such as
            a `PromptedLLM` with a temperature, would block its event loop each time.
    """

    def __init__(self) -> None:
        self.useful = True
        self._scores: LRUCache[Any, torch.Tensor] = LRUCache(_TEXTS)
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all scores; those that are being computed will not be remembered."""
        with self._lock:
            self._scores = LRUCache(_TEXTS)

    async def rows(
        self, llm: ServedLM, first: int, text: tuple[int, ...], lora_name: str | None
    ) -> PrefixRows:
        """Compute the rows of prefixes of a text.

        Args:
            llm: The model.
            first: Length of the shortest prefix.
            text: The longest prefix.
            lora_name: The adapter.

        Raises:
            GenlmError: As `genlm.AsyncLM.next_token_logprobs`.
        """
        adapter = lora_name or llm.lora_name
        with self._lock:
            remembered = self._scores  # `clear` replaces it
            before = remembered.get((adapter, first, text[:-1]))
        if before is None:
            score = llm.score(text, first, lora_name=lora_name)
            last, scores = await asyncio.gather(llm.next_token_logprobs(text, lora_name), score)
        else:
            new = llm.token_logprobs(text[:-1], text[-1:], lora_name=lora_name)
            last, added = await asyncio.gather(llm.next_token_logprobs(text, lora_name), new)
            scores = torch.cat([before, added.cpu()])
        with self._lock:
            remembered[adapter, first, text] = scores

        def table() -> torch.Tensor:
            self.useful = False
            prefixes = [text[:length] for length in range(first, len(text) + 1)]
            return llm.batch_next_token_logprobs_sync(prefixes, lora_name)

        return PrefixRows(scores, text[first:], last, table)
