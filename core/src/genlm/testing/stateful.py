"""`EngineMachine`: random programs over one model, with the pure oracle as its model.

Hypothesis' machines are synchronous: coroutines run on an event loop in a thread.
Every call is written down, so that a failure shows the shortest program that leads to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from genlm import AsyncLM, Capability, EngineError, QueryError, QueryResetError
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.sequences import TokenTuple, near_misses

__all__ = ["CACHE_SIZE", "EngineMachine", "machine_of"]

CACHE_SIZE = 4
"""Rows in the output cache: fewer than a program asks for."""

Asked = tuple[TokenTuple, str | None]

known = Bundle("known")
positions = st.integers(0, 30)


class EngineMachine(RuleBasedStateMachine):
    """Asks, repeats, cancels, clears, spoils and resets; every row must be the oracle's.

    Attributes:
        trial: Whose target is under test.
        lm: Its model, shared by all programs, with its adapters loaded.
    """

    trial: ClassVar[EngineTrial]
    lm: ClassVar[AsyncLM]

    def __init__(self) -> None:
        super().__init__()
        self.program: list[str] = []
        self.adapter: str | None = None
        self.loop = self.trial.loop
        self.lm.clear_cache()
        self.lm.clear_lora()
        if Capability.PREFIX_CACHE in self.lm.capabilities:
            self.trial.call(self.lm.clear_kv_cache)

    def _did(self, call: str, *arguments: object) -> None:
        self.program.append(f"{call}({', '.join(map(repr, arguments))})")
        self.trial.saw(call)

    def _run(self, coroutine: Any) -> Any:
        return self.loop.run(coroutine, self.trial.patience_s)

    def _check(
        self, rows: Sequence[torch.Tensor], asked: Sequence[TokenTuple], adapter: str | None
    ) -> None:
        self.trial.check_rows(rows, asked, adapter, program=self.program)

    def _sequence(self, data: st.DataObject) -> TokenTuple:
        return data.draw(self.trial.sequences(shorter_by=1))

    # -- sequences --------------------------------------------------------------------

    @initialize(target=known, data=st.data())
    def begin(self, data: st.DataObject) -> TokenTuple:
        """Know one sequence, so that every rule can run."""
        return self._sequence(data)

    @rule(target=known, data=st.data())
    def new_sequence(self, data: st.DataObject) -> TokenTuple:
        """Know another sequence."""
        return self._sequence(data)

    @rule(target=known, token_ids=known, which=positions)
    def near_miss(self, token_ids: TokenTuple, which: int) -> TokenTuple:
        """Ask for a sequence and then for one that resembles it."""
        misses = [m for m in near_misses(token_ids).values() if len(m) <= self.trial.max_length]
        miss = misses[which % len(misses)] if misses else token_ids
        self._did("near_miss", token_ids, miss)
        for asked in (token_ids, miss):
            row = self._run(self.lm.next_token_logprobs(asked))
            self._check([row], [asked], self.adapter)
        return miss

    # -- requests ---------------------------------------------------------------------

    @rule(token_ids=known, cached=st.booleans())
    def query(self, token_ids: TokenTuple, cached: bool) -> None:
        """Ask for one row."""
        self._did("query", token_ids, cached)
        ask = self.lm.next_token_logprobs if cached else self.lm.next_token_logprobs_uncached
        self._check([self._run(ask(token_ids))], [token_ids], self.adapter)

    @rule(batch=st.lists(known, min_size=1, max_size=5), sync=st.booleans())
    def batch(self, batch: list[TokenTuple], sync: bool) -> None:
        """Ask for a batch in which the first sequence comes twice."""
        asked = [*batch, batch[0]]
        self._did("batch", asked, sync)
        if sync:
            rows = self.trial.call(lambda: self.lm.batch_next_token_logprobs_sync(asked))
        else:
            rows = self._run(self.lm.batch_next_token_logprobs(asked))
        self._check(list(rows), asked, self.adapter)

    @rule(token_ids=known, at=positions)
    def bad_token(self, token_ids: TokenTuple, at: int) -> None:
        """Ask with an id that does not exist beside a good request."""
        at %= len(token_ids) + 1
        bad = (*token_ids[:at], self.lm.vocab_size, *token_ids[at:])[: self.trial.max_length]
        bad = bad if self.lm.vocab_size in bad else (self.lm.vocab_size,)
        self._did("bad_token", token_ids, bad)
        good, wrong = self._run(_gathered(self.lm, [token_ids, bad]))
        self._check([good], [token_ids], self.adapter)
        self.trial.expect_raised(QueryError, wrong, program=self.program)

    @rule(token_ids=known)
    def spoil(self, token_ids: TokenTuple) -> None:
        """Change a row that was given out."""
        self._did("spoil", token_ids)
        row = self._run(self.lm.next_token_logprobs(token_ids))
        self._check([row], [token_ids], self.adapter)
        row.fill_(7.0)

    @rule(
        leaving=known, staying=st.lists(known, min_size=1, max_size=4), turns=st.integers(0, 4)
    )
    def cancel(self, leaving: TokenTuple, staying: list[TokenTuple], turns: int) -> None:
        """Ask for several rows and leave one request alone."""
        self._did("cancel", leaving, staying, turns)

        async def play() -> list[torch.Tensor]:
            left = asyncio.ensure_future(self.lm.next_token_logprobs(leaving))
            stayed = [asyncio.ensure_future(self.lm.next_token_logprobs(s)) for s in staying]
            for _ in range(turns):
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            return list(await asyncio.gather(*stayed))

        self._check(self._run(play()), staying, self.adapter)

    @rule(batch=st.lists(known, min_size=1, max_size=4), turns=st.integers(0, 4))
    def reset(self, batch: list[TokenTuple], turns: int) -> None:
        """Drop requests on their way: each ends, with its row or the error for that."""
        self._did("reset", batch, turns)

        async def play() -> list[Any]:
            asked = [asyncio.ensure_future(self.lm.next_token_logprobs(s)) for s in batch]
            for _ in range(turns):
                await asyncio.sleep(0)
            self.lm.reset_async_queries()
            return list(await asyncio.gather(*asked, return_exceptions=True))

        for token_ids, found in zip(batch, self._run(play()), strict=True):
            if isinstance(found, EngineError):
                self.trial.expect_raised(QueryResetError, found, program=self.program)
            else:
                self._check([found], [token_ids], self.adapter)

    # -- state ------------------------------------------------------------------------

    @rule()
    def clear_cache(self) -> None:
        """Forget all rows."""
        self._did("clear_cache")
        self.lm.clear_cache()

    @precondition(lambda self: Capability.PREFIX_CACHE in self.lm.capabilities)
    @rule(token_ids=known, keep=st.booleans())
    def prefix_cache(self, token_ids: TokenTuple, keep: bool) -> None:
        """Keep a prefix in the engine, or free all."""
        self._did("prefix_cache", token_ids, keep)
        if keep:
            self.trial.call(lambda: self.lm.cache_kv(token_ids))
        else:
            self.trial.call(self.lm.clear_kv_cache)

    @rule()
    def new_loop(self) -> None:
        """Go on in an event loop of its own, as after another `asyncio.run`."""
        self._did("new_loop")
        if self.loop is not self.trial.loop:
            self.loop.close()
        self.loop = self.trial.new_loop()

    @precondition(lambda self: Capability.LORA in self.lm.capabilities)
    @rule(which=st.integers(0, 5))
    def switch_adapter(self, which: int) -> None:
        """Set another adapter, or none."""
        names = [None, *self.trial.target.adapters]
        self.adapter = names[which % len(names)]
        self._did("switch_adapter", self.adapter)
        if self.adapter is None:
            self.lm.clear_lora()
        else:
            self.lm.set_lora(self.adapter)

    @precondition(lambda self: Capability.LORA in self.lm.capabilities)
    @rule(batch=st.lists(st.tuples(known, st.integers(0, 5)), min_size=2, max_size=6))
    def mixed_batch(self, batch: list[tuple[TokenTuple, int]]) -> None:
        """Ask for rows of several adapters at once."""
        names = [self.adapter, *self.trial.target.adapters]
        asked = [(token_ids, names[which % len(names)]) for token_ids, which in batch]
        self._did("mixed_batch", asked)

        async def play() -> list[torch.Tensor]:
            rows = (self.lm.next_token_logprobs(ids, lora_name=name) for ids, name in asked)
            return list(await asyncio.gather(*rows))

        for row, (token_ids, name) in zip(self._run(play()), asked, strict=True):
            self._check([row], [token_ids], name)

    @invariant()
    def nothing_is_left_over(self) -> None:
        """No request is pending between two calls, and the cache keeps to its size."""
        found = self.lm.statistics()
        expect(
            found.waiting == 0 and found.cache_entries <= CACHE_SIZE,
            f"nobody waiting and at most {CACHE_SIZE} rows in the output cache",
            f"{found.waiting} waiting, {found.cache_entries} rows",
            program=self.program,
        )

    def teardown(self) -> None:
        """Leave the model as the next program expects it."""
        if self.loop is not self.trial.loop:
            self.loop.close()


async def _gathered(lm: AsyncLM, asked: Sequence[TokenTuple]) -> list[Any]:
    rows = map(lm.next_token_logprobs, asked)
    return list(await asyncio.gather(*rows, return_exceptions=True))


def machine_of(engine_trial: EngineTrial, model: AsyncLM) -> type[EngineMachine]:
    """A machine class for one trial; Hypothesis makes the machines itself."""

    class Machine(EngineMachine):
        trial = engine_trial
        lm = model

    return Machine
