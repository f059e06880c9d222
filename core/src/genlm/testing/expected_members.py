"""`ExpectedMembers`: a population, and the sequences that its members should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from genlm import Population
from genlm.testing.target import TokenTuple


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

    @classmethod
    def unfinished(
        cls,
        population: Population,
        sequences: Sequence[TokenTuple],
        adapter: str | None = None,
    ) -> Self:
        """The members of a new population."""
        return cls(population, sequences, [False] * len(sequences), adapter)

    @classmethod
    def joined(cls, parts: Sequence[ExpectedMembers]) -> Self:
        """The members of several populations of one adapter."""
        return cls(
            Population.cat([part.population for part in parts]),
            [token_ids for part in parts for token_ids in part.sequences],
            [is_finished for part in parts for is_finished in part.finished],
            parts[0].adapter,
            max(part.step for part in parts),
        )

    def extended(
        self, token_ids: npt.ArrayLike | torch.Tensor, population: Population | None = None
    ) -> ExpectedMembers:
        """Return these members after tokens, of which -1 stands for no token.

        Args:
            token_ids: A token of each member, or a row of tokens of each.
            population: The extended population; by default the result of `extend`.
        """
        rows = np.asarray(token_ids).reshape(len(self.sequences), -1).tolist()
        sequences = [
            (*sequence, *(token_id for token_id in row if token_id >= 0))
            for sequence, row in zip(self.sequences, rows, strict=True)
        ]
        if population is None:
            population = self.population.extend(token_ids)
        step = self.step + len(rows[0])
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

    def finish(self, flags: npt.NDArray[np.bool_]) -> ExpectedMembers:
        """Return these members after some of them were marked as finished."""
        finished = (flags | self.finished).tolist()
        return replace(self, population=self.population.finish(flags), finished=finished)

    def of(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> ExpectedMembers:
        """Return some of the members."""
        return replace(
            self,
            population=self.population[indices],
            sequences=[self.sequences[i] for i in indices],
            finished=[self.finished[i] for i in indices],
        )
