"""`TextRequests`: the requests of a model, with those for scores and reductions of texts.

An engine with `Capability.SCORE` computes all positions of a text in one query. For other
engines, every position is a request for the row after a prefix of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from genlm.core.base.error_handling import as_genlm_error
from genlm.core.base.errors import ContextLengthError
from genlm.core.base.validation import checked_integer, checked_token_ids
from genlm.core.engine.engine import Capability
from genlm.core.model.context import Context
from genlm.core.model.requests import Item, Requests
from genlm.core.queries.generations import Generation, Lineage
from genlm.core.queries.query import GroupResult, Query
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.reductions import TargetScore

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
            One request for the `TokenScores` of each window of the text, or one request per
            position for a `ScoredToken`.
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
            items += self._window_items(
                ids[window], packed[4 * window.start : 4 * window.stop], first, adapter
            )
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
        if Capability.SCORE not in self.capabilities:
            return await self._reduce_by_position(packed, start, reduction, adapter)
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

    def _window_items(
        self, ids: tuple[int, ...], packed: bytes, start: int, adapter: str | None
    ) -> list[Item]:
        if Capability.SCORE not in self.capabilities:
            return self._position_items(ids, packed, start, adapter)
        query = Query(
            next(self._query_ids), TokenSequence(packed[:-4]), adapter, targets=ids[start:]
        )
        key = (self._model, adapter, query.sequence.key, ("score", start, ids[-1]))
        return [(query, key, None)]

    def _position_items(
        self, ids: tuple[int, ...], packed: bytes, start: int, adapter: str | None
    ) -> list[Item]:
        pairs = zip(_proper_prefixes(packed, start), ids[start:], strict=False)
        return [
            (*self.sequence_query(sequence, adapter), TargetScore(target))
            for sequence, target in pairs
        ]

    async def _reduce_by_position(
        self, packed: bytes, start: int, reduction: GroupReduction, adapter: str | None
    ) -> tuple[torch.Tensor, ...]:
        """Reduce the rows of a text's prefixes as the rows of a population."""
        lineage = Lineage.of_sequences(list(_proper_prefixes(packed, start)))
        places = np.arange(len(lineage))
        query = self.group_query(Generation(lineage), places, reduction, adapter)
        result: GroupResult = await self.group(query)
        if result.errors:
            raise as_genlm_error(result.errors[min(result.errors)])
        return result.columns


def _proper_prefixes(packed: bytes, start: int) -> Iterator[TokenSequence]:
    """Yield the proper prefixes, of at least `start` tokens, of a packed text."""
    sequence = TokenSequence(packed[: 4 * start])
    yield sequence
    for offset in range(4 * start, len(packed) - 4, 4):
        sequence = TokenSequence(packed[offset : offset + 4], sequence)
        yield sequence
