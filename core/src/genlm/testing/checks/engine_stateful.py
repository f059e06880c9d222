"""The stateful test: random programs of calls, compared with the oracle.

Hypothesis' state machines are synchronous: coroutines run on an event loop in a thread. The
machine records every call, so that a failure shows the shortest program that leads to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from genlm import AsyncLM, Capability, EngineError, OutputCache, QueryResetError
from genlm.testing.check import CheckFailure, engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import hypothesis_settings
from genlm.testing.strategies import TokenTuple, near_misses

CACHE_SIZE = 2
"""Rows in the output cache: fewer than a program requests."""

known = Bundle("known")
positions = st.integers(0, 30)


_CALLS = ("query", "near_miss", "batch", "spoil", "cancel", "reset", "clear_output_cache")
_MOST_SEEDS = 5
"""Hypothesis leaves out some rules in each program, with few programs one in all of them."""


@engine_check(cases=_CALLS)
def random_programs_agree_with_the_oracle(fixture: EngineFixture) -> None:
    """Every row is right in any program of requests, cancellations and cleared caches."""
    lora = Capability.LORA in fixture.lm.capabilities and bool(fixture.target.adapters)
    lm = fixture.load(adapters=lora, output_cache=OutputCache(CACHE_SIZE))
    profile = fixture.profile
    settings = hypothesis_settings(
        profile.programs, profile.program_steps, shrink=profile.shrink
    )
    for seed in range(fixture.seed, fixture.seed + _MOST_SEEDS):
        machine = hypothesis.seed(seed)(_machine_of(fixture, lm))
        try:
            run_state_machine_as_test(machine, settings=settings)
        except hypothesis.errors.Flaky:  # the fault did not recur when the program was repeated
            if machine.failure is not None:
                raise machine.failure from None
            raise
        if all(fixture.cases[call] for call in _CALLS):
            return


class EngineMachine(RuleBasedStateMachine):
    """Requests, cancels, clears, overwrites and resets; every row must match the oracle.

    Attributes:
        fixture: Fixture of the target under test.
        lm: Its model with its adapters, shared by all programs.
        failure: The last wrong row.
    """

    fixture: ClassVar[EngineFixture]
    failure: ClassVar[CheckFailure | None] = None
    lm: AsyncLM

    def __init__(self) -> None:
        super().__init__()
        self.program: list[str] = []
        self.adapter: str | None = None
        self.lm.clear_output_cache()
        if Capability.PREFIX_CACHE in self.lm.capabilities:
            self.fixture.call(self.lm.clear_kv_cache)

    def _record(self, call: str, *arguments: object) -> None:
        self.program.append(f"{call}({', '.join(map(repr, arguments))})")
        self.fixture.saw(call)

    def _check(
        self, rows: Sequence[torch.Tensor], asked: Sequence[TokenTuple], adapter: str | None
    ) -> None:
        try:
            self.fixture.check_rows(rows, asked, adapter, program=self.program)
        except CheckFailure as failure:
            type(self).failure = failure
            raise

    # -- sequences --------------------------------------------------------------------

    @initialize(target=known, data=st.data())
    def begin(self, data: st.DataObject) -> TokenTuple:
        """Add one sequence to the bundle, so that every rule can run."""
        return data.draw(self.fixture.sequences(shorter_by=1))

    @rule(target=known, data=st.data())
    def new_sequence(self, data: st.DataObject) -> TokenTuple:
        """Add another sequence to the bundle."""
        return data.draw(self.fixture.sequences(shorter_by=1))

    @rule(target=known, token_ids=known, which=positions)
    def near_miss(self, token_ids: TokenTuple, which: int) -> TokenTuple:
        """Request a sequence and then a near miss of it."""
        misses = [
            m for m in near_misses(token_ids).values() if len(m) <= self.fixture.max_length
        ]
        miss = misses[which % len(misses)] if misses else token_ids
        self._record("near_miss", token_ids, miss)
        for asked in (token_ids, miss):
            row = self.fixture.run(self.lm.next_token_logprobs(asked))
            self._check([row], [asked], self.adapter)
        return miss

    # -- requests ---------------------------------------------------------------------

    @rule(token_ids=known, cached=st.booleans())
    def query(self, token_ids: TokenTuple, cached: bool) -> None:
        """Request one row."""
        self._record("query", token_ids, cached)
        row = self.fixture.run(self.lm.next_token_logprobs(token_ids, use_cache=cached))
        self._check([row], [token_ids], self.adapter)

    @rule(batch=st.lists(known, min_size=1, max_size=5))
    def batch(self, batch: list[TokenTuple]) -> None:
        """Request a batch that contains the first sequence twice."""
        asked = [*batch, batch[0]]
        self._record("batch", asked)
        rows = self.fixture.run(self.lm.batch_next_token_logprobs(asked))
        self._check(list(rows), asked, self.adapter)

    @rule(token_ids=known)
    def spoil(self, token_ids: TokenTuple) -> None:
        """Overwrite a returned row."""
        self._record("spoil", token_ids)
        row = self.fixture.run(self.lm.next_token_logprobs(token_ids))
        self._check([row], [token_ids], self.adapter)
        row.fill_(7.0)

    @rule(first=known, others=st.lists(known, min_size=1, max_size=4), turns=st.integers(0, 4))
    def cancel(self, first: TokenTuple, others: list[TokenTuple], turns: int) -> None:
        """Request several rows and cancel one request."""
        self._record("cancel", first, others, turns)

        async def run() -> list[torch.Tensor]:
            cancelled = asyncio.ensure_future(self.lm.next_token_logprobs(first))
            remaining = [asyncio.ensure_future(self.lm.next_token_logprobs(s)) for s in others]
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            return list(await asyncio.gather(*remaining))

        self._check(self.fixture.run(run()), others, self.adapter)

    @rule(batch=st.lists(known, min_size=1, max_size=4), turns=st.integers(0, 4))
    def reset(self, batch: list[TokenTuple], turns: int) -> None:
        """Reset pending requests: each ends with its row or with `QueryResetError`."""
        self._record("reset", batch, turns)

        async def run() -> list[Any]:
            asked = [asyncio.ensure_future(self.lm.next_token_logprobs(s)) for s in batch]
            for _ in range(turns):
                await asyncio.sleep(0)
            self.lm.cancel_all()
            return list(await asyncio.gather(*asked, return_exceptions=True))

        for token_ids, found in zip(batch, self.fixture.run(run()), strict=True):
            if isinstance(found, EngineError):
                self.fixture.expect_raised(QueryResetError, found, program=self.program)
            else:
                self._check([found], [token_ids], self.adapter)

    # -- state ------------------------------------------------------------------------

    @rule()
    def clear_output_cache(self) -> None:
        """Clear the output cache."""
        self._record("clear_output_cache")
        self.lm.clear_output_cache()

    @precondition(lambda self: Capability.PREFIX_CACHE in self.lm.capabilities)
    @rule(token_ids=known, keep=st.booleans())
    def prefix_cache(self, token_ids: TokenTuple, keep: bool) -> None:
        """Keep a prefix in the engine, or free all prefixes."""
        self._record("prefix_cache", token_ids, keep)
        if keep:
            self.fixture.call(lambda: self.lm.pin_prefix(token_ids))
        else:
            self.fixture.call(self.lm.clear_kv_cache)

    @precondition(lambda self: Capability.LORA in self.lm.capabilities)
    @rule(which=st.integers(0, 5))
    def switch_adapter(self, which: int) -> None:
        """Choose another adapter or the base model."""
        names = [None, *self.fixture.target.adapters]
        self.adapter = names[which % len(names)]
        self._record("switch_adapter", self.adapter)
        self.lm = self.lm.with_lora(self.adapter)

    @precondition(lambda self: Capability.LORA in self.lm.capabilities)
    @rule(batch=st.lists(st.tuples(known, st.integers(0, 5)), min_size=2, max_size=6))
    def mixed_batch(self, batch: list[tuple[TokenTuple, int]]) -> None:
        """Request rows of several adapters concurrently."""
        names = [self.adapter, *self.fixture.target.adapters]
        asked = [(token_ids, names[which % len(names)]) for token_ids, which in batch]
        self._record("mixed_batch", asked)

        async def run() -> list[torch.Tensor]:
            rows = (self.lm.next_token_logprobs(ids, lora_name=name) for ids, name in asked)
            return list(await asyncio.gather(*rows))

        for row, (token_ids, name) in zip(self.fixture.run(run()), asked, strict=True):
            self._check([row], [token_ids], name)

    @invariant()
    def no_request_is_pending(self) -> None:
        """Between two calls no caller waits and the output cache is within its size."""
        found = self.lm.statistics()
        expect(
            found.waiting == 0 and found.cache_entries <= CACHE_SIZE,
            f"no waiting caller and at most {CACHE_SIZE} rows in the output cache",
            f"{found.waiting} waiting, {found.cache_entries} rows",
            program=self.program,
        )


def _machine_of(engine_fixture: EngineFixture, model: AsyncLM) -> type[EngineMachine]:
    """A machine class for one fixture; Hypothesis constructs the machines."""

    class Machine(EngineMachine):
        fixture = engine_fixture
        lm = model

    return Machine
