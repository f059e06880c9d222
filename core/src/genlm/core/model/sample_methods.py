"""Continuations: `sample`, `batch_sample`, their blocking twins, and `stream`.

The continuations of one call are one group query for each adapter, or several if the engine
forwards them to replicas. Their tokens are drawn on the engine's thread; see
`genlm.core.engine.group_sampling`. `stream` requests a `Draw` for every token.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import numpy as np

from genlm.core.base.blocking import blocking
from genlm.core.base.error_handling import as_genlm_error, map_batch, with_places
from genlm.core.base.errors import PopulationError
from genlm.core.base.validation import (
    Stop,
    checked_batch,
    checked_integer,
    checked_number,
    checked_stop,
    is_sequence_like,
)
from genlm.core.engine.group_sampling import GroupSampling, SampledGroup
from genlm.core.model.context import TokenBatch, TokenIds
from genlm.core.model.requests import Requests
from genlm.core.queries.generations import Integers64, first_generation
from genlm.core.queries.query import GroupQuery, Query
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.reductions import Draw, DrawnToken
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.sampling import batch_seeds, stream_seeds, stream_uniform
from genlm.core.rows.truncation import Truncation
from genlm.core.vocab import Vocabulary
from genlm.core.vocab.text import search_stop

logger = logging.getLogger("genlm")


class SampleOptions(NamedTuple):
    """Checked options that the continuations of one call share."""

    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    stop_texts: tuple[bytes, ...]
    truncation: Truncation


class SampleMethods:
    """The methods of `AsyncLM` that draw continuations."""

    vocabulary: Vocabulary
    max_context: int | None

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
        min_p: float | None = None,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Draw a continuation; `stream` and `Population.sample` also return log-probabilities.

        Args:
            prompt: At least one token id.
            max_tokens: Maximum number of drawn ids.
            stop: Token ids and texts (`str` or `bytes`) that end the continuation, one or
                several; `()` for none. By default the end of a text, which is the
                `eos_token_id` of the vocabulary if it has one; other ends replace it. An id is
                not part of the result. A text ends the continuation with the token that
                completes it; it may begin before that token and end within it. The text of a
                special token is its name, such as `"<|im_end|>"`.
            temperature: Divisor of the log-probabilities; 0 selects the most likely token.
            top_k: Number of most likely tokens to which draws are limited.
            top_p: Share of the probability at the temperature, after top-k, in (0, 1]; draws
                are limited to the fewest most likely tokens that reach it.
            min_p: Share of the probability of the most likely token at the temperature, in
                [0, 1], that any drawn token has.
            seed: Random seed, valid on every engine with equal rows; None for fresh randomness.
                Each call begins with the first random number of the seed. Use different seeds
                for parts of a text that are drawn by several calls.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            The drawn ids, without the prompt and without the id that ended the continuation; at
            most `max_tokens`, and fewer if the context is full, which is logged as a warning.

        Raises:
            ValueError: The temperature is negative or not finite, `max_tokens` or the seed is
                negative, a stop text is empty, or a limit of the draws is out of range.
            TypeError: One of these is not a number, or `stop` contains neither texts nor ids.
            TokenIdError: An id in `stop` is outside the vocabulary.
            GenlmError: As `next_token_logprobs`.
        """
        options = self._sample_options(max_tokens, stop, temperature, top_k, top_p, min_p)
        query, _ = self._requests.build_query(prompt, lora_name)
        [drawn] = await self._sample([query], options, stream_seeds(seed, 1))
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
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Draw the continuations of several prompts concurrently; see `sample`.

        `Population.sample` also returns their log-probabilities. Every continuation has a
        separate random stream: continuations of equal prompts are independent, and continuation
        i does not depend on the number of prompts. `seed` may also be a sequence with one seed
        for each prompt: continuation i is then that of `sample(prompts[i], seed=seed[i])`.
        """
        prompts = list(checked_batch(prompts))
        options = self._sample_options(max_tokens, stop, temperature, top_k, top_p, min_p)
        queries = map_batch(
            lambda prompt: self._requests.build_query(prompt, lora_name)[0], prompts
        )
        seeds = batch_seeds(seed, len(queries))
        if is_sequence_like(seed):
            seeds = [stream_seeds(each, 1)[0] for each in seeds]
        return await self._sample(queries, options, seeds, is_batch=True)

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
        min_p: float | None = None,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> AsyncGenerator[DrawnToken, None]:
        """Draw a continuation and yield every token as soon as it is drawn; see `sample`.

            characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
            async for token in llm.stream(ids, 50, seed=1):
                text = characters.decode(llm.decode_bytes([token.token_id]))
                print(text, end="", flush=True)       # a token may end within a character

        The tokens are those of `sample` with the same arguments. `token.logprob` is the model's
        log-probability of the token, and `token.draw_logprob` the log-probability with which it
        was drawn.
        """
        options = self._sample_options(max_tokens, stop, temperature, top_k, top_p, min_p)
        query, _ = self._requests.build_query(prompt, lora_name)
        [stream_seed] = stream_seeds(seed, 1)
        sequence, tail = query.sequence, b""
        [limit] = self._limits([query], options.max_tokens).tolist()
        self._requests.scheduler.check_open()
        for position in range(limit):
            uniform = stream_uniform(stream_seed, position)
            draw = Draw(uniform, options.temperature, None, options.truncation)
            item = *self._requests.sequence_query(sequence, query.adapter), draw
            [token] = await self._requests.answer([item])
            if token.token_id in options.stop_ids:
                return
            yield token
            sequence = TokenSequence.of([token.token_id], sequence)
            if options.stop_texts:
                text = tail + bytes(self.vocabulary.byte_vocab[token.token_id])
                is_complete, tail = search_stop(text, options.stop_texts)
                if is_complete:
                    return
        self._log_cut(int(limit < options.max_tokens), 1, options.max_tokens)

    def _sample_options(
        self, max_tokens: int, stop: Stop | None, temperature: float, *limits: Any
    ) -> SampleOptions:
        """Check options; the limits are those of `Truncation`, in its order."""
        size = self.vocabulary.size
        return SampleOptions(
            checked_integer("max_tokens", max_tokens, 0),
            checked_number("temperature", temperature),
            *checked_stop(stop, size, self.vocabulary.eos_token_id),
            Truncation.checked(size, *limits),
        )

    def _limits(self, queries: Sequence[Query], max_tokens: int) -> Integers64:
        """Return the maximum number of tokens of each continuation, shape `(n,)`."""
        if self.max_context is None:
            return np.full(len(queries), max_tokens)
        max_length = self.max_context + 1  # the last token is never evaluated
        limits = [min(max_tokens, max_length - len(query)) for query in queries]
        return np.array(limits, np.int64)

    async def _sample(
        self,
        queries: Sequence[Query],
        options: SampleOptions,
        seeds: Sequence[int],
        *,
        is_batch: bool = False,
    ) -> list[list[int]]:
        """Draw the continuations of checked prompts."""
        limits = self._limits(queries, options.max_tokens)
        continuations: list[list[int]] = [[] for _ in queries]
        places_by_adapter: dict[str | None, list[int]] = {}
        for place, query in enumerate(queries if options.max_tokens else ()):
            places_by_adapter.setdefault(query.adapter, []).append(place)
        size = self._requests.sampled_together or len(queries)
        groups = [
            places[begin : begin + size]
            for places in places_by_adapter.values()
            for begin in range(0, len(places), size)
        ]
        group_queries = [
            self._group_query(
                [queries[i] for i in places],
                options,
                limits[places],
                np.array(seeds, np.int64)[places],
            )
            for places in groups
        ]
        cut = 0
        results: list[Any] = await self._requests.groups(group_queries)
        for places, result in zip(groups, results, strict=True):
            if isinstance(result, Exception):
                raise _sequence_error(result, places if is_batch else None)
            sampled: SampledGroup = result
            cut += int((~sampled.finished & (limits[places] < options.max_tokens)).sum())
            for place, padded_ids in zip(places, sampled.token_ids.tolist(), strict=True):
                ids = [token_id for token_id in padded_ids if token_id >= 0]
                is_stopped = ids[-1] in options.stop_ids
                continuations[place] = ids[:-1] if is_stopped else ids
        self._log_cut(cut, len(queries), options.max_tokens)
        return continuations

    def _group_query(
        self,
        queries: Sequence[Query],
        options: SampleOptions,
        limits: Integers64,
        seeds: Integers64,
    ) -> GroupQuery:
        """Return the query for the continuations of prompts with one adapter."""
        generation, places = first_generation([query.sequence for query in queries])
        count = len(queries)
        sampling = GroupSampling(
            places,
            np.zeros(count, bool),
            limits,
            RowWeights(
                (count, self.vocabulary.size),
                temperature=options.temperature,
                truncation=options.truncation,
            ),
            *(seeds, 0, options.stop_ids, options.stop_texts),
            returns_generation=False,
        )
        return self._requests.sampling_query(generation, sampling, queries[0].adapter)

    def _log_cut(self, cut: int, count: int, max_tokens: int) -> None:
        """Log the number of continuations that a full context ended before `max_tokens`."""
        if cut:
            logger.warning(
                "%d of %d continuations ended before max_tokens=%d: the model's context of %d "
                "tokens is full",
                *(cut, count, max_tokens, self.max_context),
            )


def _sequence_error(error: Exception, places: Sequence[int] | None) -> Exception:
    """Return the error of the first failed sequence of a group query.

    In a batch, `places` are those of the sequences, and the error lists the failed ones.
    """
    cause, failed = error, tuple(range(len(places or ())))
    if isinstance(error, PopulationError):
        cause, failed = error.error, error.members
    first_error = as_genlm_error(cause)
    if places is None:
        return first_error
    return with_places(first_error, [places[i] for i in failed])
