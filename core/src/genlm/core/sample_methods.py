"""Continuations: `sample`, `batch_sample`, their blocking twins, and `stream`.

Engines with `Capability.SAMPLE` draw continuations themselves. For other engines, and with stop
texts, top-k or top-p, every token is a `Draw`, requested for all continuations of a batch at
once.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genlm.core.blocking import blocking
from genlm.core.engine import Capability
from genlm.core.errors import each_in_batch
from genlm.core.query import SamplingParams
from genlm.core.reductions import Draw, DrawnToken
from genlm.core.sampling import stream_seeds, stream_uniform
from genlm.core.sequence import TokenSequence
from genlm.core.validation import (
    checked_batch,
    checked_ids,
    checked_integer,
    checked_number,
    checked_share,
    checked_stop,
    checked_top_k,
)

if TYPE_CHECKING:
    from genlm.core.context import TokenBatch, TokenIds
    from genlm.core.query import Query
    from genlm.core.requests import Item, Requests
    from genlm.core.validation import Integers, Stop
    from genlm.core.vocab import Vocabulary

__all__ = ["SampleMethods"]

logger = logging.getLogger("genlm")


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Parameters of the continuation of one prompt.

    Attributes:
        params: Parameters that are also passed to engines with `Capability.SAMPLE`.
        stop: Texts that end the continuation.
        top_k: Number of most likely tokens, None for no limit.
        top_p: Share of the probability that the most likely tokens have, 1 for no limit.
    """

    params: SamplingParams
    stop: tuple[bytes, ...]
    top_k: int | None
    top_p: float

    @property
    def is_plain(self) -> bool:
        """Whether an engine with `Capability.SAMPLE` can draw the continuation itself."""
        return not self.stop and self.top_k is None and self.top_p == 1

    def draw(self, position: int) -> Draw:
        """Return the draw of the token at a position of the continuation."""
        assert self.params.seed is not None  # noqa: S101 - set with the plan
        return Draw(
            stream_uniform(self.params.seed, position),
            self.params.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


class Continuation:
    """A continuation that is drawn token by token.

    Args:
        query: The prompt.
        plan: Sampling parameters.
        vocabulary: Vocabulary with the bytes in which stop texts are searched.
        max_context: Maximum number of tokens of the model's context, None for no limit.

    Attributes:
        sequence: The prompt and the drawn tokens.
        drawn: Ids of the drawn tokens, without the token that ended the continuation.
        is_ended: Whether the continuation is complete.
    """

    def __init__(
        self, query: Query, plan: SamplePlan, vocabulary: Vocabulary, max_context: int | None
    ) -> None:
        self.query = query
        self.plan = plan
        self.sequence = query.sequence
        self.drawn: list[int] = []
        self.is_ended = plan.params.max_tokens == 0
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._tail = b""
        self._longest_stop = max(map(len, plan.stop), default=0)

    @property
    def is_cut(self) -> bool:
        """Whether the model's context was full before `max_tokens`."""
        length = len(self.query) + len(self.drawn)
        is_full = self._max_context is not None and length > self._max_context
        return is_full and len(self.drawn) < self.plan.params.max_tokens

    def next_draw(self) -> Draw:
        """Return the draw of the next token."""
        return self.plan.draw(len(self.drawn))

    def add(self, token: DrawnToken) -> bool:
        """Add a drawn token; return False if it only ends the continuation."""
        params = self.plan.params
        if token.token_id in params.stop_token_ids:
            self.is_ended = True
            return False
        self.drawn.append(token.token_id)
        self.sequence = TokenSequence.of([token.token_id], self.sequence)
        is_full = self._max_context is not None and len(self.sequence) > self._max_context
        self.is_ended = is_full or len(self.drawn) == params.max_tokens
        if self.plan.stop:
            tail = self._tail + bytes(self._vocabulary.byte_vocab[token.token_id])
            self.is_ended = self.is_ended or any(text in tail for text in self.plan.stop)
            self._tail = tail[max(0, len(tail) - self._longest_stop + 1) :]
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
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        stop: Stop = (),
        top_k: int | None = None,
        top_p: float | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Draw a continuation of `prompt`; `stream` also returns log-probabilities.

        Args:
            prompt: At least one token id.
            max_tokens: Maximum number of drawn ids.
            eos_token_ids: Ids that end the continuation; none by default. Pass
                `[llm.tokenizer.eos_token_id]`, and for chat models also the token that ends a
                turn.
            temperature: Divisor of the log-probabilities; 0 selects the most likely token.
            seed: Random seed, valid on every engine with equal rows; None for fresh randomness.
            stop: One or several stop texts, `str` or `bytes`: the continuation ends with the
                token that completes one of them. A stop text may begin before that token and
                end within it. Token ids in `stop` are further `eos_token_ids`.
            top_k: Number of most likely tokens to which draws are limited.
            top_p: Share of the probability at the temperature, after top-k, in (0, 1]; draws
                are limited to the fewest most likely tokens that reach it.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            The drawn ids, without the prompt and without the end-of-sequence id; at most
            `max_tokens`, and fewer if the context is full, which is logged as a warning.

        Raises:
            ValueError: The temperature is negative or not finite, `max_tokens` or the seed is
                negative, a stop text is empty, or `top_k` or `top_p` is out of range.
            TypeError: One of these is not a number, or `stop` contains neither texts nor ids.
            TokenTypeError: `eos_token_ids` is not a flat sequence of integers.
            TokenIdError: An id in `eos_token_ids` or `stop` is outside the vocabulary.
            GenlmError: As `next_token_logprobs`.
        """
        limits = (stop, top_k, top_p)
        plans = self._plans(1, max_tokens, eos_token_ids, temperature, seed, limits)
        query, _ = self._requests.build_query(prompt, lora_name)
        [drawn] = await self._continued([query], plans)
        return drawn

    sample_sync = blocking(sample)

    async def batch_sample(
        self,
        prompts: TokenBatch,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        stop: Stop = (),
        top_k: int | None = None,
        top_p: float | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Draw the continuations of several prompts concurrently; see `sample`.

        Every continuation has a separate random stream: continuations of equal prompts are
        independent, and continuation i does not depend on the number of prompts.
        """
        listed = list(checked_batch(prompts))
        limits = (stop, top_k, top_p)
        plans = self._plans(len(listed), max_tokens, eos_token_ids, temperature, seed, limits)
        queries = each_in_batch(
            lambda prompt: self._requests.build_query(prompt, lora_name)[0], listed
        )
        return await self._continued(queries, plans, places=range(len(listed)))

    batch_sample_sync = blocking(batch_sample)

    async def stream(
        self,
        prompt: TokenIds,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        stop: Stop = (),
        top_k: int | None = None,
        top_p: float | None = None,
        lora_name: str | None = None,
    ) -> AsyncIterator[DrawnToken]:
        """Draw a continuation and yield every token as soon as it is drawn; see `sample`.

            async for token in llm.stream(ids, 50, [llm.tokenizer.eos_token_id], seed=1):
                print(llm.decode([token.token_id]), end="", flush=True)

        The tokens are those of `sample` with the same arguments. `token.logprob` is the model's
        log-probability of the token, and `token.draw_logprob` the log-probability with which it
        was drawn.
        """
        limits = (stop, top_k, top_p)
        [plan] = self._plans(1, max_tokens, eos_token_ids, temperature, seed, limits)
        query, _ = self._requests.build_query(prompt, lora_name)
        continuation = Continuation(query, plan, self.vocabulary, self.max_context)
        while not continuation.is_ended:
            [token] = await self._requests.answer([self._draw(continuation)])
            if continuation.add(token):
                yield token
        self._log_cut([continuation])

    def _plans(  # noqa: PLR0917
        self,
        count: int,
        max_tokens: int,
        eos_token_ids: Integers,
        temperature: float,
        seed: int | None,
        limits: tuple[Stop, int | None, float | None],
    ) -> list[SamplePlan]:
        max_tokens = checked_integer("max_tokens", max_tokens, 0)
        temperature = checked_number("temperature", temperature)
        ends = frozenset(checked_ids(eos_token_ids, self.vocabulary.size, "eos_token_ids"))
        seed = None if seed is None else checked_integer("seed", seed, 0)
        stop, stop_ids = checked_stop(limits[0], self.vocabulary.size)
        top_k, top_p = checked_top_k(limits[1], self.vocabulary.size), checked_share(limits[2])
        return [
            SamplePlan(
                SamplingParams(max_tokens, temperature, ends | stop_ids, stream),
                stop,
                top_k,
                top_p,
            )
            for stream in stream_seeds(seed, count)
        ]

    async def _continued(
        self,
        queries: Sequence[Query],
        plans: Sequence[SamplePlan],
        places: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Draw the continuations of queries: in the engine, or token by token."""
        continuations = [
            Continuation(query, plan, self.vocabulary, self.max_context)
            for query, plan in zip(queries, plans, strict=True)
        ]
        active = [(i, each) for i, each in enumerate(continuations) if not each.is_ended]
        if active and plans[0].is_plain and Capability.SAMPLE in self.capabilities:
            items: list[Item] = [
                (each.query.replace(sampling=each.plan.params), None, None)
                for _, each in active
            ]
            answers = await self._requests.answer(items, (), _only(active, places))
            for (_, each), drawn in zip(active, answers, strict=True):
                each.drawn = drawn
            active = []
        while active:
            items = [self._draw(each) for _, each in active]
            tokens = await self._requests.answer(items, (), _only(active, places))
            for (_, each), token in zip(active, tokens, strict=True):
                each.add(token)
            active = [(i, each) for i, each in active if not each.is_ended]
        self._log_cut(continuations)
        return [each.drawn for each in continuations]

    def _draw(self, continuation: Continuation) -> Item:
        """Return the request for the next token of a continuation."""
        query, key = self._requests.sequence_query(
            continuation.sequence, continuation.query.adapter
        )
        return query, key, continuation.next_draw()

    def _log_cut(self, continuations: Sequence[Continuation]) -> None:
        """Log the number of continuations that a full context ended before `max_tokens`."""
        cut = sum(each.is_cut for each in continuations)
        if cut:
            logger.warning(
                "%d of %d continuations ended before max_tokens=%d: the model's context of %d "
                "tokens is full",
                *(cut, len(continuations), continuations[0].plan.params.max_tokens),
                self.max_context,
            )


def _only(
    active: Sequence[tuple[int, Continuation]], places: Sequence[int] | None
) -> list[int] | None:
    return None if places is None else [places[i] for i, _ in active]
