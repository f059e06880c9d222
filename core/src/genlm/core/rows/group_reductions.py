"""Reductions of the rows of a population, whose results are columns."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.forking import cached_property
from genlm.core.queries.generations import Integers64, is_identity
from genlm.core.queries.query import GroupReduction
from genlm.core.rows.device_rows import draw_on_device, has_kernels
from genlm.core.rows.draws import (
    DrawnTokens,
    batch_draw,
    batch_draw_logprobs,
    batch_draw_without_replacement,
    batch_log_mass,
    draw_from_logits,
)
from genlm.core.rows.logits import main_memory, moved
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.selection import batch_top_k


class Rows(GroupReduction):
    """The rows themselves: one column, shape `(n, vocab_size)`, on the engine's device."""

    stays_on_device = True

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Select the row of each member; a view, which is then copied, if all are in order."""
        del members
        if is_identity(row_of.numpy(), len(rows)):
            return (rows,)
        return (rows[moved(row_of, rows.device)],)


class JoinableReduction(GroupReduction):
    """A reduction of which one object can have the members of several groups."""

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """Number of members."""

    @property
    @abc.abstractmethod
    def joining_key(self) -> Hashable:
        """Equal for objects that `joined` combines; None for those that it does not."""

    @classmethod
    @abc.abstractmethod
    def joined(cls, reductions: Sequence[Self]) -> Self:
        """Return the reduction of the members of several groups with equal `joining_key`."""


class ScoreColumns(JoinableReduction):
    """The score of one token of each member: the columns of `TokenScores`.

    Args:
        token_ids: Shape `(n,)`, int64, in main memory.
    """

    joining_key = "scores"

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self.token_ids)

    @classmethod
    def joined(cls, reductions: Sequence[ScoreColumns]) -> ScoreColumns:
        """Return the scores of the members of several groups."""
        return cls(torch.cat([each.token_ids for each in reductions]))

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the tokens, and compare them with the largest entries."""
        places = moved(row_of, rows.device)
        logprobs = rows[places, moved(self.token_ids[members], rows.device)]
        return logprobs, logprobs >= rows.amax(-1)[places]

    def of(self, members: Integers64) -> ScoreColumns:
        """Return the scores of some members."""
        return ScoreColumns(self.token_ids[members])


class TokenColumns(JoinableReduction):
    """The log-probabilities of some tokens: one column, shape `(n, k)`, float32.

    Args:
        token_ids: Shape `(n, k)`, int64, in main memory; -1 for no token, which gives 0.
    """

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self.token_ids)

    @property
    def joining_key(self) -> Hashable:
        """Equal for equal numbers of tokens."""
        return self.token_ids.shape[1]

    @classmethod
    def joined(cls, reductions: Sequence[TokenColumns]) -> TokenColumns:
        """Return the log-probabilities of the members of several groups."""
        return cls(torch.cat([each.token_ids for each in reductions]))

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the tokens of all members in one operation."""
        ids = moved(self.token_ids[members], rows.device)
        logprobs = rows[moved(row_of, rows.device)[:, None], ids.clamp(min=0)]
        return (logprobs.masked_fill(ids < 0, 0.0),)

    def of(self, members: Integers64) -> TokenColumns:
        """Return the log-probabilities of some members."""
        return TokenColumns(self.token_ids[members])


class TopColumns(JoinableReduction):
    """The `k` most likely tokens: log-probabilities and ids, both of shape `(n, k)`."""

    def __init__(self, k: int, count: int) -> None:
        self.k = k
        self._count = count

    @property
    def count(self) -> int:
        """Number of members."""
        return self._count

    @property
    def joining_key(self) -> Hashable:
        """Equal for equal numbers of tokens."""
        return self.k

    @classmethod
    def joined(cls, reductions: Sequence[TopColumns]) -> TopColumns:
        """Return the tokens of the members of several groups."""
        return cls(reductions[0].k, sum(each.count for each in reductions))

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Select the tokens of each distinct row once."""
        del members
        logprobs, token_ids = batch_top_k(rows, self.k)
        places = moved(row_of, rows.device)
        return logprobs[places], token_ids[places]

    def of(self, members: Integers64) -> TopColumns:
        """Return the tokens of some members."""
        return TopColumns(self.k, len(members))


class _WeightSets(NamedTuple):
    """The distinct sets of weights of some members."""

    weights: RowWeights
    """A row for each distinct set."""
    sources: torch.Tensor | None
    """The row of log-probabilities or logits of each set; None if set i has row i."""
    set_of: torch.Tensor | None
    """The set of each member; None if member i has set i."""


class _WeightedReduction(JoinableReduction):
    """A reduction of weights: rows under masks, temperature and bias."""

    def __init__(self, weights: RowWeights) -> None:
        self.weights = weights

    @property
    def count(self) -> int:
        """Number of members."""
        return self.weights.count

    @property
    def joining_key(self) -> Hashable:
        """Equal for reductions that `joined` combines; None for those that it does not."""
        return self.weights.joining_key

    def _weight_sets(
        self, count: int, row_of: torch.Tensor, members: torch.Tensor
    ) -> _WeightSets:
        """Return the distinct sets of weights of members of `count` rows."""
        weights = self.weights.of(members.numpy())
        if is_identity(row_of.numpy(), count):
            return _WeightSets(weights, None, None)
        first, set_of = weights.distinct(row_of.numpy())
        sources = row_of[torch.from_numpy(first)]
        return _WeightSets(
            weights.of(first),
            None if is_identity(sources.numpy(), count) else sources,
            torch.from_numpy(set_of),
        )

    def _draw_on_device(
        self,
        logits: torch.Tensor,
        row_of: torch.Tensor,
        members: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> DrawnTokens | None:
        """Draw for each member by kernels, into main memory; None if a row is invalid."""
        sets = self._weight_sets(len(logits), row_of, members)
        columns = draw_on_device(
            logits, uniforms, sets.weights, row_of=sets.set_of, sources=sets.sources
        )
        drawn = DrawnTokens(*main_memory(columns))
        return None if drawn.logprobs.isnan().any() else drawn


class MassColumns(_WeightedReduction):
    """The log of the mass of allowed tokens: one column, shape `(n,)`, float32."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Sum each distinct set of weights once."""
        sets = self._weight_sets(len(rows), row_of, members)
        log_mass = batch_log_mass(rows, sets.weights, sets.sources)
        if sets.set_of is None:
            return (log_mass,)
        return (log_mass[moved(sets.set_of, rows.device)],)

    def compute_from_logits(
        self, logits: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        """Sum weights on a GPU."""
        if not has_kernels(logits, self.weights):
            return None
        zeros = torch.zeros(len(members), dtype=torch.float64, device="cpu")
        drawn = self._draw_on_device(logits, row_of, members, zeros)
        return None if drawn is None else (drawn.log_mass,)

    @classmethod
    def joined(cls, reductions: Sequence[MassColumns]) -> MassColumns:
        """Return the masses of the members of several groups."""
        return cls(RowWeights.joined([each.weights for each in reductions]))

    def of(self, members: Integers64) -> MassColumns:
        """Return the masses of some members."""
        return MassColumns(self.weights.of(members))


class DrawLogprobColumns(_WeightedReduction):
    """The log-probabilities with which tokens are drawn, and the log-mass of each member.

    Args:
        weights: Masks, temperatures, biases and limits of each member.
        token_ids: Shape `(n, k)`, int64, in main memory; -1 for no token, which gives 0.
    """

    def __init__(self, weights: RowWeights, token_ids: torch.Tensor) -> None:
        super().__init__(weights)
        self.token_ids = token_ids

    @property
    def joining_key(self) -> Hashable:
        """Equal for reductions that `joined` combines; None for those that it does not."""
        key = super().joining_key
        return None if key is None else (self.token_ids.shape[1:], key)

    @classmethod
    def joined(cls, reductions: Sequence[DrawLogprobColumns]) -> DrawLogprobColumns:
        """Return the log-probabilities of several groups with equal `joining_key`."""
        weights = RowWeights.joined([each.weights for each in reductions])
        return cls(weights, torch.cat([each.token_ids for each in reductions]))

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute each distinct set of weights once, and gather the tokens of each member."""
        sets = self._weight_sets(len(rows), row_of, members)
        weights, set_of, sources = sets.weights, sets.set_of, sets.sources
        token_ids = self.token_ids[members]
        if set_of is None:
            return batch_draw_logprobs(rows, token_ids, weights, sources=sources)
        set_of, order = set_of.sort()
        columns = batch_draw_logprobs(
            rows, token_ids[order], weights, row_of=set_of, sources=sources
        )
        places = order.argsort().to(rows.device)
        return tuple(column[places] for column in columns)

    def of(self, members: Integers64) -> DrawLogprobColumns:
        """Return the log-probabilities of some members."""
        return DrawLogprobColumns(self.weights.of(members), self.token_ids[members])


class DrawColumns(_WeightedReduction):
    """A token for each member, or several different ones: the columns of `DrawnTokens`.

    Args:
        weights: Masks, temperatures, biases and limits of each member.
        uniforms: Random numbers in [0, 1): shape `(n,)` for `batch_draw`, `(n, k)` for
            `batch_draw_without_replacement`. Or a function that returns them, which is called
            when they are needed.
    """

    def __init__(
        self,
        weights: RowWeights,
        uniforms: npt.NDArray[np.float64] | Callable[[], npt.NDArray[np.float64]],
    ) -> None:
        super().__init__(weights)
        self._numbers = uniforms

    @cached_property
    def uniforms(self) -> npt.NDArray[np.float64]:
        """The random numbers."""
        numbers = self._numbers
        return numbers() if callable(numbers) else numbers

    @property
    def joining_key(self) -> Hashable:
        """Equal for draws that `joined` combines; None for those that it does not."""
        key = super().joining_key
        return None if key is None else (self.uniforms.shape[1:], key)

    @classmethod
    def joined(cls, reductions: Sequence[DrawColumns]) -> DrawColumns:
        """Return the draws of the members of several groups, which have equal `joining_key`."""
        weights = RowWeights.joined([each.weights for each in reductions])
        return cls(weights, np.concatenate([each.uniforms for each in reductions]))

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute each distinct set of weights once, and draw for each member."""
        uniforms = torch.from_numpy(self.uniforms[members.numpy()])
        if uniforms.ndim > 1:  # the weights of each member change with its tokens
            weights = self.weights.of(members.numpy())
            sources = None if is_identity(row_of.numpy(), len(rows)) else row_of
            return batch_draw_without_replacement(rows, uniforms, weights, sources)
        sets = self._weight_sets(len(rows), row_of, members)
        weights, set_of, sources = sets.weights, sets.set_of, sets.sources
        if set_of is None or (set_of[1:] >= set_of[:-1]).all():
            return batch_draw(rows, uniforms, weights, row_of=set_of, sources=sources)
        set_of, order = set_of.sort()
        drawn = batch_draw(rows, uniforms[order], weights, row_of=set_of, sources=sources)
        places = order.argsort().to(rows.device)
        return tuple(column[places] for column in drawn)

    def compute_from_logits(
        self, logits: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        """Draw on a GPU with any weights that have kernels, else from one softmax."""
        uniforms = torch.from_numpy(self.uniforms[members.numpy()])
        if uniforms.ndim > 1:
            if not is_identity(
                row_of.numpy(), len(logits)
            ):  # more rows, which `compute` divides
                return None
        elif has_kernels(logits, self.weights):
            return self._draw_on_device(logits, row_of, members, uniforms)
        if not self.weights.are_masked_probabilities(logits.shape[1]):
            return None
        if self.weights.masks is None:
            return draw_from_logits(logits, uniforms, row_of)
        sets = self._weight_sets(len(logits), row_of, members)
        if sets.sources is not None:  # several masks of a row, which `compute` divides
            return None
        return draw_from_logits(logits, uniforms, row_of, sets.weights.masks)

    def of(self, members: Integers64) -> DrawColumns:
        """Return the draws of some members."""
        return DrawColumns(self.weights.of(members), self.uniforms[members])
