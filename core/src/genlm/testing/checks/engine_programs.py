"""Random programs of calls, compared with the oracle."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from genlm import AsyncLM, Capability, Context, OutputCache, QueryResetError
from genlm.testing.check import NotApplicable, engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import on_thread
from genlm.testing.population_program import CALLS as POPULATION_CALLS
from genlm.testing.population_program import LEAST_LENGTH, PopulationProgram
from genlm.testing.strategies import near_misses
from genlm.testing.target import TokenTuple

CACHE_SIZE = 2
"""Rows in the output cache: fewer than a program requests."""

SEQUENCES = 3

MAX_CONTEXTS = 8

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


@engine_check()
def random_programs_agree_with_the_oracle(fixture: EngineFixture) -> None:
    """Every row is right in any program of requests, cancellations and cleared caches."""
    model = fixture.load(adapters=True, output_cache=OutputCache(CACHE_SIZE))
    for name in CALLS:
        fixture.saw(name, False)

    def holds(
        sequences: list[TokenTuple], parts: list[list[tuple[str, list[int], int]]]
    ) -> None:
        program = Program(fixture, model, sequences)
        model.clear_output_cache()
        if Capability.PREFIX_CACHE in model.capabilities:
            fixture.call(model.clear_kv_cache)
        for call, indices, number in itertools.chain(*parts):
            fixture.saw(call)
            arguments = [program.sequences[i % len(program.sequences)] for i in indices]
            program.calls.append(f"{call}({arguments}, {number})")
            fixture.run(getattr(program, call)(arguments, number))
            program.check_nothing_waits()

    indices = st.lists(st.integers(0, 30), min_size=1, max_size=5)
    call = st.tuples(st.sampled_from(CALLS + OTHER_CALLS), indices, st.integers(0, 7))
    part = st.lists(call, min_size=1, max_size=10)  # a list of lists is longer than a list
    fixture.for_all(
        holds,
        sequences=st.lists(fixture.sequences(shorter_by=1), min_size=1, max_size=SEQUENCES),
        parts=st.lists(part, min_size=1, max_size=6),
    )


@engine_check()
def random_populations_agree_with_the_oracle(fixture: EngineFixture) -> None:
    """Every result is right in any two concurrent programs of populations."""
    if fixture.max_length < LEAST_LENGTH:
        raise NotApplicable(f"sequences have fewer than {LEAST_LENGTH} tokens")
    adapters = [None, *fixture.adapters]
    variants = [{}] if fixture.target.shared else [{}, *fixture.target.tight_options]
    models = [
        fixture.load(adapters=True, engine_options=options, output_cache=OutputCache(0))
        for options in variants
    ]

    def holds(first: list[str], second: list[str], seed: int, model: int) -> None:
        programs = [
            PopulationProgram(fixture, models[model], seed + place, adapters)
            for place in range(2)
        ]
        for calls in [("create", "create"), *zip(first, second, strict=True)]:
            pairs = zip(programs, calls, strict=True)
            fixture.gather(program.call(name) for program, name in pairs)
        pending = models[model].statistics().pending
        expect(pending == 0, "nothing pending", pending)

    every_call = st.permutations(POPULATION_CALLS)
    examples = max(3, fixture.profile.max_examples // 6) * len(models)
    fixture.for_all(
        holds,
        examples=examples,
        first=every_call,
        second=every_call,
        seed=st.integers(0, 2**32 - 1),
        model=st.integers(0, len(models) - 1),
    )


class Program:
    """The calls of a program; every call checks the rows that it receives.

    Every call takes sequences and a number, which selects one of its variants.

    Args:
        fixture: Fixture of the target under test.
        lm: Its model with its adapters.
        sequences: Sequences to request.

    Attributes:
        sequences: These sequences, and the near misses that were requested.
        calls: The calls so far, for messages.
    """

    def __init__(
        self, fixture: EngineFixture, lm: AsyncLM, sequences: Sequence[TokenTuple]
    ) -> None:
        self.sequences = [*sequences]
        self.calls: list[str] = []
        self._fixture = fixture
        self._lm = lm
        self._adapters = [None, *fixture.adapters]
        self._adapter: str | None = None
        self._contexts: list[Context] = []

    def check_nothing_waits(self) -> None:
        """Check that no caller waits and that the output cache is within its size."""
        statistics = self._lm.statistics()
        expect(
            statistics.waiting == 0 and statistics.cache_entries <= CACHE_SIZE,
            f"no waiting caller and at most {CACHE_SIZE} rows in the output cache",
            f"{statistics.waiting} waiting, {statistics.cache_entries} rows",
            program=self.calls,
        )

    def _check(self, row: torch.Tensor, token_ids: TokenTuple) -> None:
        self._fixture.check_row(row, token_ids, self._adapter, program=self.calls)

    # -- requests ---------------------------------------------------------------------

    async def query(self, sequences: list[TokenTuple], number: int) -> None:
        """Request one row, which may come from the output cache or not."""
        row = await self._lm.next_token_logprobs(sequences[0], use_cache=number % 2 == 0)
        self._check(row, sequences[0])

    async def near_miss(self, sequences: list[TokenTuple], number: int) -> None:
        """Request a sequence and then a near miss of it."""
        longest = self._fixture.max_length
        misses = [miss for miss in near_misses(sequences[0]).values() if len(miss) <= longest]
        misses = misses or sequences
        self.sequences.append(misses[number % len(misses)])
        for token_ids in (sequences[0], self.sequences[-1]):
            self._check(await self._lm.next_token_logprobs(token_ids), token_ids)

    async def batch(self, sequences: list[TokenTuple], number: int) -> None:
        """Request a batch that contains the first sequence twice."""
        del number
        sequences = [*sequences, sequences[0]]
        rows = await self._lm.batch_next_token_logprobs(sequences)
        self._fixture.check_rows(rows, sequences, self._adapter, program=self.calls)

    async def spoil(self, sequences: list[TokenTuple], number: int) -> None:
        """Request a row three times, and overwrite the returned row each time."""
        for _ in range(3):
            row = await self._lm.next_token_logprobs(sequences[0])
            self._check(row, sequences[0])
            row.fill_(float(number))

    async def extend(self, sequences: list[TokenTuple], number: int) -> None:
        """Extend one context by several texts, and request the rows of these siblings.

        The context is one of the last ones, with the adapter of its creation; older ones are
        dropped.
        """
        longest = self._fixture.max_length - 2
        fitting = [context for context in self._contexts if len(context) <= longest]
        fitting = fitting or [self._lm.context(sequences[0][: max(1, longest)])]
        parent, added = fitting[number % len(fitting)], 1 + number % 2
        children = [parent.extend(token_ids[:added]) for token_ids in sequences]
        self._contexts = [*self._contexts, *children][-MAX_CONTEXTS:]
        rows = await self._lm.batch_next_token_logprobs(children)
        for row, child in zip(rows, children, strict=True):
            name = child.lora_name
            self._fixture.check_row(row, child.token_ids, name, program=self.calls)

    async def cancel(self, sequences: list[TokenTuple], number: int) -> None:
        """Request several rows, and cancel the first request after some turns of the loop."""
        tasks = [asyncio.ensure_future(self._lm.next_token_logprobs(ids)) for ids in sequences]
        for _ in range(number):
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        for task, token_ids in zip(tasks[1:], sequences[1:], strict=True):
            self._check(await task, token_ids)

    async def reset(self, sequences: list[TokenTuple], number: int) -> None:
        """Cancel all pending requests; they return their rows or raise `QueryResetError`."""
        tasks = [asyncio.ensure_future(self._lm.next_token_logprobs(ids)) for ids in sequences]
        for _ in range(number):
            await asyncio.sleep(0)
        self._lm.cancel_all()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for row, token_ids in zip(results, sequences, strict=True):
            if isinstance(row, BaseException):
                self._fixture.expect_raised(QueryResetError, row, program=self.calls)
            else:
                self._check(row, token_ids)

    async def mixed_batch(self, sequences: list[TokenTuple], number: int) -> None:
        """Request rows of several adapters concurrently."""
        adapters = [self._adapter, *self._adapters[1:]]  # None would be the selected adapter
        names = [adapters[(number + i) % len(adapters)] for i in range(len(sequences))]
        rows = await asyncio.gather(
            *(
                self._lm.next_token_logprobs(ids, lora_name=name)
                for ids, name in zip(sequences, names, strict=True)
            )
        )
        for row, token_ids, name in zip(rows, sequences, names, strict=True):
            self._fixture.check_row(row, token_ids, name, program=self.calls)

    # -- state ------------------------------------------------------------------------

    async def clear_output_cache(self, sequences: list[TokenTuple], number: int) -> None:
        """Clear the output cache."""
        del sequences, number
        self._lm.clear_output_cache()

    async def prefix_cache(self, sequences: list[TokenTuple], number: int) -> None:
        """Pin a prefix or free all prefixes, if the engine has a prefix cache."""
        if Capability.PREFIX_CACHE not in self._lm.capabilities:
            return
        if number % 2:
            await on_thread(self._lm.pin_prefix, sequences[0])
        else:
            await on_thread(self._lm.clear_kv_cache)

    async def switch_adapter(self, sequences: list[TokenTuple], number: int) -> None:
        """Select an adapter or the base model."""
        del sequences
        self._adapter = self._adapters[number % len(self._adapters)]
        self._lm = self._lm.with_lora(self._adapter)
