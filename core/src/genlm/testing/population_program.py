"""`PopulationProgram`: random calls of populations, compared with the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genlm import AsyncLM, Capability, Context, Mask
from genlm.plugin import stream_seeds, stream_uniform
from genlm.testing.check import expect
from genlm.testing.draw_oracle import DrawOracle, random_settings, settings_of_member
from genlm.testing.expected_members import ExpectedMembers
from genlm.testing.target import TokenTuple

if TYPE_CHECKING:
    from genlm.testing.engine_fixture import EngineFixture

CALLS = (
    "create",
    "extend",
    "resample",
    "truncate",
    "concatenate",
    "finish",
    "request_rows",
    "request_beside_a_cancelled_draw",
    "reduce",
    "draw",
    "draw_of_some",
    "draw_several",
    "sample",
    "score",
    "extend_a_context",
    "clear_caches",
)
"""The calls of a program; `PopulationProgram` has a method for each."""

LEAST_LENGTH = 5
"""Minimum of the maximum length of sequences: prompts have up to 4 tokens fewer."""

_MOST_MEMBERS = 12

_POPULATIONS = 4
"""Number of populations of a program; older ones are dropped."""


@dataclass
class PopulationProgram:
    """The calls of a program; every call checks its results.

    Several programs may run concurrently. Their prompts begin with the same tokens.

    Args:
        fixture: Fixture of the target under test.
        lm: Its model.
        seed: Seed of the arguments of the calls.
        adapters: Adapters of the populations; None stands for the base model.
    """

    fixture: EngineFixture
    lm: AsyncLM
    seed: int
    adapters: Sequence[str | None] = (None,)

    calls: list[str] = field(default_factory=list)
    """The calls so far, for messages."""

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)
        self._all: list[ExpectedMembers] = []
        self._context: Context | None = None

    async def run(self, calls: Iterable[str]) -> None:
        """Run calls, the first of which is `create`."""
        for name in calls:
            await self.call(name)

    async def call(self, name: str) -> None:
        """Run one of `CALLS`."""
        self.calls.append(name)
        await getattr(self, name)()

    # -- populations ------------------------------------------------------------------

    async def create(self) -> None:
        """Create a population of one prompt, or of several with tokens in common.

        Some members are finished.
        """
        longest = self.fixture.max_length - LEAST_LENGTH + 1
        text = (self.fixture.some_sequences(1)[0] * longest)[:longest]
        count = self._number(1, _MOST_MEMBERS)
        adapter = self.adapters[self._number(0, len(self.adapters))]
        if self._number(0, 2):
            prompt = text[: self._number(1, longest + 1)]
            population = self.lm.population(prompt, count, lora_name=adapter)
            prompts = [prompt] * count
        else:
            prompts = [
                text[: self._number(1, longest + 1)] + self._tokens(self._number(0, 3))
                for _ in range(count)
            ]
            contexts = [self.lm.context(prompt, lora_name=adapter) for prompt in prompts[::2]]
            members: list[Any] = [*prompts]
            members[::2] = contexts
            population = self.lm.population(members, lora_name=adapter)
        finished = self._generator.random(count) < 0.15
        self._add(ExpectedMembers.unfinished(population, prompts, adapter).finish(finished))

    async def extend(self) -> None:
        """Extend the members by up to three tokens."""
        members = self._members()
        ids = self._continuations(members, self._number(1, 4))
        is_single = ids.shape[1] == 1 and self._number(0, 2)
        self._add(members.extended(ids[:, 0] if is_single else ids))

    async def resample(self) -> None:
        """Select members, with repetitions."""
        members = self._members()
        count = self._number(1, _MOST_MEMBERS)
        self._add(members.of(self._numbers(len(members.sequences), count)))

    async def truncate(self) -> None:
        """Truncate the members."""
        members = self._members()
        lengths = self._numbers(self.fixture.max_length, len(members.sequences))
        self._add(members.truncated([length + 1 for length in lengths]))

    async def concatenate(self) -> None:
        """Concatenate two populations of one adapter, which may be the same one."""
        first = self._members()
        others = [members for members in self._all if members.adapter == first.adapter]
        second = others[self._number(0, len(others))]
        parts = [
            members.of(range(min(len(members.sequences), _MOST_MEMBERS // 2)))
            for members in (first, second)
        ]
        self._add(ExpectedMembers.joined(parts))

    async def finish(self) -> None:
        """Mark members as finished, or none."""
        members = self._members()
        count = len(members.sequences)
        members = members.finish(self._generator.random(count) < 0.3)
        if not self._number(0, 3):
            population = members.population.resume()
            members = replace(members, population=population, finished=[False] * count)
        self._add(members)

    async def clear_caches(self) -> None:
        """Free the engine's cached prefixes, if it has any, and drop the oldest population."""
        if Capability.PREFIX_CACHE in self.lm.capabilities:
            await self.lm.aclear_kv_cache()
        self._all = self._all[-_POPULATIONS + 1 :]

    # -- requests ---------------------------------------------------------------------

    async def request_rows(self) -> None:
        """Request the rows of some members."""
        members = self._some(self._members())
        self._check_rows(members, await members.population.next_token_logprobs())

    async def request_beside_a_cancelled_draw(self) -> None:
        """Request rows of a population and of single sequences, and cancel a draw."""
        members, other, third = (self._members() for _ in range(3))
        singles = self._some(other)
        cancelled = asyncio.ensure_future(third.population.draw(seed=0))
        rows = asyncio.gather(
            members.population.next_token_logprobs(),
            *map(self.lm.next_token_logprobs, singles.population),
        )
        for _ in range(self._number(0, 8)):
            await asyncio.sleep(0)
        cancelled.cancel()
        rows_of_members, *single_rows = await rows
        await asyncio.gather(cancelled, return_exceptions=True)
        self._check_rows(members, rows_of_members)
        self._check_rows(singles, single_rows)

    async def extend_a_context(self) -> None:
        """Request the row of the last context, or of a member, extended by some tokens."""
        members, context = self._members(with_room=2), self._context
        if context is None or len(context) + 2 > self.fixture.max_length:
            context = members.population[self._number(0, len(members.sequences))]
        self._context = context = context.extend(self._tokens(self._number(1, 3)))
        row = await context.next_token_logprobs()
        name = context.lora_name
        self.fixture.check_row(row, context.token_ids, name, program=self.calls)

    async def reduce(self) -> None:
        """Request log-probabilities of tokens, the most likely tokens, and masses."""
        members, size = self._some(self._members()), self.lm.vocab_size
        population, rows = members.population, self._rows(members)
        ids = self._generator.integers(0, size, (len(rows), 3))
        logprobs = await population.token_logprobs(ids)
        self._check(logprobs, rows.gather(1, torch.from_numpy(ids)))
        k = self._number(1, min(size, 6) + 1)
        top, largest = await population.top_tokens(k), rows.topk(k).values
        self._check(top.logprobs, largest)
        self._check(rows.gather(1, top.token_ids), largest)
        allowed = self._numbers(size, 8)
        masses = rows[:, sorted(set(allowed))].logsumexp(1)
        masses[torch.tensor(members.finished)] = 0.0
        self._check(await population.log_mass(Mask(allowed, size)), masses)

    async def draw(self) -> None:
        """Draw a token of each member, and extend the members by the tokens."""
        members = self._members(with_room=1)
        self._add(members.extended(await self._draw(members)))

    async def draw_of_some(self) -> None:
        """Draw tokens of some members, while the others wait."""
        members = self._members(with_room=1)
        count = len(members.sequences)
        indices = sorted({*self._numbers(count, count)})
        token_ids = torch.full((count,), -1)
        token_ids[indices] = await self._draw(members.of(indices))
        self._add(members.extended(token_ids))

    async def draw_several(self) -> None:
        """Draw several tokens of each member without replacement."""
        members, seed = self._some(self._members()), self._number(0, 2**32)
        settings = self._settings(members, has_limits=False)
        drawn = await members.population.draw_without_replacement(
            min(3, self.lm.vocab_size), **settings, seed=seed
        )
        seeds = stream_seeds(seed, len(members.sequences))
        for member, sequence in enumerate(members.sequences):
            oracle = self._oracle(members, settings, member, sequence)
            uniform: float | None = stream_uniform(seeds[member], members.step)
            for place, token_id in enumerate(drawn.token_ids[member].tolist()):
                if members.finished[member] or oracle.is_impossible:
                    self._expect(token_id, -1)
                    continue
                self._check(drawn.logprobs[member, place], oracle.row[token_id])
                logprob = float(drawn.draw_logprob[member, place])
                oracle.check(token_id, uniform, logprob, program=self.calls)
                oracle, uniform = oracle.without(token_id), None

    async def sample(self) -> None:
        """Draw continuations of up to three tokens, which the members are extended by."""
        members, seed = self._members(with_room=3), self._number(0, 2**32)
        settings, count = self._settings(members), len(members.sequences)
        limits, stop = self._numbers(4, count), self._tokens(2)
        sampled = await members.population.sample(limits, stop=stop, **settings, seed=seed)
        seeds, finished = stream_seeds(seed, count), list(members.finished)
        for member, sequence in enumerate(members.sequences):
            for place, token_id in enumerate(sampled.token_ids[member].tolist()):
                oracle = self._oracle(members, settings, member, sequence)
                if finished[member] or place >= limits[member] or oracle.is_impossible:
                    self._expect(token_id, -1)
                    continue
                self._check(sampled.logprobs[member, place], oracle.row[token_id])
                uniform = stream_uniform(seeds[member], members.step + place)
                logprob = float(sampled.draw_logprob[member, place])
                oracle.check(token_id, uniform, logprob, program=self.calls)
                sequence += (token_id,)  # noqa: PLW2901
                finished[member] = token_id in stop
        extended = members.extended(sampled.token_ids, sampled.population)
        self._add(replace(extended, finished=finished))

    async def score(self) -> None:
        """Score continuations, by default and with settings of draws; they may be continued."""
        members = self._members(with_room=3)
        ids, settings = self._continuations(members, 3), self._settings(members)
        scores = await members.population.score(ids)
        scores_of_draws = await members.population.score(ids, **settings)
        for member, sequence in enumerate(members.sequences):
            for place, token_id in enumerate(ids[member].tolist()):
                if token_id < 0:
                    self._expect(float(scores[member, place]), 0.0)
                    self._expect(float(scores_of_draws[member, place]), 0.0)
                    continue
                oracle = self._oracle(members, settings, member, sequence)
                self._check(scores[member, place], oracle.row[token_id])
                if not oracle.is_impossible:
                    logprob = float(scores_of_draws[member, place])
                    oracle.check_logprob(token_id, logprob, program=self.calls)
                sequence += (token_id,)  # noqa: PLW2901
        if self._number(0, 2):
            self._add(members.extended(ids))

    # -- arguments --------------------------------------------------------------------

    def _number(self, begin: int, end: int) -> int:
        return int(self._generator.integers(begin, end))

    def _numbers(self, end: int, count: int) -> list[int]:
        return self._generator.integers(0, end, count).tolist()  # type: ignore[no-any-return]

    def _tokens(self, count: int) -> TokenTuple:
        ids = self.fixture.token_ids
        return tuple(int(ids[i]) for i in self._numbers(len(ids), count))

    def _members(self, *, with_room: int = 0) -> ExpectedMembers:
        """Choose a population, often the last one; truncate members without room for tokens."""
        members = self._all[self._number(0, len(self._all)) if self._number(0, 2) else -1]
        longest = self.fixture.max_length - with_room
        if max(map(len, members.sequences)) <= longest:
            return members
        return members.truncated([longest] * len(members.sequences))

    def _some(self, members: ExpectedMembers) -> ExpectedMembers:
        """Choose distinct members, sometimes all of them."""
        count = len(members.sequences)
        return members.of(sorted({*self._numbers(count, 2 * count)}))

    def _continuations(self, members: ExpectedMembers, width: int) -> np.ndarray[Any, Any]:
        """Return tokens for which the members have room, -1 after the last one of each.

        There are few different tokens, so that members become equal.
        """
        count = len(members.sequences)
        few = self._tokens(3)
        ids = np.array([few[i] for i in self._numbers(3, count * width)]).reshape(count, width)
        room = [self.fixture.max_length - len(token_ids) for token_ids in members.sequences]
        counts = np.minimum(self._numbers(width + 1, count), room)
        ids[np.arange(width) >= counts[:, None]] = -1
        return ids

    def _settings(self, members: ExpectedMembers, *, has_limits: bool = True) -> dict[str, Any]:
        count, size = len(members.sequences), self.lm.vocab_size
        return random_settings(self._generator, count, size, has_limits=has_limits)

    # -- results ----------------------------------------------------------------------

    async def _draw(self, members: ExpectedMembers) -> torch.Tensor:
        """Draw a token of each member, and check all columns of the draws."""
        seed, settings = self._number(0, 2**32), self._settings(members)
        drawn = await members.population.draw(**settings, seed=seed)
        logprobs = await members.population.token_logprobs(drawn.token_ids, **settings)
        self.fixture.check_draws(members, settings, seed, drawn, logprobs, program=self.calls)
        return drawn.token_ids

    def _add(self, members: ExpectedMembers) -> None:
        """Compare a population with its sequences, and keep it."""
        found = [context.token_ids for context in members.population]
        self._expect(found, list(members.sequences))
        self._expect(members.population.finished.tolist(), list(members.finished))
        self._all = [*self._all, members][-_POPULATIONS:]

    def _rows(self, members: ExpectedMembers) -> torch.Tensor:
        expected = self.fixture.expected
        return torch.stack([expected(ids, members.adapter) for ids in members.sequences])

    def _oracle(
        self,
        members: ExpectedMembers,
        settings: dict[str, Any],
        member: int,
        sequence: TokenTuple,
    ) -> DrawOracle:
        """Return the oracle of a draw of a member after a sequence."""
        of_member = settings_of_member(settings, member)
        return self.fixture.draw_oracle(sequence, members.adapter, **of_member)

    def _expect(self, found: Any, expected: Any) -> None:
        expect(found == expected, str(expected), found, program=self.calls)

    def _check(self, found: Any, expected: Any) -> None:
        self.fixture.check_logprobs(found, expected, program=self.calls)

    def _check_rows(self, members: ExpectedMembers, rows: Any) -> None:
        sequences, adapter = members.sequences, members.adapter
        self.fixture.check_rows(rows, sequences, adapter, program=self.calls)
