"""Checks of populations: sequences that are extended, drawn from and copied as arrays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from genlm import AsyncLM, OutputCache, Population
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.expected_members import ExpectedMembers
from genlm.testing.target import TokenTuple

STEPS = 3


def _copies(lm: AsyncLM, prompt: TokenTuple, count: int) -> ExpectedMembers:
    """Create a population of copies of a prompt."""
    return ExpectedMembers.unfinished(lm.population(prompt, count), [prompt] * count)


def _resample_and_extend(
    fixture: EngineFixture, members: ExpectedMembers, seed: int
) -> ExpectedMembers:
    """Resample the members and extend them by up to two tokens."""
    generator, count = np.random.default_rng(seed), len(members.sequences)
    indices = generator.integers(0, count, count)
    fixture.saw("resampled", len(set(indices.tolist())) < count)
    members = members.of(indices)
    width = int(generator.integers(1, 3))
    ids = generator.choice(np.asarray(fixture.token_ids), (count, width))
    for member, token_ids in enumerate(members.sequences):
        room = min(fixture.max_length - len(token_ids), int(generator.integers(0, width + 1)))
        ids[member, room:] = -1
    fixture.saw("several tokens", bool((ids >= 0).all(1).any()) and width > 1)
    fixture.saw("no token", bool((ids < 0).all(1).any()))
    return members.extended(ids if width > 1 else ids[:, 0])


def _check_earlier_populations(fixture: EngineFixture, lm: AsyncLM, prompt: TokenTuple) -> None:
    """Compare populations again after each of their members was extended by a token.

    An engine may then have changed the state of the members instead of a copy. Also compare a
    concatenation with truncated members, and then single requests, for which an engine may have
    kept the state of the members.
    """
    count = fixture.members
    ids = (list(fixture.token_ids) * count)[:count]
    parent = _copies(lm, prompt, count).extended(ids)
    first, second = parent.extended(ids), parent.extended(ids[::-1])
    for members in (parent, first, parent, second, first):
        fixture.check_members(members, how="after other extensions")
    lengths = [len(prompt) + member % 2 for member in range(count)]
    joined = ExpectedMembers.joined([second, first.truncated(lengths).extended(ids)])
    fixture.check_members(joined, how="joined")
    distinct = dict.fromkeys([*first.sequences, *second.sequences])
    longer = [(*token_ids, ids[0]) for token_ids in distinct]
    fixture.check_batch(lm, longer, how="single requests after a concatenation")


def _check_copies_of_few_members(
    fixture: EngineFixture, lm: AsyncLM, prompt: TokenTuple
) -> None:
    """Compare a population that has few members, then many, beside single requests or alone.

    Beside these, its members may be separate queries.
    """
    for others in ([], [prompt] * 2):
        members = _copies(lm, prompt, 1)
        for size in (2, fixture.members, 2):
            copies = members.of(np.arange(size) % len(members.sequences))
            members = copies.extended((list(fixture.token_ids) * size)[:size])
            if size == 2:
                fixture.run(_together(members.population, lm, others))
            fixture.check_members(members, how=f"{size} members, {len(others)} other requests")


async def _together(population: Population, lm: AsyncLM, others: Sequence[TokenTuple]) -> None:
    rows = map(lm.next_token_logprobs, others)
    await asyncio.gather(population.next_token_logprobs(), *rows)


@engine_check()
def populations_equal_lists(fixture: EngineFixture) -> None:
    """Members that are copied and extended as arrays have the rows of their sequences."""
    lm = fixture.load(output_cache=OutputCache(0))
    prompt = fixture.some_sequences(1)[0][: max(1, fixture.max_length - 2 * STEPS)]
    for seed in range(4):  # with these seeds all cases occur
        members = _copies(lm, prompt, fixture.members)
        for step in range(STEPS):
            members = _resample_and_extend(fixture, members, seed + step)
            if (seed + step) % 3 == 0:  # the next extension then skips a computed step
                continue
            fixture.check_members(members, prompt=prompt, seed=seed, step=step)
    _check_earlier_populations(fixture, lm, prompt)
    _check_copies_of_few_members(fixture, lm, prompt)


@engine_check()
def population_draws_are_those_of_the_seed(fixture: EngineFixture) -> None:
    """Seed, index of the member and step determine a draw, with masks and temperatures.

    Scores with the same settings are the log-probabilities of the draws.
    """
    lm = fixture.load(output_cache=OutputCache(0))
    ids = np.asarray(fixture.token_ids)
    for number, token_ids in enumerate(fixture.some_sequences(3)):
        prompt = token_ids[: max(1, fixture.max_length - 2)]
        generator = np.random.default_rng([fixture.seed, number])
        masks = np.zeros((3, lm.vocab_size), bool)  # the last allows no token
        masks[0, generator.choice(ids, 8)] = True
        masks[1, ids] = True
        index = generator.permutation([0, 1, 2, 0, 1, 1, 0, 1] * 2)
        seed = fixture.seed + number
        finished = np.arange(len(index)) == np.flatnonzero(index == 1)[0]
        members = _copies(lm, prompt, len(index)).finish(finished)
        settings: dict[str, Any] = {"masks": masks, "mask_index": index}
        settings["temperature"] = generator.uniform(0.5, 2, len(index))
        for _ in range(2):
            drawn = fixture.run(members.population.draw(**settings, seed=seed))
            columns = drawn.token_ids[:, None]
            scores = fixture.run(members.population.score(columns, **settings))
            fixture.check_draws(members, settings, seed, drawn, scores[:, 0])
            members = members.extended(drawn.token_ids)
        draws = fixture.run(lm.population(prompt, 64).draw(masks[1], seed=number))
        differ = len(set(draws.token_ids.tolist())) > 1
        expect(differ, "different draws of 64 copies", draws.token_ids)


@engine_check()
def populations_share_the_engine(fixture: EngineFixture) -> None:
    """Populations and other requests that run or are cancelled together do not interfere."""
    lm, probe = fixture.load_probed(output_cache=OutputCache(0))
    first, second, *others = fixture.some_sequences(5)
    ids = list(fixture.token_ids)[:3] * -(-fixture.members // 3)
    prompts = [token_ids[: fixture.max_length - 1] for token_ids in (first, second)]
    populations = [_copies(lm, prompt, len(ids)).extended(ids) for prompt in prompts]
    requests: list[Any] = [each.population.next_token_logprobs() for each in populations]
    requests += map(lm.next_token_logprobs, others)
    first_rows, second_rows, *rows = fixture.gather(requests)
    fixture.check_rows(first_rows, populations[0].sequences, how="together")
    fixture.check_rows(second_rows, populations[1].sequences, how="together")
    fixture.check_rows(rows, others, how="together")

    async def cancel_a_population() -> None:
        async with probe.held(lm.next_token_logprobs(others[0])) as (busy,):
            task = asyncio.ensure_future(lm.population(second, len(ids)).next_token_logprobs())
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        fixture.saw("cancelled", task.cancelled())
        fixture.check_row(await busy, others[0], how="beside a cancelled population")

    fixture.run(cancel_a_population())
    last_ids = [ids[i % len(ids)] for i in range(40)]
    members = _copies(lm, prompts[0], len(last_ids)).extended(last_ids)
    fixture.check_members(members, how="after a cancelled population")
    pending = lm.statistics().pending
    expect(pending == 0, "nothing pending", pending)


def check_populations_in_turns(
    fixture: EngineFixture, lm: AsyncLM, salt: int, **example: Any
) -> None:
    """Compare populations of several prompts that are resampled and extended in turns."""
    prompts = [
        token_ids[: max(1, fixture.max_length - 2 * STEPS)]
        for token_ids in fixture.some_sequences(3, salt=100 + salt)
    ]
    populations = [_copies(lm, prompt, fixture.members) for prompt in prompts]
    for step in range(STEPS):
        for number, members in enumerate(populations):
            seed = 1000 * salt + 10 * step + number
            populations[number] = _resample_and_extend(fixture, members, seed)
            fixture.check_members(populations[number], seed=seed, **example)
