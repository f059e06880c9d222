"""Reductions of the rows of a population: columns in, columns out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.draws import batch_draw, batch_draw_without_replacement, batch_log_mass, biases
from genlm.core.errors import EvaluationError
from genlm.core.query import GroupReduction, Reduction
from genlm.core.selection import batch_top_k

if TYPE_CHECKING:
    from genlm.core.generations import Integers64
    from genlm.core.row_masks import RowMasks

__all__ = [
    "DrawColumns",
    "MassColumns",
    "Rows",
    "SeveralDrawColumns",
    "SharedReduction",
    "TokenColumns",
    "TopColumns",
    "WeightColumns",
    "checked_reduction",
]


class Rows(GroupReduction):
    """The rows themselves: one column, shape `(n, vocab_size)`, on the engine's device."""

    stays_on_device = True

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Copy the row of each member."""
        del members
        return (rows[row_of.to(rows.device)],)


class TokenColumns(GroupReduction):
    """The log-probabilities of given tokens: one column, shape `(n, k)`, float32.

    Args:
        token_ids: Shape `(n, k)`, int64, in main memory; -1 for no token, which gives 0.
    """

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the tokens of all members in one operation."""
        ids = self.token_ids[members].to(rows.device)
        found = rows[row_of.to(rows.device)[:, None], ids.clamp(min=0)]
        return (found.masked_fill(ids < 0, 0.0),)


class TopColumns(GroupReduction):
    """The `k` most likely tokens: log-probabilities and ids, both of shape `(n, k)`."""

    def __init__(self, k: int) -> None:
        self.k = k

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Select the tokens of each distinct row once."""
        del members
        logprobs, token_ids = batch_top_k(rows, self.k)
        places = row_of.to(rows.device)
        return logprobs[places], token_ids[places]


class SharedReduction(GroupReduction):
    """A reduction of one row, the same for all members; its results as columns.

    Args:
        reduction: Returns numbers, tensors of one shape, or tuples of these.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Reduce each distinct row once."""
        del members
        if not len(rows):
            return (torch.empty(0),)
        kind = type(self.reduction)
        found = kind.compute(rows, [self.reduction] * len(rows))
        if found and isinstance(found[0], tuple):
            return tuple(_column(each, kind)[row_of] for each in zip(*found, strict=True))
        return (_column(found, kind)[row_of],)


def checked_reduction(reduction: GroupReduction | Reduction) -> GroupReduction:
    """Return a reduction of columns.

    Raises:
        TypeError: Neither a `GroupReduction` nor a `Reduction`.
    """
    if isinstance(reduction, Reduction):
        return SharedReduction(reduction)
    if not isinstance(reduction, GroupReduction):
        raise TypeError(
            f"expected a genlm.GroupReduction or a genlm.Reduction; found {reduction!r}"
        )
    return reduction


def _column(values: Sequence[Any], kind: type) -> torch.Tensor:
    for value in values:
        if isinstance(value, Exception):
            raise value
    if isinstance(values[0], torch.Tensor):
        return torch.stack(list(values)).cpu()
    try:
        return torch.tensor(values)
    except (TypeError, ValueError) as error:
        raise EvaluationError(
            f"{kind.__name__}.compute returned {type(values[0]).__name__} for a row, which is "
            f"no column; return numbers or tensors of one shape, or derive from "
            f"genlm.GroupReduction"
        ) from error


class WeightColumns:
    """What turns the rows of members into the weights that tokens are drawn in proportion to.

    Args:
        masks: The allowed tokens of each member; None for all tokens.
        temperature: A number, or one for each member.
        bias: A number, or numbers of shape `(n,)`, `(vocab_size,)` or `(n, vocab_size)`.
        count: Number of members.
        vocab_size: Number of ids in the vocabulary.

    Raises:
        TypeError: A temperature or bias that is not of numbers.
        ValueError: Another shape, or a temperature that is negative or not finite.
    """

    def __init__(
        self,
        masks: RowMasks | None,
        temperature: npt.ArrayLike | torch.Tensor,
        bias: Any,
        count: int,
        vocab_size: int,
    ) -> None:
        self._masks = masks
        self._temperature = _checked_numbers("temperature", temperature).astype(np.float64)
        if self._temperature.shape not in {(), (count,)}:
            raise ValueError(
                f"temperature has shape {self._temperature.shape}; expected a number or one "
                f"for each of {count} members"
            )
        if not (np.isfinite(self._temperature) & (self._temperature >= 0)).all():
            raise ValueError("a temperature must be finite and not negative")
        if not isinstance(bias, torch.Tensor) or bias.dtype == torch.bool:
            bias = _checked_numbers("bias", bias)
        is_none = isinstance(bias, np.ndarray) and bias.ndim == 0 and bias == 0
        self._bias, self._offset = biases(None if is_none else bias, count, vocab_size)

    @property
    def is_greedy(self) -> bool:
        """Whether some member takes the most likely token."""
        return not self._temperature.all()

    def of(self, members: Integers64) -> WeightColumns:
        """Return the columns of some members."""
        found = object.__new__(WeightColumns)
        found._masks = None if self._masks is None else self._masks.of(members)
        temperature, bias, offset = self._temperature, self._bias, self._offset
        found._temperature = temperature[members] if temperature.ndim else temperature
        found._bias = bias if bias is None or len(bias) == 1 else bias[members]
        found._offset = offset if offset is None or len(offset) == 1 else offset[members]
        return found

    def distinct(self, row_of: Integers64) -> tuple[Integers64, Integers64]:
        """Find the members with distinct sets of weights.

        Args:
            row_of: The row of each member, shape `(n,)`, ascending.

        Returns:
            One member for each distinct set of weights, ascending by row, shape `(p,)`, and
            the place of each member's set among these, shape `(n,)`.
        """
        each = np.arange(len(row_of))
        is_first = np.diff(row_of, prepend=-1) > 0
        if is_first.all() or self._offset is not None:
            return each, each
        if self._bias is not None and len(self._bias) > 1:
            return each, each
        if self._masks is None and not self._temperature.ndim:
            return np.flatnonzero(is_first), np.cumsum(is_first) - 1
        keys = row_of
        if self._masks is not None:
            places = self._masks.places.numpy()
            keys = keys * (int(places.max(initial=0)) + 1) + places
        if self._temperature.ndim:
            _, numbers = np.unique(self._temperature, return_inverse=True)
            keys = keys * (int(numbers.max(initial=0)) + 1) + numbers
        found, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return (each, each) if len(found) == len(keys) else (first, inverse)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the functions in `genlm.core.draws`."""
        offset = None if self._offset is None else self._offset[:, None]
        return {
            "masks": self._masks,
            "temperature": self._temperature,
            "bias": self._bias if offset is None else offset,
        }


def _checked_numbers(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.cpu().double() if values.is_floating_point() else values.cpu()
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iuf" and numbers.size:
        raise TypeError(f"{name} has values of type {numbers.dtype}; expected numbers")
    return numbers


class _Weighted(GroupReduction):
    """A reduction of weights: rows under masks, temperature and bias."""

    def __init__(self, columns: WeightColumns) -> None:
        self.columns = columns

    def _arranged(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        """Return a row for each distinct set of weights, and the place of each member's set.

        `row_of` is ascending, and so are the places.
        """
        columns = self.columns.of(members.numpy())
        first, weights_of = columns.distinct(row_of.numpy())
        chosen = row_of[torch.from_numpy(first)]
        if len(chosen) != len(rows) or not torch.equal(chosen, torch.arange(len(rows))):
            rows = rows[chosen.to(rows.device)]
        arguments = columns.of(first).arguments
        return rows, arguments, torch.from_numpy(weights_of)


class MassColumns(_Weighted):
    """The log of the mass of allowed tokens: one column, shape `(n,)`, float32."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Sum each distinct set of weights once."""
        rows, arguments, weights_of = self._arranged(rows, row_of, members)
        del arguments["temperature"]
        return (batch_log_mass(rows, **arguments)[weights_of.to(rows.device)],)


class DrawColumns(_Weighted):
    """A token for each member: the columns of `Draws`, each of shape `(n,)`.

    Args:
        columns: Masks, temperature and bias.
        uniforms: The randomness: a number in [0, 1) for each member, shape `(n,)`.
        top_k: Draw from the k most likely tokens; None for all.
        top_p: Draw from the fewest tokens that have this share of the probability.
    """

    def __init__(
        self,
        columns: WeightColumns,
        uniforms: npt.NDArray[np.float64],
        top_k: int | None,
        top_p: float,
    ) -> None:
        super().__init__(columns)
        self.uniforms = torch.from_numpy(uniforms)
        self.top_k = top_k
        self.top_p = top_p

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute each distinct set of weights once, and draw a token for each member."""
        rows, arguments, weights_of = self._arranged(rows, row_of, members)
        return batch_draw(
            rows,
            self.uniforms[members],
            row_of=weights_of,
            top_k=self.top_k,
            top_p=self.top_p,
            **arguments,
        )


class SeveralDrawColumns(_Weighted):
    """Several different tokens for each member; see `batch_draw_without_replacement`.

    Args:
        columns: Masks, temperature and bias.
        uniforms: The randomness: numbers in [0, 1), shape `(n, k)`.
    """

    def __init__(self, columns: WeightColumns, uniforms: npt.NDArray[np.float64]) -> None:
        super().__init__(columns)
        self.uniforms = torch.from_numpy(uniforms)

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Draw from a copy of the row of each member."""
        arguments = self.columns.of(members.numpy()).arguments
        return batch_draw_without_replacement(
            rows[row_of.to(rows.device)], self.uniforms[members], **arguments
        )
