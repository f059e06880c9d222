"""`ExpectedMembers`: a population, and the sequences that its members should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from genlm import Population
from genlm.testing.strategies import TokenTuple


@dataclass(frozen=True)
class ExpectedMembers:
    """A population, and what its members should be.

    Attributes:
        population: The population.
        sequences: The sequence of each member.
        finished: Whether each member is finished.
        adapter: Name of the adapter of the members.
        step: Number of tokens that the population was extended by.
    """

    population: Population
    sequences: Sequence[TokenTuple]
    finished: Sequence[bool]
    adapter: str | None
    step: int = 0

    def extended(
        self, population: Population, columns: Sequence[Sequence[int]]
    ) -> ExpectedMembers:
        """Return these members after rows of tokens, of which -1 stands for no token."""
        added = [tuple(token_id for token_id in row if token_id >= 0) for row in columns]
        sequences = [a + b for a, b in zip(self.sequences, added, strict=True)]
        step = self.step + len(columns[0])
        return replace(self, population=population, sequences=sequences, step=step)

    def truncated(self, lengths: Sequence[int]) -> ExpectedMembers:
        """Return these members with at most so many tokens each."""
        sequences = [ids[:n] for ids, n in zip(self.sequences, lengths, strict=True)]
        finished = [
            is_finished and ids == token_ids
            for is_finished, ids, token_ids in zip(
                self.finished, sequences, self.sequences, strict=True
            )
        ]
        population = self.population.truncate(lengths)
        return replace(self, population=population, sequences=sequences, finished=finished)

    def of(self, indices: Sequence[int]) -> ExpectedMembers:
        """Return some of the members."""
        return replace(
            self,
            population=self.population[indices],
            sequences=[self.sequences[i] for i in indices],
            finished=[self.finished[i] for i in indices],
        )
