"""`PrefixRows`: the rows of all prefixes of a text, without their memory.

genlm-control's `PromptedLLM.prefix` and `complete` request the row of every prefix of a context
and gather one entry per row: the log-probability of the token that the next prefix adds. A
table of 512 rows of 128,000 float32 takes 262 MB. Here these entries are computed as the scores
of a text, and only the last row, which has no next token, is computed as a row. Other uses of
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

_MIN_PREFIXES = 4
"""Fewer prefixes are computed as rows: their tables are small, and they may be a beam."""

_MAX_TEXTS = 4096
"""Maximum number of texts with cached scores, one number per token."""

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
"""Functions of the shape and dtype, which do not compute the table."""


def common_text(sequences: object) -> tuple[int, tuple[int, ...]] | None:
    """Return the text whose successive prefixes are the sequences.

    Args:
        sequences: Lists or tuples of token ids.

    Returns:
        The length of the first sequence, at least 1, and the last sequence; None if there are
        fewer than four sequences or they are not successive prefixes of one text.
    """
    if not isinstance(sequences, list | tuple) or len(sequences) < _MIN_PREFIXES:
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
    """Lazy table of rows, of which the last row and one entry of every other row are known.

    `torch.gather` along the vocabulary returns known entries. The first other operation
    computes the table and blocks until it has been computed.

    Args:
        scores: Known entries of all rows except the last, shape `(n - 1,)`.
        targets: Token ids of these entries.
        last: The last row, shape `(vocab_size,)`.
        table: Function that computes all rows, shape `(n, vocab_size)`.
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
        """Create a tensor with the table's shape that stores a single number."""
        # NaN, so that a read that bypasses __torch_function__ is noticed.
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
        """Gather known entries, or compute the table and call the function with it."""
        options = dict(kwargs or {})
        if func in _METADATA:
            return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if func in {torch.gather, torch.Tensor.gather} and not options and len(args) == 3:
            rows, dim, index = args
            entries = None
            if isinstance(rows, PrefixRows) and dim in {1, -1}:
                entries = rows.gather_known(index)
            if entries is not None:
                return entries
        return func(*_whole(args), **{name: _whole(value) for name, value in options.items()})

    def __repr__(self) -> str:  # type: ignore[override]
        # asyncio calls it on results of tasks, which must not compute the table.
        return f"PrefixRows({len(self._scores) + 1} rows of {len(self._last)})"

    def gather_known(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return the gathered entries, or None if the index has unknown entries."""
        if self._table is not None:  # callers may have changed it
            return None
        if isinstance(index, PrefixRows) or index.shape != (len(self._scores) + 1, 1):
            return None
        if index.device != self._targets.device or not index[:-1, 0].equal(self._targets):
            return None
        return torch.cat([self._scores, self._last.gather(0, index[-1])])[:, None]

    def whole(self) -> torch.Tensor:
        """Return the table as a plain tensor, which is computed on the first call."""
        if self._table is None:
            self._table = self._compute()
        return self._table


def _whole(value: Any) -> Any:
    """Replace `PrefixRows` in arguments by plain tensors."""
    if isinstance(value, PrefixRows):
        return value.whole()
    if type(value) in {list, tuple}:
        return type(value)(map(_whole, value))
    return value


class PrefixScores:
    """Cache of the scores of texts, for texts that grow by one token.

    Models that `with_lora` returns share it. It is thread-safe.

    Attributes:
        useful: Whether callers have only read known entries. Callers that need whole rows, such
            as a `PromptedLLM` with a temperature, would block their event loop.
    """

    def __init__(self) -> None:
        self.useful = True
        self._scores: LRUCache[Any, torch.Tensor] = LRUCache(_MAX_TEXTS)
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Remove all scores."""
        with self._lock:
            self._scores.clear()

    async def rows(
        self, llm: ServedLM, first: int, text: tuple[int, ...], lora_name: str | None
    ) -> PrefixRows:
        """Compute the rows of prefixes of a text.

        Args:
            llm: The model.
            first: Length of the shortest prefix.
            text: The longest prefix.
            lora_name: Name of the adapter.

        Raises:
            GenlmError: Errors of `genlm.AsyncLM.next_token_logprobs`.
        """
        weights = llm.weights_version(lora_name)
        with self._lock:
            previous = self._scores.get((weights, first, text[:-1]))
        if previous is None:
            # One after the other: the last row then extends the prefix that was scored.
            scores = await llm.score(text, first, lora_name=lora_name)
            last = await llm.next_token_logprobs(text, lora_name)
        else:
            new = llm.token_logprobs(text[:-1], text[-1:], lora_name=lora_name)
            last, added = await asyncio.gather(llm.next_token_logprobs(text, lora_name), new)
            scores = torch.cat([previous, added.cpu()])
        with self._lock:
            self._scores[weights, first, text] = scores

        def table() -> torch.Tensor:
            self.useful = False
            prefixes = [text[:length] for length in range(first, len(text) + 1)]
            return llm.batch_next_token_logprobs_sync(prefixes, lora_name)

        return PrefixRows(scores, text[first:], last, table)
