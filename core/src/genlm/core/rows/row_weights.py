"""`RowWeights`: masks, temperatures, biases and truncation of the rows of a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.errors import PopulationError
from genlm.core.queries.generations import Integers64, is_identity
from genlm.core.rows.logits import moved, row_parts, scratch_memory
from genlm.core.rows.row_biases import RowBiases, checked_numbers, row_biases
from genlm.core.rows.row_masks import MasksLike, RowMasks
from genlm.core.rows.truncation import UNLIMITED, Truncation

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30
"""Range of float32 to which other temperatures are clipped. At the lowest, only the most likely
id has a weight above 0; at the highest, all weights are equal."""


class RowPart(NamedTuple):
    """Rows that are computed at once, and their settings."""

    rows: torch.Tensor
    """Log-probabilities."""
    places: slice
    """Places among all rows."""
    temperatures: npt.NDArray[np.float64]
    truncation: Truncation
    factors: torch.Tensor | None
    """1 for the tokens of the mask and 0 for others, shape `(1 or n, vocab_size)`."""
    unrestricted: torch.Tensor | None
    """Which rows have no mask; None if no row is without a mask."""
    bias: torch.Tensor | None
    """Bias of each token, shape `(1 or n, vocab_size)`."""
    offset: torch.Tensor | None
    """Bias of all tokens of each row, shape `(1 or n,)`."""
    memory: torch.Tensor
    """Memory for weights, of the shape of the rows."""


class RowWeights:
    """Masks, temperatures, biases and truncation of the rows of a batch.

    The weight of token v in a row is `exp((logprob[v] + bias[v]) / temperature)`, and 0 outside
    the mask. Draws are limited to the tokens with the largest weights.

    Args:
        shape: Number of rows, and number of ids in the vocabulary.
        masks: The tokens that may be drawn, as `RowMasks` takes them; None for all.
        temperature: A number that is finite and not negative, or one for each row. At
            temperature 0 the token with the largest `logprob + bias` has all the weight, the
            lowest of equals.
        bias: A number, or numbers of shape `(n,)`, `(n, 1)`, `(vocab_size,)`,
            `(1, vocab_size)` or `(n, vocab_size)`; `-inf` excludes a token.
        truncation: Limits of the draws.

    Attributes:
        count: Number of rows.
        masks: The masks of the rows; None if no row has a mask.
        biases: The biases of the rows; None if no row has a bias.
    """

    def __init__(
        self,
        shape: Sequence[int],
        masks: MasksLike | None = None,
        *,
        temperature: npt.ArrayLike | torch.Tensor = 1.0,
        bias: Any = 0.0,
        truncation: Truncation = UNLIMITED,
    ) -> None:
        count, vocab_size = shape
        if masks is not None and not isinstance(masks, RowMasks):
            masks = RowMasks(masks, count, vocab_size)
        self.count = count
        self.masks: RowMasks | None = masks
        self._temperature = (
            _one_temperature(temperature)
            if type(temperature) is float
            else _checked_temperatures(temperature)
        )
        if self._temperature.shape not in {(), (count,)}:
            raise ValueError(
                f"temperature has shape {self._temperature.shape}; expected a number or one "
                f"for each of {count} rows"
            )
        self.biases = row_biases(bias, count, vocab_size)
        self.truncation = truncation

    @property
    def is_greedy(self) -> bool:
        """Whether some row has temperature 0."""
        return not self._temperature.all()

    @property
    def has_masks_or_biases(self) -> bool:
        """Whether some row has a mask or a bias."""
        return self.masks is not None or self.biases is not None

    def is_truncated(self, vocab_size: int) -> bool:
        """Whether the draws of some row are limited to its most likely tokens."""
        limited = self.truncation.applies(vocab_size)
        return limited if type(limited) is bool else bool(limited.any())

    def are_masked_probabilities(self, vocab_size: int) -> bool:
        """Whether weights are known to be the probabilities of all or of masked tokens."""
        if self.biases is not None:
            return False
        return not self._is_tempered and not self.is_truncated(vocab_size)

    def device_biases(
        self, device: torch.device, rows: slice = slice(None)
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the bias of each token of some rows, and that of all tokens: see `RowPart`."""
        if self.biases is None:
            return None, None
        values = self.biases.on(device, rows)
        return (values, None) if self.biases.are_of_tokens else (None, values[:, 0])

    def device_temperatures(self, device: torch.device) -> torch.Tensor | None:
        """Return the temperature of each row, shape `(n,)`, float32; None if all are 1."""
        if not self._is_tempered:
            return None
        return moved(torch.from_numpy(self.temperatures.astype(np.float32)), device)

    @property
    def _is_tempered(self) -> bool:
        """Whether some row has a temperature other than 1."""
        temperature = self._temperature
        return bool((temperature != 1).any()) if temperature.ndim else temperature.item() != 1

    @property
    def temperatures(self) -> npt.NDArray[np.float64]:
        """The temperature of each row, shape `(n,)`."""
        temperature = self._temperature
        return temperature if temperature.ndim else np.full(self.count, temperature)

    @property
    def joining_key(self) -> Hashable:
        """Equal for weights that `joined` combines; None for those that it does not."""
        if not self.truncation.is_equal:
            return None
        biases: Hashable = ()
        if self.biases is not None and (biases := self.biases.joining_key) is None:
            return None
        return self._is_tempered, self.is_greedy, self.masks is None, biases, self.truncation

    @classmethod
    def joined(cls, batches: Sequence[RowWeights]) -> RowWeights:
        """Return the weights of the rows of several batches, which have equal `joining_key`."""
        masks = [weights.masks for weights in batches if weights.masks is not None]
        temperatures = np.concatenate([weights.temperatures for weights in batches])
        joined = object.__new__(cls)
        joined.count = len(temperatures)
        joined.masks = RowMasks.joined(masks) if masks else None
        is_equal = (temperatures == temperatures[:1]).all()
        joined._temperature = np.array(temperatures[0]) if is_equal else temperatures
        joined.truncation = batches[0].truncation
        biases = [weights.biases for weights in batches if weights.biases is not None]
        joined.biases = RowBiases.joined(biases) if biases else None
        return joined

    def of(self, rows: Integers64) -> RowWeights:
        """Return the weights of some rows, possibly with repetitions."""
        if is_identity(rows, self.count):
            return self
        weights = object.__new__(RowWeights)
        weights.count = len(rows)
        weights.masks = None if self.masks is None else self.masks.of(rows)
        temperature = self._temperature
        weights._temperature = temperature[rows] if temperature.ndim else temperature
        weights.truncation = self.truncation.of(rows)
        weights.biases = None if self.biases is None else self.biases.of(rows)
        return weights

    def distinct(self, row_of: Integers64) -> tuple[Integers64, Integers64]:
        """Find the members with distinct sets of weights.

        Args:
            row_of: The row of each member, shape `(n,)`, ascending.

        Returns:
            One member for each distinct set of weights, ascending by row, shape `(p,)`, and
            the place of each member's set among these, shape `(n,)`.
        """
        members = np.arange(len(row_of))
        is_first = np.diff(row_of, prepend=-1) > 0
        biases = self.biases
        if biases is not None and not biases.are_different:
            biases = None
        has_own_biases = biases is not None and biases.index is None
        if is_first.all() or has_own_biases or not self.truncation.is_equal:
            return members, members
        if self.masks is None and biases is None and not self._temperature.ndim:
            return np.flatnonzero(is_first), np.cumsum(is_first) - 1
        keys = row_of
        if biases is not None:
            places = biases.places.numpy()
            keys = keys * (int(places.max()) + 1) + places
        if self.masks is not None:
            places = self.masks.places.numpy()
            keys = keys * (int(places.max()) + 1) + places
        if self._temperature.ndim:
            _, numbers = np.unique(self._temperature, return_inverse=True)
            keys = keys * (int(numbers.max()) + 1) + numbers
        distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return (members, members) if len(distinct) == len(keys) else (first, inverse)

    def parts(
        self, rows: torch.Tensor, sources: torch.Tensor | None = None
    ) -> Iterator[RowPart]:
        """Yield the parts of the rows, at least one, that are computed at once.

        Args:
            rows: Shape `(m, vocab_size)`.
            sources: Index of the log-probabilities of each row, shape `(n,)`, int64; by default
                those of row i are `rows[i]`.
        """
        rows, masks, device = rows.detach(), self.masks, rows.device
        unrestricted = None if masks is None else masks.unrestricted
        temperatures = self.temperatures
        parts = row_parts(self.count, rows.shape[1], device)
        longest = parts[0][1]
        memory = _part_memory("weights", rows, longest)
        copies = rows[:0] if sources is None else _part_memory("sources", rows, longest)
        for begin, end in parts:
            bias, offset = self.device_biases(device, slice(begin, end))
            if sources is None:
                part = rows[begin:end]
            else:
                places = moved(sources[begin:end], device)
                part = torch.index_select(rows, 0, places, out=copies[: end - begin])
            yield RowPart(
                part,
                slice(begin, end),
                temperatures[begin:end],
                self.truncation.of(slice(begin, end)),
                None if masks is None else masks.factors(begin, end, device),
                None if unrestricted is None else moved(unrestricted[begin:end], device),
                bias,
                offset,
                memory[: end - begin],
            )


def _part_memory(use: str, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return uninitialised memory for some rows like those given."""
    if rows.device.type == "cpu" and rows.dtype == torch.float32:
        return scratch_memory(use, count, rows.shape[1])
    return rows.new_empty((count, rows.shape[1]))


def check_log_masses(log_masses: torch.Tensor, members: Integers64, count: int) -> None:
    """Check the log-masses of some members of a population of `count` members.

    Rows are distributions, so the bias is the cause of masses that are NaN or infinite.
    Checking the bias beforehand would take another pass over `(n, vocab_size)` numbers.

    Raises:
        PopulationError: The log-mass of a member is NaN or infinite.
    """
    values = log_masses.numpy()
    if not values.max(initial=-math.inf) < math.inf:  # true for NaN
        error = ValueError(
            "bias is NaN or inf for a token that may be drawn; a bias that was computed from "
            "rows is so for ids without logits, whose log-probability is -inf: replace it by "
            "-inf"
        )
        raise PopulationError(members[~(values < math.inf)].tolist(), count, error)


def _checked_temperatures(temperature: Any) -> npt.NDArray[np.float64]:
    """Return temperatures in the range of float32, or 0."""
    temperatures = checked_numbers("temperature", temperature).astype(np.float64)
    wrong = temperatures[~(np.isfinite(temperatures) & (temperatures >= 0))]
    if wrong.size:
        raise ValueError(f"temperature={wrong[0]}; it must be finite and not negative")
    clipped = np.clip(temperatures, _MIN_TEMPERATURE, _MAX_TEMPERATURE)
    return np.where(temperatures == 0, 0.0, clipped)


_one_temperature = functools.lru_cache(16)(_checked_temperatures)
"""The same for a float; the array must not be changed."""
