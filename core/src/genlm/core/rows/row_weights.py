"""`RowWeights`: masks, temperatures, biases and truncation of the rows of a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.arrays import check_readable, host_array, native_array
from genlm.core.base.errors import PopulationError
from genlm.core.queries.generations import Integers64, is_identity
from genlm.core.rows.logits import moved, row_parts, scratch_memory
from genlm.core.rows.row_masks import MasksLike, RowMasks
from genlm.core.rows.truncation import UNLIMITED, Truncation

_MAX_JOINED_ROWS = 32
"""Number of rows with biases of tokens up to which `joined` copies these biases. For more rows,
copies take memory and time, and separate operations are not much slower than joint ones."""

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
        self._bias, self._offset = _biases(bias, count, vocab_size)
        self._bias_index: torch.Tensor | None = None  # the bias of each row; None if in order
        self.truncation = truncation

    @property
    def is_greedy(self) -> bool:
        """Whether some row has temperature 0."""
        return not self._temperature.all()

    @property
    def has_masks_or_biases(self) -> bool:
        """Whether some row has a mask or a bias."""
        biases = self._bias, self._offset
        return self.masks is not None or any(bias is not None for bias in biases)

    def is_truncated(self, vocab_size: int) -> bool:
        """Whether the draws of some row are limited to its most likely tokens."""
        limited = self.truncation.applies(vocab_size)
        return limited if type(limited) is bool else bool(limited.any())

    def are_masked_probabilities(self, vocab_size: int) -> bool:
        """Whether weights are known to be the probabilities of all or of masked tokens."""
        if self._bias is not None or self._offset is not None:
            return False
        return not self._is_tempered and not self.is_truncated(vocab_size)

    def device_bias(self, device: torch.device) -> torch.Tensor | None:
        """Return the bias of each token, `(1 or n, vocab_size)`, contiguous, or None."""
        bias = self._biases_of(slice(None), device)
        return None if bias is None else bias.contiguous()

    def device_offset(self, device: torch.device) -> torch.Tensor | None:
        """Return the bias of all tokens of each row, shape `(1 or n,)`, float32, or None."""
        return _part_values(self._offset, slice(None), device)

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

    def token_biases(self, rows: Integers64, token_ids: Integers64) -> npt.NDArray[np.float64]:
        """Return the biases of some tokens of some rows.

        Args:
            rows: Indices of rows, shape `(m,)`.
            token_ids: Ids of tokens of each of these rows, shape `(m, k)`.

        Returns:
            Biases as draws use them, rounded to float32, shape `(m, k)`, float64.
        """
        biases = np.zeros(token_ids.shape)
        if self._offset is not None:
            offset = self._offset.float().cpu().numpy()
            biases += (offset if len(offset) == 1 else offset[rows])[:, None]
        if self._bias is not None:
            places = self._bias_places[torch.from_numpy(rows)]
            device, column = self._bias.device, torch.from_numpy(token_ids)
            values = self._bias[moved(places[:, None], device), moved(column, device)]
            biases += values.float().cpu().numpy()
        return biases

    @property
    def joining_key(self) -> Hashable:
        """Equal for weights that `joined` combines; None for those that it does not."""
        if not self.truncation.is_equal:
            return None
        if self._bias is not None and self.count > _MAX_JOINED_ROWS:
            return None
        biases = tuple(None if b is None else b.device for b in (self._bias, self._offset))
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
        joined._bias, joined._bias_index = _joined_biases(batches)
        offsets = [
            weights._offset.float().expand(weights.count)  # noqa: SLF001 - of the same class
            for weights in batches
            if weights._offset is not None  # noqa: SLF001
        ]
        joined._offset = torch.cat(offsets) if offsets else None
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
        weights._bias, weights._bias_index = self._bias, None
        if self._bias is not None and len(self._bias) > 1:
            weights._bias_index = self._bias_places[torch.from_numpy(rows)]
        offset = self._offset
        weights._offset = offset if offset is None or len(offset) == 1 else offset[rows]
        return weights

    @property
    def _bias_places(self) -> torch.Tensor:
        """The place of each row's bias in `_bias`, shape `(count,)`, int64."""
        if self._bias_index is not None:
            return self._bias_index
        if self._bias is None or len(self._bias) == 1:
            return torch.zeros(self.count, dtype=torch.long, device="cpu")
        return torch.arange(self.count, device="cpu")

    def _biases_of(self, rows: slice, device: torch.device) -> torch.Tensor | None:
        """Return the bias of each token of some rows, or of all rows, on a device."""
        if self._bias is None or self._bias_index is None:
            return _part_values(self._bias, rows, device)
        return _part_values(
            self._bias, moved(self._bias_index[rows], self._bias.device), device
        )

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get only the biases in use."""
        state = dict(self.__dict__)
        if self._bias is not None and self._bias_index is not None:
            state |= {"_bias": self._bias[self._bias_index], "_bias_index": None}
        return state

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
        has_biases = self._bias is not None and len(self._bias) > 1
        has_row_values = (has_biases and self._bias_index is None) or self._offset is not None
        if is_first.all() or has_row_values or not self.truncation.is_equal:
            return members, members
        if self.masks is None and not has_biases and not self._temperature.ndim:
            return np.flatnonzero(is_first), np.cumsum(is_first) - 1
        keys = row_of
        if self._bias_index is not None:
            places = self._bias_index.numpy()
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
                self._biases_of(slice(begin, end), device),
                _part_values(self._offset, slice(begin, end), device),
                memory[: end - begin],
            )


def _joined_biases(
    batches: Sequence[RowWeights],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the distinct biases of tokens of several batches, and the index of each row."""
    begins: dict[object, int] = {}
    tables: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    end = 0
    for weights in batches:
        bias, index = weights._bias, weights._bias_places  # noqa: SLF001 - of the same module
        if bias is None:
            return None, None  # no batch has biases, because their keys are equal
        # Several requests often have the same bias.
        key: object = (bias.data_ptr(), bias.dtype, bias.shape, bias.stride())
        if len(bias) > weights.count:  # without biases of other rows
            bias, key = bias[moved(index, bias.device)], index  # hashed by identity
            index = torch.arange(weights.count, device="cpu")
        if key not in begins:
            begins[key] = end
            tables.append(bias.float())
            end += len(bias)
        places.append(index + begins[key])
    if end == 1:
        return tables[0], None
    bias_index = torch.cat(places)
    return torch.cat(tables), None if is_identity(bias_index.numpy(), end) else bias_index


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
    temperatures = _checked_numbers("temperature", temperature).astype(np.float64)
    wrong = temperatures[~(np.isfinite(temperatures) & (temperatures >= 0))]
    if wrong.size:
        raise ValueError(f"temperature={wrong[0]}; it must be finite and not negative")
    clipped = np.clip(temperatures, _MIN_TEMPERATURE, _MAX_TEMPERATURE)
    return np.where(temperatures == 0, 0.0, clipped)


_one_temperature = functools.lru_cache(16)(_checked_temperatures)
"""The same for a float; the array must not be changed."""


def _part_values(
    values: torch.Tensor | None, places: slice | torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """Return the values of a part of the rows on a device; one value is for all rows."""
    if values is None:
        return None
    part = values if len(values) == 1 else values[places]
    return part.to(torch.float32).to(device)


def checked_biases(bias: Any, count: int, size: int) -> list[torch.Tensor] | list[None]:
    """Return the bias of each of `count` rows, shape `(size,)`; None if it is the number 0.

    Raises:
        ValueError: The shape is none of those that `RowWeights` takes, or a value is NaN or
            `inf`.
        TypeError: `bias` is not numeric.
    """
    tokens, offsets = _biases(bias, count, size)
    if offsets is not None:
        tokens = offsets[:, None]
    if tokens is None:
        return [None] * count
    if tokens.numel() and not bool(tokens.max() < math.inf):  # true for NaN
        raise ValueError("bias is NaN or inf; expected finite numbers or -inf")
    return list(tokens.expand(count, size))


def bias_of_rows(bias: Any, rows: Integers64, count: int, size: int) -> Any:
    """Return the bias of some of `count` rows, as an argument of `RowWeights` for these rows.

    Raises:
        ValueError: As `checked_biases`, for shapes.
        TypeError: `bias` is not numeric.
    """
    tokens, offsets = _biases(bias, count, size)
    values = tokens if offsets is None else offsets[:, None]
    if values is None or len(values) == 1:
        return 0.0 if values is None else values
    return values[moved(torch.from_numpy(rows), values.device)]


def _biases(
    bias: Any, count: int, size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the biases of tokens, `(1 or n, size)`, and those of rows, `(1 or n,)`."""
    if type(bias) is float and bias == 0:
        return None, None
    if isinstance(bias, torch.Tensor) and bias.dtype != torch.bool:
        check_readable(bias, "bias")
        if bias.is_complex():
            raise TypeError(f"bias has values of type {bias.dtype}; expected numbers")
        values = bias.detach()
    else:
        array = _checked_numbers("bias", bias)
        if not array.ndim and array == 0:
            return None, None
        is_small = array.dtype.itemsize < 4 or array.dtype == np.float32
        values = torch.from_numpy(native_array(array, np.float32 if is_small else np.float64))
    shape = tuple(values.shape)
    if shape in {(count,), (size,)} and count == size:
        raise ValueError(
            f"a bias of shape {shape} for {count} rows over {size} tokens is ambiguous: pass "
            f"shape ({count}, 1) for rows or (1, {size}) for tokens"
        )
    if shape in {(), (1, 1), (count,), (count, 1)}:
        return None, values.reshape(-1)
    if shape in {(size,), (1, size), (count, size)}:
        return values.reshape(-1, size), None
    raise ValueError(
        f"a bias of shape {shape} for {count} rows over {size} tokens; expected a number, "
        f"({count},), ({size},) or ({count}, {size})"
    )


def _checked_numbers(name: str, values: Any) -> npt.NDArray[Any]:
    numbers = host_array(values, name)
    if numbers.dtype.kind not in "iuf" and numbers.size:
        raise TypeError(f"{name} has values of type {numbers.dtype}; expected numbers")
    return numbers
