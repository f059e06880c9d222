"""Continuations: `sample`, `batch_sample`, their blocking twins, and `stream`.

Engines with `Capability.SAMPLE` draw continuations themselves. For other engines, and with stop
texts, top-k or top-p, every token is a `Draw`, requested for all continuations of a batch at
once.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from genlm.core.base.blocking import blocking
from genlm.core.base.errors import each_in_batch
from genlm.core.base.validation import (
    checked_batch,
    checked_integer,
    checked_number,
    checked_share,
    checked_stop,
    checked_top_k,
)
from genlm.core.engine.engine import Capability
from genlm.core.queries.query import SamplingParams
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.reductions import Draw, DrawnToken
from genlm.core.rows.sampling import stream_seeds, stream_uniform
from genlm.core.vocab.text import search_stop

if TYPE_CHECKING:
    from genlm.core.base.validation import Stop
    from genlm.core.model.context import TokenBatch, TokenIds
    from genlm.core.model.requests import Item, Requests
    from genlm.core.queries.query import Query
    from genlm.core.vocab import Vocabulary

__all__ = ["SampleMethods"]

logger = logging.getLogger("genlm")


class SampleOptions(NamedTuple):
    """Checked options that the continuations of one call share."""

    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    stop_texts: tuple[bytes, ...]
    top_k: int | None
    top_p: float

    @property
    def is_plain(self) -> bool:
        """Whether an engine with `Capability.SAMPLE` can draw the continuations itself."""
        return not self.stop_texts and self.top_k is None and self.top_p == 1


class Continuation:
    """A continuation that is drawn token by token.

    Attributes:
        sequence: The prompt and the drawn tokens.
        drawn: Ids of the drawn tokens, without the token that ended the continuation.
        is_ended: Whether the continuation is complete.
    """

    def __init__(
        self,
        query: Query,
        options: SampleOptions,
        seed: int,
        vocabulary: Vocabulary,
        max_context: int | None,
    ) -> None:
        self.query = query
        self.sequence = query.sequence
        self.drawn: list[int] = []
        self.is_ended = options.max_tokens == 0
        self._options = options
        self._seed = seed
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._tail = b""

    @property
    def is_cut(self) -> bool:
        """Whether the model's context was full before `max_tokens`."""
        length = len(self.query) + len(self.drawn)
        is_full = self._max_context is not None and length > self._max_context
        return is_full and len(self.drawn) < self._options.max_tokens

    def native_query(self) -> Query:
        """Return the query for an engine that draws the whole continuation."""
        max_tokens, temperature, stop_ids, *_ = self._options
        params = SamplingParams(max_tokens, temperature, stop_ids, self._seed)
        return self.query.replace(sampling=params)

    def next_draw(self) -> Draw:
        """Return the draw of the next token."""
        options = self._options
        uniform = stream_uniform(self._seed, len(self.drawn))
        return Draw(uniform, options.temperature, top_k=options.top_k, top_p=options.top_p)

    def add(self, token: DrawnToken) -> bool:
        """Add a drawn token; return False if it only ends the continuation."""
        options = self._options
        if token.token_id in options.stop_ids:
            self.is_ended = True
            return False
        self.drawn.append(token.token_id)
        self.sequence = TokenSequence.of([token.token_id], self.sequence)
        is_full = self._max_context is not None and len(self.sequence) > self._max_context
        self.is_ended = is_full or len(self.drawn) == options.max_tokens
        if options.stop_texts:
            text = self._tail + bytes(self._vocabulary.byte_vocab[token.token_id])
            is_complete, self._tail = search_stop(text, options.stop_texts)
            self.is_ended = self.is_ended or is_complete
        return True


class SampleMethods:
    """The methods of `AsyncLM` that draw continuations."""

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]

    _requests: Requests

    async def sample(
        self,
        prompt: TokenIds,
        max_tokens: int,
        *,
        stop: Stop | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Draw a continuation of `prompt`; `stream` also returns log-probabilities.

        Args:
            prompt: At least one token id.
            max_tokens: Maximum number of drawn ids.
            stop: Token ids and texts (`str` or `bytes`) that end the continuation, one or
                several; `()` for none. By default the end of a text, which is the
                `eos_token_id` of the vocabulary if it has one; other ends replace it. An id is
                left out of the result. A text ends the continuation with the token that
                completes it; it may begin before that token and end within it.
            temperature: Divisor of the log-probabilities; 0 selects the most likely token.
            top_k: Number of most likely tokens to which draws are limited.
            top_p: Share of the probability at the temperature, after top-k, in (0, 1]; draws
                are limited to the fewest most likely tokens that reach it.
            seed: Random seed, valid on every engine with equal rows; None for fresh randomness.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            The drawn ids, without the prompt and without the id that ended the continuation; at
            most `max_tokens`, and fewer if the context is full, which is logged as a warning.

        Raises:
            ValueError: The temperature is negative or not finite, `max_tokens` or the seed is
                negative, a stop text is empty, or `top_k` or `top_p` is out of range.
            TypeError: One of these is not a number, or `stop` contains neither texts nor ids.
            TokenIdError: An id in `stop` is outside the vocabulary.
            GenlmError: As `next_token_logprobs`.
        """
        options = self._sample_options(max_tokens, stop, temperature, top_k, top_p)
        query, _ = self._requests.build_query(prompt, lora_name)
        continuations = self._continuations([query], options, seed)
        [drawn] = await self._continued(continuations, options)
        return drawn

    sample_sync = blocking(sample)

    async def batch_sample(
        self,
        prompts: TokenBatch,
        max_tokens: int,
        *,
        stop: Stop | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Draw the continuations of several prompts concurrently; see `sample`.

        Every continuation has a separate random stream: continuations of equal prompts are
        independent, and continuation i does not depend on the number of prompts.
        """
        prompts = list(checked_batch(prompts))
        options = self._sample_options(max_tokens, stop, temperature, top_k, top_p)
        queries = each_in_batch(
            lambda prompt: self._requests.build_query(prompt, lora_name)[0], prompts
        )
        continuations = self._continuations(queries, options, seed)
        return await self._continued(continuations, options, places=range(len(prompts)))

    batch_sample_sync = blocking(batch_sample)

    async def stream(
        self,
        prompt: TokenIds,
        max_tokens: int,
        *,
        stop: Stop | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> AsyncIterator[DrawnToken]:
        """Draw a continuation and yield every token as soon as it is drawn; see `sample`.

            async for token in llm.stream(ids, 50, seed=1):
                print(llm.decode([token.token_id]), end="", flush=True)

        The tokens are those of `sample` with the same arguments. `token.logprob` is the model's
        log-probability of the token, and `token.draw_logprob` the log-probability with which it
        was drawn.
        """
        options = self._sample_options(max_tokens, stop, temperature, top_k, top_p)
        query, _ = self._requests.build_query(prompt, lora_name)
        [continuation] = self._continuations([query], options, seed)
        while not continuation.is_ended:
            [token] = await self._requests.answer([self._draw(continuation)])
            if continuation.add(token):
                yield token
        self._log_cut([continuation], options)

    def _sample_options(
        self,
        max_tokens: int,
        stop: Stop | None,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
    ) -> SampleOptions:
        size = self.vocabulary.size
        return SampleOptions(
            checked_integer("max_tokens", max_tokens, 0),
            checked_number("temperature", temperature),
            *checked_stop(stop, size, self.vocabulary.eos_token_id),
            checked_top_k(top_k, size),
            checked_share(top_p),
        )

    def _continuations(
        self, queries: Sequence[Query], options: SampleOptions, seed: int | None
    ) -> list[Continuation]:
        seeds = stream_seeds(
            None if seed is None else checked_integer("seed", seed, 0), len(queries)
        )
        return [
            Continuation(query, options, stream, self.vocabulary, self.max_context)
            for query, stream in zip(queries, seeds, strict=True)
        ]

    async def _continued(
        self,
        continuations: Sequence[Continuation],
        options: SampleOptions,
        places: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Draw continuations: in the engine, or token by token."""
        active = [(i, each) for i, each in enumerate(continuations) if not each.is_ended]
        is_native = options.is_plain and Capability.SAMPLE in self.capabilities
        while active:
            items: list[Item] = [
                (each.native_query(), None, None) if is_native else self._draw(each)
                for _, each in active
            ]
            chosen = None if places is None else [places[i] for i, _ in active]
            answers = await self._requests.answer(items, (), chosen)
            for (_, each), answer in zip(active, answers, strict=True):
                if is_native:
                    each.drawn, each.is_ended = answer, True
                else:
                    each.add(answer)
            active = [(i, each) for i, each in active if not each.is_ended]
        self._log_cut(continuations, options)
        return [each.drawn for each in continuations]

    def _draw(self, continuation: Continuation) -> Item:
        """Return the request for the next token of a continuation."""
        query, key = self._requests.sequence_query(
            continuation.sequence, continuation.query.adapter
        )
        return query, key, continuation.next_draw()

    def _log_cut(self, continuations: Sequence[Continuation], options: SampleOptions) -> None:
        """Log the number of continuations that a full context ended before `max_tokens`."""
        cut = sum(each.is_cut for each in continuations)
        if cut:
            logger.warning(
                "%d of %d continuations ended before max_tokens=%d: the model's context of %d "
                "tokens is full",
                *(cut, len(continuations), options.max_tokens, self.max_context),
            )
