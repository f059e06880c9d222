"""Requests of particles to every contestant of a benchmark, and their arguments.

Imported also where only the peer's packages are installed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from particle_model import VOCAB_SIZE, prompt_of

Clock = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds: elapsed, or those that this process's threads computed."""


def population_arguments(
    description: str | None,
    *,
    particles: Sequence[int],
    prompts: Sequence[int],
    tails: Sequence[int] = (),
    peer: str,
) -> argparse.ArgumentParser:
    """Arguments of a benchmark of populations, with their defaults; `peer` is for the help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--particles", type=int, nargs="+", default=particles)
    parser.add_argument("--prompts", type=int, nargs="+", default=prompts)
    parser.add_argument("--tails", type=int, nargs="*", default=tails)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--peer", type=Path, help=f"a Python with {peer}")
    parser.add_argument("--save", action="store_true")
    return parser


@dataclass(frozen=True)
class Population:
    """Particles that share a prompt and grow by one token a step.

    Attributes:
        count: How many.
        prompt_length: Tokens that all of them share.
        tail_length: Tokens that each of them has of its own before the first step.
        every: Steps from one resampling to the next, 0 for none.
        steps: How many are measured.
        uneven: Whether a random half of them waits at each step, as those do that have
            come to the end of a word before others.
    """

    count: int
    prompt_length: int
    tail_length: int
    every: int
    steps: int
    uneven: bool = False

    def __str__(self) -> str:
        tail = f" tails {self.tail_length}" if self.tail_length else ""
        kind = " resampled" * bool(self.every) + " uneven" * self.uneven
        return f"{self.count}/{self.prompt_length}{tail}{kind}"

    @property
    def prompt(self) -> list[int]:
        """Random ids, always the same."""
        return prompt_of(self.prompt_length)

    def start(self) -> Particles:
        """The particles before the first step, the same for every contestant."""
        return Particles(self)


class Particles:
    """A population on its way.

    Attributes:
        contexts: The token ids of each particle.
        asked: Those of them whose next tokens are wanted.
        parents: Which particle each one continues after the last step, None for itself.
    """

    def __init__(self, population: Population) -> None:
        self._population = population
        self._random = random.Random(3)
        self.contexts = [
            [*population.prompt, *(self._token() for _ in range(population.tail_length))]
            for _ in range(population.count)
        ]
        self.asked = self.contexts
        self.parents: list[int] | None = None

    def grow(self) -> None:
        """Add a token to each that does not wait."""
        self.asked = self.contexts
        if self._population.uneven:
            half = max(1, self._population.count // 2)
            self.asked = self._random.sample(self.contexts, half)
        for context in self.asked:
            context.append(self._token())

    def resample(self, step: int) -> None:
        """Replace them by a random choice among them, where the population says so."""
        every, members = self._population.every, range(self._population.count)
        if not every or step % every != every - 1:
            self.parents = None
            return
        self.parents = sorted(self._random.choices(members, k=len(members)))
        self.contexts = [list(self.contexts[parent]) for parent in self.parents]

    def _token(self) -> int:
        return self._random.randrange(VOCAB_SIZE)
