"""Random programs of calls, compared with the oracle."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from genlm import AsyncLM, Capability, Context, OutputCache, QueryResetError
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import on_thread
from genlm.testing.strategies import TokenTuple, near_misses

CACHE_SIZE = 2
"""Rows in the output cache: fewer than a program requests."""

SEQUENCES = 3

KEPT_CONTEXTS = 8

CALLS = (
    "query",
    "near_miss",
    "batch",
    "spoil",
    "cancel",
    "reset",
    "extend",
    "clear_output_cache",
)
"""Calls on every engine; `Program` has a method for each of these and of the others."""

OTHER_CALLS = ("prefix_cache", "switch_adapter", "mixed_batch")


@engine_check(cases=CALLS)
def random_programs_agree_with_the_oracle(fixture: EngineFixture) -> None:
    """Every row is right in any program of requests, cancellations and cleared caches."""
    lora = Capability.LORA in fixture.lm.capabilities
    model = fixture.load(adapters=lora, output_cache=OutputCache(CACHE_SIZE))

    def holds(known: list[TokenTuple], parts: list[list[tuple[str, list[int], int]]]) -> None:
        program = Program(fixture, model, known)
        model.clear_output_cache()
        if Capability.PREFIX_CACHE in model.capabilities:
            fixture.call(model.clear_kv_cache)
        for call, places, number in itertools.chain(*parts):
            fixture.saw(call)
            asked = [program.known[place % len(program.known)] for place in places]
            program.calls.append(f"{call}({asked}, {number})")
            fixture.run(getattr(program, call)(asked, number))
            program.check_nothing_waits()

    places = st.lists(st.integers(0, 30), min_size=1, max_size=5)
    call = st.tuples(st.sampled_from(CALLS + OTHER_CALLS), places, st.integers(0, 7))
    part = st.lists(call, min_size=1, max_size=10)  # a list of lists is longer than a list
    fixture.for_all(
        holds,
        examples=3 * fixture.profile.examples // 2,
        known=st.lists(fixture.sequences(shorter_by=1), min_size=1, max_size=SEQUENCES),
        parts=st.lists(part, min_size=1, max_size=6),
    )


class Program:
    """The calls of a program; each checks the rows that it gets.

    Every call takes sequences and a number, which selects one of its variants.

    Args:
        fixture: Fixture of the target under test.
        lm: Its model with its adapters.
        known: Sequences to request.

    Attributes:
        known: These sequences, and the near misses that were requested.
        calls: The calls so far, for messages.
    """

    def __init__(
        self, fixture: EngineFixture, lm: AsyncLM, known: Sequence[TokenTuple]
    ) -> None:
        self.known = [*known]
        self.calls: list[str] = []
        self._fixture = fixture
        self._lm = lm
        lora = Capability.LORA in lm.capabilities
        self._adapters = [None, *(fixture.target.adapters if lora else ())]
        self._adapter: str | None = None
        self._contexts: list[Context] = []

    def check_nothing_waits(self) -> None:
        """Check that no caller waits and that the output cache is within its size."""
        found = self._lm.statistics()
        expect(
            found.waiting == 0 and found.cache_entries <= CACHE_SIZE,
            f"no waiting caller and at most {CACHE_SIZE} rows in the output cache",
            f"{found.waiting} waiting, {found.cache_entries} rows",
            program=self.calls,
        )

    def _check(self, row: torch.Tensor, token_ids: TokenTuple) -> None:
        self._fixture.check_row(row, token_ids, self._adapter, program=self.calls)

    # -- requests ---------------------------------------------------------------------

    async def query(self, asked: list[TokenTuple], number: int) -> None:
        """Request one row, which may come from the output cache or not."""
        row = await self._lm.next_token_logprobs(asked[0], use_cache=number % 2 == 0)
        self._check(row, asked[0])

    async def near_miss(self, asked: list[TokenTuple], number: int) -> None:
        """Request a sequence and then a near miss of it."""
        longest = self._fixture.max_length
        misses = [miss for miss in near_misses(asked[0]).values() if len(miss) <= longest]
        misses = misses or asked
        self.known.append(misses[number % len(misses)])
        for token_ids in (asked[0], self.known[-1]):
            self._check(await self._lm.next_token_logprobs(token_ids), token_ids)

    async def batch(self, asked: list[TokenTuple], number: int) -> None:
        """Request a batch that contains the first sequence twice."""
        del number
        asked = [*asked, asked[0]]
        rows = await self._lm.batch_next_token_logprobs(asked)
        for row, token_ids in zip(rows, asked, strict=True):
            self._check(row, token_ids)

    async def spoil(self, asked: list[TokenTuple], number: int) -> None:
        """Overwrite a returned row, request it again, and overwrite that one."""
        for _ in range(3):
            row = await self._lm.next_token_logprobs(asked[0])
            self._check(row, asked[0])
            row.fill_(float(number))

    async def extend(self, asked: list[TokenTuple], number: int) -> None:
        """Extend one context by several texts, and request the rows of these siblings.

        The context is any of the last ones, with the adapter that it was made with; others are
        dropped.
        """
        longest = self._fixture.max_length - 2
        fitting = [each for each in self._contexts if len(each) <= longest]
        fitting = fitting or [self._lm.context(asked[0][: max(1, longest)])]
        parent, added = fitting[number % len(fitting)], 1 + number % 2
        children = [parent.extend(token_ids[:added]) for token_ids in asked]
        self._contexts = [*self._contexts, *children][-KEPT_CONTEXTS:]
        rows = await self._lm.batch_next_token_logprobs(children)
        for row, child in zip(rows, children, strict=True):
            name = child.lora_name
            self._fixture.check_row(row, child.token_ids, name, program=self.calls)

    async def cancel(self, asked: list[TokenTuple], number: int) -> None:
        """Request several rows, and cancel the first request after some turns of the loop."""
        tasks = [asyncio.ensure_future(self._lm.next_token_logprobs(ids)) for ids in asked]
        for _ in range(number):
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        for task, token_ids in zip(tasks[1:], asked[1:], strict=True):
            self._check(await task, token_ids)

    async def reset(self, asked: list[TokenTuple], number: int) -> None:
        """End pending requests: each has its row or `QueryResetError`."""
        tasks = [asyncio.ensure_future(self._lm.next_token_logprobs(ids)) for ids in asked]
        for _ in range(number):
            await asyncio.sleep(0)
        self._lm.cancel_all()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for row, token_ids in zip(found, asked, strict=True):
            if isinstance(row, BaseException):
                self._fixture.expect_raised(QueryResetError, row, program=self.calls)
            else:
                self._check(row, token_ids)

    async def mixed_batch(self, asked: list[TokenTuple], number: int) -> None:
        """Request rows of several adapters concurrently."""
        given = [self._adapter, *self._adapters[1:]]  # None would be the adapter chosen last
        names = [given[(number + i) % len(given)] for i in range(len(asked))]
        rows = await asyncio.gather(
            *(
                self._lm.next_token_logprobs(ids, lora_name=name)
                for ids, name in zip(asked, names, strict=True)
            )
        )
        for row, token_ids, name in zip(rows, asked, names, strict=True):
            self._fixture.check_row(row, token_ids, name, program=self.calls)

    # -- state ------------------------------------------------------------------------

    async def clear_output_cache(self, asked: list[TokenTuple], number: int) -> None:
        """Clear the output cache."""
        del asked, number
        self._lm.clear_output_cache()

    async def prefix_cache(self, asked: list[TokenTuple], number: int) -> None:
        """Keep a prefix in the engine, or free all prefixes, if the engine keeps any."""
        if Capability.PREFIX_CACHE not in self._lm.capabilities:
            return
        if number % 2:
            await on_thread(self._lm.pin_prefix, asked[0])
        else:
            await on_thread(self._lm.clear_kv_cache)

    async def switch_adapter(self, asked: list[TokenTuple], number: int) -> None:
        """Choose an adapter or the base model."""
        del asked
        self._adapter = self._adapters[number % len(self._adapters)]
        self._lm = self._lm.with_lora(self._adapter)
