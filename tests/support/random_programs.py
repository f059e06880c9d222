"""Random programs on populations, contexts and texts, compared with an oracle."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import genlm

Oracle = Callable[..., torch.Tensor]
"""Function of the ids of one sequence and an adapter, which returns the row of the sequence."""

Row = Callable[[Sequence[int]], torch.Tensor]

MEMBERS = 6


def run_programs(
    llm: genlm.AsyncLM,
    oracle: Oracle,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    steps: int = 20,
    tolerance: float = 1e-4,
    most_tokens: int = 60,
    adapters: Sequence[str | None] = (None,),
) -> None:
    """Run a program for each prompt, all of them concurrently.

    Args:
        llm: The model.
        oracle: Its rows.
        prompts: A prompt for each program.
        seed: Seed of the programs.
        steps: Number of actions of each program.
        tolerance: Maximum error of a log-probability.
        most_tokens: Maximum number of tokens of a sequence.
        adapters: Adapters that the programs use in turn.
    """

    @functools.cache
    def row(adapter: str | None, token_ids: tuple[int, ...]) -> torch.Tensor:
        found = oracle(token_ids) if adapter is None else oracle(token_ids, adapter)
        return found[: llm.vocab_size].double()

    async def run_all() -> None:
        programs = [
            _Program(
                llm,
                functools.partial(row, adapters[i % len(adapters)]),
                tuple(prompt),
                adapters[i % len(adapters)],
                random.Random(100 * seed + i),
                tolerance,
                most_tokens,
            )
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(program.run(steps) for program in programs))

    asyncio.run(run_all())
    assert llm.statistics().pending == 0


class _Weights(NamedTuple):
    """Masks, temperatures and biases of the members of a population."""

    options: dict[str, Any]
    masks: torch.Tensor
    temperature: float
    bias: torch.Tensor

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities plus biases, `-inf` outside the masks."""
        return (rows + self.bias).masked_fill(~self.masks, -torch.inf)


class _Program:
    """A population and a context that grow by random actions, whose results are checked."""

    def __init__(
        self,
        llm: genlm.AsyncLM,
        row: Row,
        prompt: tuple[int, ...],
        adapter: str | None,
        generator: random.Random,
        tolerance: float,
        most_tokens: int,
    ) -> None:
        self._llm, self._row, self._adapter = llm, row, adapter
        self._random, self._tolerance, self._most_tokens = generator, tolerance, most_tokens
        self._population = llm.population(prompt, MEMBERS, lora_name=adapter)
        self._earlier = [self._population]
        self._context = llm.context(prompt[:-1] or prompt, lora_name=adapter)
        self._actions = [self._grow, self._draw, self._wait, self._propose, self._begin]
        self._actions += [self._sample, self._columns, self._extend_context, self._cancel]
        if genlm.Capability.SCORE in llm.capabilities:
            self._actions.append(self._score)

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            if int(self._population.lengths.max()) + 6 > self._most_tokens:
                self._population = self._random.choice(self._earlier[:3])
            await self._random.choice(self._actions)()
            self._earlier.append(self._population)

    # -- actions ----------------------------------------------------------------------

    async def _grow(self) -> None:
        """Extend and resample; request the rows of some members."""
        width = self._random.choice([1, 1, 1, 2, 5])
        members = self._random.choices(range(len(self._population)), k=MEMBERS)
        if self._random.random() < 0.6:
            members = list(range(len(self._population)))
        self._population = self._population[members].extend(self._tokens(len(members), width))
        population = self._random.choice([self._population, self._random.choice(self._earlier)])
        await self._check_rows(self._some(population))

    async def _draw(self) -> None:
        """Draw under masks, temperatures and biases, and extend by the tokens."""
        weights = self._weights(len(self._population))
        drawn = await self._population.draw(
            **weights.options, temperature=weights.temperature, seed=self._random.randrange(99)
        )
        self._check_drawn(self._population, drawn, weights)
        self._population = self._population.extend(drawn.token_ids)

    async def _wait(self) -> None:
        """Draw tokens of some members, while the others wait."""
        count = len(self._population)
        active = sorted(self._random.sample(range(count), self._random.randint(1, count)))
        drawn = await self._population[active].draw(seed=self._random.randrange(99))
        token_ids = torch.full((count,), -1)
        token_ids[active] = drawn.token_ids
        self._population = self._population.extend(token_ids)

    async def _propose(self) -> None:
        """Replace members by truncations that were extended otherwise."""
        now = self._population
        lengths = [self._random.randint(1, length) for length in now.lengths.tolist()]
        proposed = now.truncate(lengths).extend(self._tokens(len(now), 2))
        chosen = self._random.choices(range(2 * len(now)), k=MEMBERS)
        self._population = genlm.Population.cat([now, proposed])[chosen]
        await self._check_rows(self._population)

    async def _begin(self) -> None:
        """Begin a population of contexts and lists, and request its rows."""
        members: list[Any] = list(self._some(self._population))
        members.append(list(members[0].token_ids) if self._adapter is None else members[0])
        members.append(self._context)
        population = self._llm.population(members, lora_name=self._adapter)
        await self._check_rows(population.extend(self._tokens(len(members), 1)))
        self._population = population

    async def _sample(self) -> None:
        """Draw several tokens of each member, which end at some tokens."""
        population, stop = self._population, self._random.choice([(), (3, 4)])
        sampled = await population.sample(
            self._random.randint(1, 4), stop=stop, seed=self._random.randrange(99)
        )
        columns = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        for context, ids, logprobs in zip(population, *columns, strict=True):
            drawn = [token_id for token_id in ids if token_id >= 0]
            self._check_continuation(context.token_ids, drawn, logprobs[: len(drawn)])
        await self._check_rows(self._llm.population([*sampled.population]))
        self._population = population.extend(sampled.token_ids)

    async def _columns(self) -> None:
        """Request other reductions of the rows of some members."""
        population = self._some(self._population)
        rows, count = self._rows(population), len(population)
        top = await population.top_tokens(3)
        self._check(top.logprobs, rows.topk(3).values)
        token_ids = torch.from_numpy(self._tokens(count, 2)).clamp(min=3)
        self._check(await population.token_logprobs(token_ids), rows.gather(1, token_ids))
        weights = self._weights(count)
        mass = await population.log_mass(**weights.options)
        scores = weights.scores(rows)
        self._check(mass, scores.logsumexp(1))
        several = await population.draw_without_replacement(2, **weights.options, seed=1)
        for k in range(2):
            ids = several.token_ids[:, k]
            is_left = ids >= 0
            places = is_left.nonzero()[:, 0], ids[is_left]
            share = scores[places] - scores.logsumexp(1)[is_left]
            self._check(several.draw_logprob[:, k][is_left], share)
            scores[places] = -torch.inf

    async def _score(self) -> None:
        """Score continuations of members, which may be continued, and a whole text."""
        population = self._population
        room = self._most_tokens + 3 - int(population.lengths.max())
        added = np.abs(
            self._tokens(len(population), min(room, self._random.choice([1, 3, 10])))
        )
        scores = await population.score(added)
        for context, ids, logprobs in zip(
            population, added.tolist(), scores.tolist(), strict=True
        ):
            self._check_continuation(context.token_ids, ids, logprobs)
        if self._random.random() < 0.5 and added.shape[1] < room - 3:
            self._population = population.extend(added)
        first, *text = [*self._random.choice(population).token_ids, 5]
        text_scores = await self._llm.score([first, *text], lora_name=self._adapter)
        self._check_continuation((first,), text, text_scores.tolist()[-len(text) :])

    async def _extend_context(self) -> None:
        """Request the row of a context that extends the last one or a member."""
        if self._random.random() < 0.3 or len(self._context) + 3 > self._most_tokens:
            self._context = self._random.choice(self._population)
        [ids] = np.abs(self._tokens(1, self._random.choice([1, 1, 3]))).tolist()
        self._context = self._context.extend(ids)
        row = await self._context.next_token_logprobs()
        self._check(row, self._row(self._context.token_ids))

    async def _cancel(self) -> None:
        """Cancel requests of an extended population after some turns of the event loop."""
        proposed = self._population.extend(self._tokens(len(self._population), 1))
        requests = proposed.next_token_logprobs(), self._population.sample(3, seed=0)
        tasks = [asyncio.ensure_future(request) for request in requests]
        for _ in range(self._random.randrange(12)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._population = self._random.choice([self._population, proposed])

    # -- choices ----------------------------------------------------------------------

    def _some(self, population: genlm.Population) -> genlm.Population:
        count = self._random.randint(1, len(population))
        return population[sorted(self._random.sample(range(len(population)), count))]

    def _tokens(self, count: int, width: int) -> np.ndarray[Any, Any]:
        """Return few different tokens, so that members become equal and differ again."""
        choices = [3, 4, self._random.randrange(3, self._llm.vocab_size), -1]
        ids = [[self._random.choice(choices) for _ in range(width)] for _ in range(count)]
        return np.array(ids)

    def _weights(self, count: int) -> _Weights:
        size = self._llm.vocab_size
        generator = np.random.default_rng(self._random.randrange(999))
        masks = generator.random((3, size)) < 0.3
        masks[0] = masks[1] & (generator.random(size) < 0.01)  # sometimes empty
        index = generator.integers(0, 3, count)
        options: dict[str, Any] = {"masks": masks, "mask_index": index}
        if self._random.random() < 0.3:
            options = {"masks": masks[index]}
        bias = np.zeros((count, size), np.float32)
        if self._random.random() < 0.5:
            bias = generator.normal(size=(count, size)).astype(np.float32)
            bias[:, ::5] = -np.inf
            options["bias"] = bias
        temperature = self._random.choice([1.0, 1.0, 0.5, 0.0])
        allowed = torch.from_numpy(masks[index])
        return _Weights(options, allowed, temperature, torch.from_numpy(bias).double())

    # -- checks -----------------------------------------------------------------------

    def _rows(self, population: genlm.Population) -> torch.Tensor:
        return torch.stack([self._row(context.token_ids) for context in population])

    async def _check_rows(self, population: genlm.Population) -> None:
        self._check(await population.next_token_logprobs(), self._rows(population))

    def _check_continuation(
        self, token_ids: Sequence[int], added: list[int], logprobs: list[float]
    ) -> None:
        sequence, expected = tuple(token_ids), []
        for token_id in added:
            expected.append(float(self._row(sequence)[token_id]))
            sequence = (*sequence, token_id)
        self._check(torch.tensor(logprobs), torch.tensor(expected))

    def _check_drawn(self, population: genlm.Population, drawn: Any, weights: _Weights) -> None:
        rows = self._rows(population)
        scores = weights.scores(rows)
        mass = scores.logsumexp(1)
        self._check(drawn.log_mass, mass)
        lives = mass > -torch.inf
        assert torch.equal(drawn.token_ids >= 0, lives)
        places = torch.arange(int(lives.sum())), drawn.token_ids[lives]
        self._check(drawn.logprobs[lives], rows[lives][places])
        scores = scores[lives]
        if weights.temperature == 0:
            self._check(scores[places], scores.amax(1))
        else:
            shares = (scores / weights.temperature).log_softmax(1)
            self._check(drawn.draw_logprob[lives], shares[places], scale=4)

    def _check(self, found: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
        tolerance = scale * self._tolerance
        torch.testing.assert_close(
            found.cpu().double(), expected.double(), rtol=0, atol=tolerance
        )
