"""Scores of texts: the log-probability of each token given the tokens before it.

A text, or a window of it, is one query (`Query.targets`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from genlm.core.base.blocking import blocking
from genlm.core.base.error_handling import map_batch
from genlm.core.base.validation import checked_batch, is_sequence_like
from genlm.core.queries.query import TokenScores
from genlm.core.rows.group_reductions import checked_reduction

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.context import TokenBatch, TokenIds
    from genlm.core.model.requests import Item
    from genlm.core.model.text_requests import TextRequests
    from genlm.core.queries.query import GroupReduction, Reduction

__all__ = ["ScoreMethods"]

_SHOWN_AFTER = 256
"""Number of requests after which a progress bar shows their progress."""


class ScoreMethods:
    """The methods of `AsyncLM` that score texts."""

    _requests: TextRequests

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
        items = self._requests.score_items(token_ids, start, stride, lora_name)
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
            lambda text: self._requests.score_items(*text, stride, lora_name),
            zip(text_list, starts, strict=True),
        )
        places = [place for place, items in enumerate(items_by_text) for _ in items]
        return await self._score(items_by_text, places, progress=progress)

    batch_token_scores_sync = blocking(batch_token_scores)

    async def reduce_text(
        self,
        token_ids: TokenIds,
        reduction: GroupReduction | Reduction,
        start: int = 1,
        *,
        lora_name: str | None = None,
    ) -> Any:
        """Return a reduction of the rows that predict the tokens of a text.

        The rows are those of `score`. They are computed and reduced piece by piece on the
        device of the logits, so the rows of a whole text are never in memory at once.

        Args:
            token_ids: As `score`.
            reduction: A `GroupReduction`, whose columns have an entry for each position, or a
                `Reduction` that all positions share.
            start: First position whose row is reduced, as `score`.
            lora_name: As `score`.

        Returns:
            The results of the positions: a tensor whose first dimension is
            `len(token_ids) - start`, or a tuple of such tensors.

        Raises:
            TypeError: `reduction` is of another class, or `start` is not an integer.
            ValueError: `start` is below 1 or above the number of tokens.
            EvaluationError: `compute` of the reduction raised.
            GenlmError: As `next_token_logprobs`.
        """
        group = checked_reduction(reduction)
        columns = await self._requests.reduce_text(token_ids, group, start, lora_name)
        return columns[0] if len(columns) == 1 else columns

    reduce_text_sync = blocking(reduce_text)

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


def _combine_scores(windows: list[TokenScores]) -> TokenScores:
    """Combine the scores of the windows of a text; none if no token is scored."""
    if len(windows) == 1:
        return windows[0]
    if not windows:
        return TokenScores(torch.empty(0), torch.empty(0, dtype=torch.bool))
    return TokenScores(*(torch.cat(parts) for parts in zip(*windows, strict=True)))
