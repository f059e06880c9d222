"""How long does a step of many particle filters take, each with a few particles?

A program that runs a filter for each of many prompts, such as those of a data set, has one
population for each filter if it calls `steer` concurrently, and one population of all particles
if it calls `batch_steer`. Contestants:

- `one filter`: `steer` with one prompt and as many particles as all filters have together, the
  limit of what filters with different prompts can reach.
- `batch`: `batch_steer`.
- `own loop`: a loop of the program's own over one population of all particles, with
  `batch_resampled` and, if there are languages, `Constraint.cat`.
- `concurrent`: `asyncio.gather` of `steer` for each prompt.

Prompts have 20 to 60 tokens. A potential makes the weights unequal, so that filters are
resampled. In the cases `automaton` and `automata`, words have at most eight letters, by one
regular expression for all filters or a different one for each.

Figures are the CPU time of all threads in microseconds per particle and step, after the prompts
were computed. All contestants run in turn in every round; the ratio is the time of `concurrent`
by a contestant's in the same round, the median over rounds. Model: a Llama with random weights
and 8,000 ids, of 31 million parameters or, with `--tiny`, one that costs nearly nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from particle_model import VOCAB_SIZE, save_model
from particle_population import CLOCKS, Clock
from report import in_turn, print_cases

import genlm
from genlm.constraints import Automaton, Constraint
from genlm.smc import batch_resampled, batch_steer, steer

SEED, STEPS = 5, 24


def potential(population: genlm.Population) -> np.ndarray:
    """Log-potentials that differ, from the last tokens."""
    return (population.last_tokens.numpy() % 7) / 3.0


def words(letters: int) -> Automaton:
    """Texts of words of at most so many letters."""
    return Automaton.regex(rf"([a-z]{{0,{letters}}}[^a-z])*[a-z]{{0,{letters}}}")


class Filters:
    """Filters of as many particles, one for each prompt."""

    def __init__(self, llm: genlm.AsyncLM, count: int, size: int, form: str) -> None:
        generator = random.Random(SEED)
        self.llm, self.count, self.size = llm, count, size
        self.prompts = [
            [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(20, 60))]
            for _ in range(count)
        ]
        self.languages: Any = {
            "free": [None] * count,
            "automaton": [words(8)] * count,
            "automata": [words(3 + number) for number in range(count)]
            if form == "automata"
            else None,
        }[form]
        self.options: dict[str, Any] = {
            "max_tokens": STEPS,
            "potential": potential,
            "stop": VOCAB_SIZE - 1,
            "resample_below": 0.8,
        }

    @property
    def _has_one_language(self) -> bool:
        return all(language is self.languages[0] for language in self.languages)

    async def one_filter(self) -> None:
        options = self.options | {"constraint": self.languages[0], "seed": SEED}
        size = self.count * self.size
        async for _ in steer(self.llm, self.prompts[0], size, **options):
            pass

    async def batch(self) -> None:
        languages = self.languages[0] if self._has_one_language else self.languages
        options = self.options | {"constraint": languages}
        async for _ in batch_steer(self.llm, self.prompts, self.size, **options, seed=SEED):
            pass

    async def own_loop(self) -> None:
        llm, size, log_weights = self.llm, self.size, np.zeros((self.count, self.size))
        generator = np.random.default_rng(SEED)
        population = llm.population([ids for ids in self.prompts for _ in range(size)])
        constraint = None
        if self.languages[0] is not None:
            constraint = (
                self.languages[0].start(llm, len(population))
                if self._has_one_language
                else Constraint.cat(llm, [each.start(llm, size) for each in self.languages])
            )
        for _ in range(STEPS):
            if constraint is None:
                drawn = await population.draw(seed=SEED)
            else:
                drawn = await constraint.draw(population, seed=SEED)
            log_weights += drawn.log_mass.numpy().reshape(log_weights.shape)
            log_weights -= potential(population).reshape(log_weights.shape)
            population = population.extend(drawn.token_ids)
            log_weights += potential(population).reshape(log_weights.shape)
            ancestors, log_weights = batch_resampled(
                log_weights, generator.random(self.count), 0.8
            )
            population = population[ancestors]
            if constraint is not None:
                constraint = constraint.advance(drawn.token_ids)[ancestors]

    async def concurrent(self) -> None:
        await asyncio.gather(*map(self._filter, range(self.count)))

    async def _filter(self, number: int) -> None:
        options = self.options | {"constraint": self.languages[number], "seed": number}
        async for _ in steer(self.llm, self.prompts[number], self.size, **options):
            pass

    def measure(self, run: Callable[[], Any], clock: Clock) -> float:
        """Microseconds per particle and step."""
        self.llm.clear_kv_cache()
        self.llm.batch_next_token_logprobs_sync(self.prompts)
        start = clock()
        asyncio.run(run())
        return (clock() - start) / (self.count * self.size * STEPS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cases", nargs="*", default=["20/50", "100/10", "250/4"])
    parser.add_argument("--forms", nargs="*", default=["free", "automaton", "automata"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found, clock = {}, CLOCKS[options.clock]
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), VOCAB_SIZE, tiny=options.tiny)
        with genlm.load_model(name, options.engine, output_cache=genlm.OutputCache(0)) as llm:
            for case in options.cases:
                count, size = map(int, case.split("/"))
                for form in options.forms:
                    filters = Filters(llm, count, size, form)
                    contestants = {
                        "one filter": filters.one_filter,
                        "batch": filters.batch,
                        "own loop": filters.own_loop,
                        "concurrent": filters.concurrent,
                    }
                    for run in contestants.values():
                        filters.measure(run, clock)  # compiles languages, allocates
                    label = f"{count} of {size} {form}"
                    found[label] = in_turn(
                        {
                            contestant: functools.partial(filters.measure, run, clock)
                            for contestant, run in contestants.items()
                        },
                        options.rounds,
                        label,
                    )
    print_cases(
        "batch_steer",
        found,
        base="concurrent",
        unit="us a particle and step",
        extra={
            "seed": SEED,
            "clock": options.clock,
            "engine": options.engine,
            "tiny": options.tiny,
            "steps": STEPS,
        },
    )


if __name__ == "__main__":
    main()
