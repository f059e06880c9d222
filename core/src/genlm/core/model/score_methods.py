"""Scores of texts: the log-probability of each token given the tokens before it.

A text, or a window of it, is one query (`Query.targets`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from genlm.core.base.blocking import blocking
from genlm.core.base.error_handling import map_batch
from genlm.core.base.errors import ContextLengthError
from genlm.core.base.validation import (
    Integers,
    checked_batch,
    checked_integer,
    checked_token_ids,
    is_sequence_like,
)
from genlm.core.model.context import Context, TokenBatch, TokenIds
from genlm.core.model.requests import Item, Requests
from genlm.core.queries.query import GroupReduction, Reduction, TokenScores
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.row_functions import RowFunction
from genlm.core.rows.shared_reduction import checked_reduction

_SHOWN_AFTER = 256
"""Number of requests after which a progress bar shows their progress."""


class ScoreMethods:
    """The methods of `AsyncLM` that score texts."""

    max_context: int | None

    _requests: Requests

    async def score(
        self,
        token_ids: TokenIds,
        start: int = 1,
        *,
        stride: int | None = None,
        lora_name: str | None = None,
    ) -> torch.Tensor:
        """Return the log-probability of each token of a text given the tokens before it.

        Args:
            token_ids: Text as token ids or a `Context`, at most `max_context` + 1 tokens
                without `stride`.
            start: First scored position, from 1 to the number of tokens. The tokens before it
                are the prompt.
            stride: Number of tokens from 1 to `max_context`, which allows longer texts: these
                are scored in windows of `max_context` + 1 tokens. The first window scores all
                of its tokens from `start` on, and each further window the next `stride`
                tokens, given only the tokens before them in the window.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            `log p(token_ids[i] | token_ids[:i])` for all `i >= start`, shape
            `(len(token_ids) - start,)`, float32, on the CPU.

        Raises:
            TypeError: `start` or `stride` is not an integer.
            ValueError: `start` is below 1 or above the number of tokens, or `stride` is below 1
                or above `max_context`.
            GenlmError: As `next_token_logprobs`.
        """
        items = self._score_items(token_ids, start, stride, lora_name)
        [scores] = await self._score([items])
        return scores.logprobs

    score_sync = blocking(score)

    async def batch_score(
        self,
        texts: TokenBatch,
        start: int | Integers = 1,
        *,
        stride: int | None = None,
        progress: bool = False,
        lora_name: str | None = None,
    ) -> list[torch.Tensor]:
        """Score several texts; see `score`. All texts are checked before any is computed.

        Args:
            texts: Texts as for `score`.
            start: First scored position: one number for all texts, or one per text.
            stride: As `score`.
            progress: Whether to show a progress bar on standard error.
            lora_name: As `score`.

        Returns:
            The scores of the texts, in order.
        """
        scores = await self.batch_token_scores(
            texts, start, stride=stride, progress=progress, lora_name=lora_name
        )
        return [text_scores.logprobs for text_scores in scores]

    batch_score_sync = blocking(batch_score)

    async def batch_token_scores(
        self,
        texts: TokenBatch,
        start: int | Integers = 1,
        *,
        stride: int | None = None,
        progress: bool = False,
        lora_name: str | None = None,
    ) -> list[TokenScores]:
        """Score several texts; also return whether each token was the most likely token.

        Args:
            texts: As `batch_score`.
            start: As `batch_score`.
            stride: As `score`.
            progress: As `batch_score`.
            lora_name: As `score`.

        Returns:
            The scores of the texts, in order.
        """
        text_list = list(checked_batch(texts))
        count = len(text_list)
        starts: list[Any] = list(start) if is_sequence_like(start) else [start] * count  # type: ignore[arg-type]
        if len(starts) != count:
            raise ValueError(f"{len(starts)} starts for {count} texts; pass one for each")
        items_by_text = map_batch(
            lambda text: self._score_items(*text, stride, lora_name),
            zip(text_list, starts, strict=True),
        )
        places = [place for place, items in enumerate(items_by_text) for _ in items]
        return await self._score(items_by_text, places, progress=progress)

    batch_token_scores_sync = blocking(batch_token_scores)

    async def reduce_text(
        self,
        token_ids: TokenIds,
        reduction: GroupReduction | Reduction | RowFunction,
        start: int = 1,
        *,
        lora_name: str | None = None,
    ) -> Any:
        """Return a reduction of the rows that predict the tokens of a text.

        The rows are those of `score`. They are computed and reduced piece by piece on the
        device of the logits, so the rows of a whole text are never in memory at once.

        Args:
            token_ids: As `score`.
            reduction: A function of rows, as for `AsyncLM.reduce`; or a `Reduction` that all
                positions share; or a `GroupReduction`, which has values of each position.
            start: First position whose row is reduced, as `score`.
            lora_name: As `score`.

        Returns:
            The results of the positions: a tensor whose first dimension is
            `len(token_ids) - start`, or a tuple of such tensors.

        Raises:
            TypeError: `reduction` is of another type, or `start` is not an integer.
            ValueError: `start` is below 1 or above the number of tokens.
            EvaluationError: The function raised.
            GenlmError: As `next_token_logprobs`.
        """
        group = checked_reduction(reduction)
        item = self._reduction_item(token_ids, group, start, lora_name)
        if item is None:
            columns = self._requests.reduce_no_rows(group)
        else:
            [columns] = await self._requests.answer([item])
        return columns[0] if len(columns) == 1 else columns

    reduce_text_sync = blocking(reduce_text)

    def _reduction_item(
        self,
        token_ids: TokenIds,
        reduction: GroupReduction,
        start: int,
        lora_name: str | None = None,
    ) -> Item | None:
        """Return the request for a reduction of a text, or None if no token is scored."""
        ids, packed, first, adapter = self._checked_text(token_ids, start, lora_name)
        if first == len(ids):
            return None
        sequence = TokenSequence(packed[:-4])
        query, _ = self._requests.sequence_query(sequence, adapter, ids[first:])
        return query.replace(outputs=(reduction,)), None, None

    async def _score(
        self,
        items_by_text: list[list[Item]],
        places: Sequence[int] | None = None,
        *,
        progress: bool = False,
    ) -> list[TokenScores]:
        """Return the scores of texts, which have a request for each of their windows."""
        items = list(itertools.chain(*items_by_text))
        ends = list(itertools.accumulate(map(len, items_by_text)))
        step = _SHOWN_AFTER if progress else max(1, len(items))
        results: list[Any] = []
        with tqdm(total=len(ends), desc="scoring", unit="text", disable=not progress) as bar:
            for begin in range(0, max(1, len(items)), step):
                part = slice(begin, begin + step)
                part_places = None if places is None else places[part]
                results += await self._requests.answer(items[part], (), part_places)
                bar.update(bisect.bisect_right(ends, begin + step) - bar.n)
        remaining = iter(results)
        return [
            _combine_scores(list(itertools.islice(remaining, len(items))))
            for items in items_by_text
        ]

    def _score_items(
        self, token_ids: TokenIds, start: int, stride: int | None, lora_name: str | None
    ) -> list[Item]:
        """Check a text, and build the request for the scores of each of its windows."""
        if stride is not None:
            stride = checked_integer("stride", stride, 1)
            if self.max_context is not None and stride > self.max_context:
                raise ValueError(
                    f"stride={stride}; the context of the model is {self.max_context} tokens"
                )
        ids, packed, start, adapter = self._checked_text(
            token_ids, start, lora_name, has_windows=stride is not None
        )
        items: list[Item] = []
        for window, first in self._windows(len(ids), start, stride):
            targets = ids[window][first:]
            sequence = TokenSequence(packed[4 * window.start : 4 * (window.stop - 1)])
            query, key = self._requests.sequence_query(sequence, adapter, targets)
            items.append((query, (*key, ("score", first, targets[-1])), None))
        return items

    def _checked_text(
        self,
        token_ids: TokenIds,
        start: int,
        lora_name: str | None,
        *,
        has_windows: bool = False,
    ) -> tuple[tuple[int, ...], bytes, int, str | None]:
        """Check a text; return its ids, packed ids, `start`, and the engine's adapter name."""
        if isinstance(token_ids, Context):
            adapter = self._requests.adapter_of(token_ids, lora_name)
            token_ids = token_ids.token_ids
        else:
            adapter = self._requests.adapter(lora_name)
        max_context = self.max_context
        ids, packed = checked_token_ids(token_ids, self._requests.vocab_size)
        if max_context is not None and len(ids) > max_context + 1 and not has_windows:
            raise ContextLengthError(len(ids), max_context, is_text=True)
        first = checked_integer("start", start, 1)
        if first > len(ids):
            raise ValueError(
                f"start={first} of a text of {len(ids)} tokens; it must be {len(ids)} or less"
            )
        return ids, packed, first, adapter.engine_name

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


def _combine_scores(windows: list[TokenScores]) -> TokenScores:
    """Combine the scores of the windows of a text; none if no token is scored."""
    if not windows:
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        return TokenScores(empty, empty.bool())
    return TokenScores(*(torch.cat(parts) for parts in zip(*windows, strict=True)))
