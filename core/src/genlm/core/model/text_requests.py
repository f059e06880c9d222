"""`TextRequests`: the requests of a model, with those for scores and reductions of texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genlm.core.base.errors import ContextLengthError
from genlm.core.base.validation import checked_integer, checked_token_ids
from genlm.core.model.context import Context
from genlm.core.model.requests import Item, Requests
from genlm.core.queries.query import Query
from genlm.core.queries.sequence import TokenSequence

if TYPE_CHECKING:
    import torch

    from genlm.core.model.context import TokenIds
    from genlm.core.queries.query import GroupReduction

__all__ = ["TextRequests"]


class TextRequests(Requests):
    """The requests of one model, with those for scores and reductions of texts."""

    def score_items(
        self, token_ids: TokenIds, start: int, stride: int | None, lora_name: str | None
    ) -> list[Item]:
        """Check a text, and build the requests that score it from a position on.

        Returns:
            One request for the `TokenScores` of each window of the text.
        """
        if stride is not None:
            stride = checked_integer("stride", stride, 1)
            if self.max_context is not None and stride > self.max_context:
                raise ValueError(
                    f"stride={stride}; the context of the model is {self.max_context} tokens"
                )
        ids, packed, start, adapter = self._text(
            token_ids, start, lora_name, has_windows=stride is not None
        )
        items: list[Item] = []
        for window, first in self._windows(len(ids), start, stride):
            targets = ids[window][first:]
            sequence = TokenSequence(packed[4 * window.start : 4 * (window.stop - 1)])
            query = Query(next(self._query_ids), sequence, adapter, targets=targets)
            key = (self._model, adapter, sequence.key, ("score", first, targets[-1]))
            items.append((query, key, None))
        return items

    async def reduce_text(
        self,
        token_ids: TokenIds,
        reduction: GroupReduction,
        start: int,
        lora_name: str | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the columns of a reduction of the rows that predict the tokens of a text."""
        ids, packed, start, adapter = self._text(token_ids, start, lora_name)
        if start == len(ids):
            return self.reduce_no_rows(reduction)
        query = Query(
            next(self._query_ids),
            TokenSequence(packed[:-4]),
            adapter,
            outputs=(reduction,),
            targets=ids[start:],
        )
        self.counters.count(len(query))
        columns: tuple[torch.Tensor, ...] = await self.scheduler.answer(query)
        return columns

    def _text(
        self,
        token_ids: TokenIds,
        start: int,
        lora_name: str | None,
        *,
        has_windows: bool = False,
    ) -> tuple[tuple[int, ...], bytes, int, str | None]:
        """Check a text; return its ids, packed ids, `start`, and the engine's adapter name."""
        if isinstance(token_ids, Context):
            adapter = self.adapter_of(token_ids, lora_name)
            token_ids = token_ids.token_ids
        else:
            _, adapter = self._adapter(lora_name)
        ids, packed = checked_token_ids(token_ids, vocab_size=self.vocab_size, max_context=None)
        limit = None if has_windows else self.max_context
        if limit is not None and len(ids) > limit + 1:
            raise ContextLengthError(len(ids), limit, is_text=True)
        first = checked_integer("start", start, 1)
        if first > len(ids):
            raise ValueError(
                f"start={first} of a text of {len(ids)} tokens; it must be {len(ids)} or less"
            )
        return ids, packed, first, adapter

    def _windows(
        self, count: int, start: int, stride: int | None
    ) -> Iterator[tuple[slice, int]]:
        """Yield windows of a text that the model can score, and the first scored place of each.

        Together they score each token from `start` on once. The first window scores as many
        tokens as possible, each further one `stride` tokens.
        """
        limit = count if self.max_context is None else self.max_context + 1
        while start < count:
            end = limit if start < limit or stride is None else start + stride
            end = min(end, count)
            begin = max(end - limit, 0)
            yield slice(begin, end), start - begin
            start = end
