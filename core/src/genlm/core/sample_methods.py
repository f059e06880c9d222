"""Continuations: `sample`, its forms for several prompts and for threads, and `stream`.

Engines with `Capability.SAMPLE` continue sequences themselves; for others, and for what such
engines are not asked (stop texts, top-k, top-p), each token is a `Draw`. Longer than
other modules by the docstrings and signatures of five public methods.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from genlm.core.engine import Capability
from genlm.core.query import SamplingParams
from genlm.core.reductions import Draw, DrawnToken
from genlm.core.sampling import stream_seeds, stream_uniform
from genlm.core.sequence import TokenSequence
from genlm.core.validation import (
    checked_batch,
    checked_integer,
    checked_number,
    checked_share,
    checked_stop,
    checked_stop_ids,
    checked_top_k,
)

if TYPE_CHECKING:
    from genlm.core.engine import Engine
    from genlm.core.query import Query
    from genlm.core.requests import Requests
    from genlm.core.scheduler import Scheduler
    from genlm.core.validation import Integers, Stop, TokenBatch, TokenIds
    from genlm.core.vocab import Vocabulary

__all__ = ["SampleMethods"]

T = TypeVar("T")

logger = logging.getLogger("genlm")


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How to continue one prompt.

    Attributes:
        params: What an engine that samples itself is told.
        stop: Texts that end the continuation.
        top_k: Draws from the k most likely tokens; None for all.
        top_p: Draws from the fewest most likely tokens that have this share; 1 for all.
        is_seeded: Whether the caller gave a seed.
    """

    params: SamplingParams
    stop: tuple[bytes, ...]
    top_k: int | None
    top_p: float
    is_seeded: bool

    def draw(self, position: int) -> Draw:
        """Return the draw of the token at a position of the continuation."""
        assert self.params.seed is not None  # noqa: S101 - set with the plan
        return Draw(
            stream_uniform(self.params.seed, position),
            self.params.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            is_reproducible=self.is_seeded,
        )


class SampleMethods:
    """The methods of `AsyncLM` that draw continuations."""

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]

    _requests: Requests
    _scheduler: Scheduler[Engine]

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
        """Draw a continuation of `prompt`; `stream` gives log-probabilities as well.

        Args:
            prompt: At least one token id.
            max_tokens: The most ids to draw.
            eos_token_ids: Drawing one of these ends the continuation. By default nothing
                does: pass `[llm.tokenizer.eos_token_id]`, and for chat models also the token
                that ends a turn.
            temperature: Divides the log-probabilities; 0 takes the most likely token.
            seed: Makes the continuation reproducible, also on another engine as far as its
                rows are the same.
            stop: Texts, `str` or `bytes`, one or several: the continuation ends with the token
                that completes one of them. It may begin before that token and end within it.
                Token ids among them are further `eos_token_ids`.
            top_k: Draw from the k most likely tokens.
            top_p: Draw from the fewest most likely tokens that have this share of the
                probability at the temperature, in (0, 1], after top-k.
            lora_name: A loaded adapter; by default the one set with `set_lora`.

        Returns:
            The drawn ids, without the prompt and without the end-of-sequence id; at
            most `max_tokens`, fewer when the context is full, which is logged as a warning.

        Raises:
            ValueError: A temperature that is negative or not finite, a negative number of
                tokens or seed, an empty stop text, or a top-k or top-p that is out of range.
            TypeError: One that is not a number, or a stop that is neither text nor a token id.
            TokenTypeError: `eos_token_ids` is not a flat sequence of integers.
            TokenIdError: One of them, or an id in `stop`, is outside the vocabulary.
            GenlmError: As `next_token_logprobs`.
        """
        drawn = await self.batch_sample(
            [prompt],
            max_tokens,
            eos_token_ids,
            temperature,
            seed,
            stop=stop,
            top_k=top_k,
            top_p=top_p,
            lora_name=lora_name,
        )
        return drawn[0]

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
        """Draw a continuation of each prompt, concurrently; see `sample`.

        Every continuation has its own stream of randomness: equal prompts give different
        draws, and draw i does not depend on how many prompts there are.
        """
        listed = list(checked_batch(prompts))
        limits = (stop, top_k, top_p)
        plans = self._plans(len(listed), max_tokens, eos_token_ids, temperature, seed, limits)
        queries = [self._requests.of(prompt, lora_name)[0] for prompt in listed]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._continuation(query, plan))
                    for query, plan in zip(queries, plans, strict=True)
                ]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
        else:
            drawn = [task.result() for task in tasks]
            self._log_cut(queries, plans, drawn)
            return drawn
        raise first  # outside `except`, which would replace its __cause__

    def sample_sync(
        self,
        prompt: TokenIds,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Draw a continuation and wait; see `sample`, which has all options."""
        drawn = self.batch_sample_sync(
            [prompt], max_tokens, eos_token_ids, temperature, seed, **options
        )
        return drawn[0]

    def batch_sample_sync(
        self,
        prompts: TokenBatch,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """Draw a continuation of each prompt and wait; see `sample`, which has all options.

        Works in and outside a running event loop, which it blocks.
        """
        self._scheduler.refuse_own_thread()
        drawing = self.batch_sample(
            prompts, max_tokens, eos_token_ids, temperature, seed, **options
        )
        return _waited_for(drawing)

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
        """Draw a continuation and yield each token as soon as it is drawn; see `sample`.

            async for token in llm.stream(ids, 50, [llm.tokenizer.eos_token_id], seed=1):
                print(llm.decode([token.token_id]), end="", flush=True)

        Draws what `sample` draws from this prompt with the same arguments. `token.logprob` is
        the model's log-probability of the token, `token.draw_logprob` that with which it was
        drawn.
        """
        limits = (stop, top_k, top_p)
        [plan] = self._plans(1, max_tokens, eos_token_ids, temperature, seed, limits)
        query = self._requests.of(prompt, lora_name)[0]
        drawn = []
        async for token in self._tokens(query, plan):
            drawn.append(token.token_id)
            yield token
        self._log_cut([query], [plan], [drawn])

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
        ends = checked_stop_ids(eos_token_ids, self.vocabulary.size)
        seed = None if seed is None else checked_integer("seed", seed, 0)
        stop, stop_ids = checked_stop(limits[0], self.vocabulary.size)
        top_k, top_p = checked_top_k(limits[1], self.vocabulary.size), checked_share(limits[2])
        return [
            SamplePlan(
                SamplingParams(max_tokens, temperature, ends | stop_ids, stream),
                stop,
                top_k,
                top_p,
                seed is not None,
            )
            for stream in stream_seeds(seed, count)
        ]

    async def _continuation(self, query: Query, plan: SamplePlan) -> list[int]:
        if plan.params.max_tokens == 0:
            return []
        is_plain = not plan.stop and plan.top_k is None and plan.top_p == 1
        if is_plain and Capability.SAMPLE in self.capabilities:
            self._requests.counters.count(len(query), hit=False)
            drawn: list[int] = await self._scheduler.answer(query.replace(sampling=plan.params))
            return drawn
        return [token.token_id async for token in self._tokens(query, plan)]

    async def _tokens(self, query: Query, plan: SamplePlan) -> AsyncIterator[DrawnToken]:
        """Draw token by token, to the end of the continuation."""
        sequence, tail = query.sequence, b""
        longest = max(map(len, plan.stop), default=0)
        for position in range(plan.params.max_tokens):
            if self.max_context is not None and len(sequence) > self.max_context:
                return
            token = await self._drawn_token(sequence, query.adapter, plan.draw(position))
            if token.token_id in plan.params.stop_token_ids:
                return
            yield token
            if plan.stop:
                tail += bytes(self.vocabulary.byte_vocab[token.token_id])
                if any(text in tail for text in plan.stop):
                    return
                tail = tail[max(0, len(tail) - longest + 1) :]
            sequence = TokenSequence.of([token.token_id], sequence)

    async def _drawn_token(
        self, sequence: TokenSequence, adapter: str | None, draw: Draw
    ) -> DrawnToken:
        query, key = self._requests.of_sequence(sequence, adapter)
        drawn: DrawnToken | None = self._requests.cached(query, key, draw)
        if drawn is None:
            drawn = await self._scheduler.answer(query, key, draw)
        return drawn

    def _log_cut(
        self,
        queries: Sequence[Query],
        plans: Sequence[SamplePlan],
        drawn: Sequence[list[int]],
    ) -> None:
        """Say how many continuations the context ended before `max_tokens`."""
        if self.max_context is None or not plans:
            return
        most = plans[0].params.max_tokens
        cut = sum(
            len(query) + len(ids) > self.max_context and len(ids) < most
            for query, ids in zip(queries, drawn, strict=True)
        )
        if cut:
            logger.warning(
                "%d of %d continuations ended before max_tokens=%d: the model's context of %d "
                "tokens is full",
                *(cut, len(drawn), most, self.max_context),
            )


def _waited_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and wait; on a thread, since this one may be running an event loop.

    An exception such as Ctrl-C ends the wait and cancels the coroutine.
    """
    cancels: list[Callable[[], object]] = []

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101 - in a coroutine
        cancels.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await coroutine

    with concurrent.futures.ThreadPoolExecutor(1, "genlm-sample") as thread:
        future = thread.submit(asyncio.run, cancellable())
        try:
            return future.result()
        except BaseException:
            if not future.done():
                for cancel in cancels:
                    cancel()
            raise
