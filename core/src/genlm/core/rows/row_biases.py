"""`RowBiases`: numbers that are added to the log-probabilities of the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.arrays import check_readable, host_array, native_array
from genlm.core.queries.generations import Integers64, is_identity
from genlm.core.rows.logits import moved

_MAX_JOINED_ROWS = 32
"""Number of rows with biases of tokens up to which `joined` copies these biases. For more rows,
copies take memory and time, and separate operations are not much slower than joint ones."""


class RowBiases:
    """Biases of the rows of a batch: one for each token, or one for all tokens of a row.

    Attributes:
        count: Number of rows.
        values: The distinct biases, shape `(m, vocab_size)`, or `(m, 1)` for all tokens; not
            changed.
        index: The bias of each row, shape `(count,)`, int64, in main memory; None if row i has
            bias i, or all rows have the only one.
    """

    def __init__(
        self, values: torch.Tensor, count: int, index: torch.Tensor | None = None
    ) -> None:
        self.values = values
        self.count = count
        self.index = index

    @property
    def are_of_tokens(self) -> bool:
        """Whether the biases are those of tokens, not of rows."""
        return self.values.shape[1] > 1

    @property
    def are_different(self) -> bool:
        """Whether rows can have different biases."""
        return len(self.values) > 1

    @property
    def places(self) -> torch.Tensor:
        """The place of each row's bias in `values`, shape `(count,)`, int64."""
        if self.index is not None:
            return self.index
        if not self.are_different:
            return torch.zeros(self.count, dtype=torch.long, device="cpu")
        return torch.arange(self.count, device="cpu")

    @property
    def in_order(self) -> torch.Tensor:
        """The biases of the rows, or the only one: shape `(1 or count, 1 or vocab_size)`."""
        if self.index is None:
            return self.values
        return self.values[moved(self.index, self.values.device)]

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get only the biases in use."""
        return {"values": self.in_order, "count": self.count, "index": None}

    def of(self, rows: Integers64) -> RowBiases:
        """Return the biases of some rows, possibly with repetitions."""
        index = self.places[torch.from_numpy(rows)] if self.are_different else None
        return RowBiases(self.values, len(rows), index)

    def on(self, device: torch.device, rows: slice = slice(None)) -> torch.Tensor:
        """Return the biases of some rows, or the only one, float32, on a device."""
        values = self.values
        if self.index is not None:
            values = values[moved(self.index[rows], values.device)]
        elif self.are_different:
            values = values[rows]
        return values.to(torch.float32).to(device)

    def of_ids(self, rows: Integers64, token_ids: Integers64) -> npt.NDArray[np.float64]:
        """Return the biases of some tokens of some rows.

        Args:
            rows: Indices of rows, shape `(m,)`.
            token_ids: Ids of tokens of each of these rows, shape `(m, k)`.

        Returns:
            Biases as draws use them, rounded to float32, shape `(m, k)`, float64.
        """
        columns = token_ids if self.are_of_tokens else np.zeros_like(token_ids)
        device = self.values.device
        places = moved(self.places[torch.from_numpy(rows)][:, None], device)
        found = self.values[places, moved(torch.from_numpy(columns), device)]
        biases: npt.NDArray[np.float64] = found.float().cpu().double().numpy()
        return biases

    @property
    def joining_key(self) -> Hashable:
        """Equal for biases that `joined` combines; None for those that it does not."""
        if self.are_of_tokens and self.count > _MAX_JOINED_ROWS:
            return None
        return self.values.device, self.values.shape[1]

    @classmethod
    def joined(cls, batches: Sequence[RowBiases]) -> RowBiases:
        """Return the biases of the rows of several batches with equal `joining_key`."""
        begins: dict[object, int] = {}
        tables: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        end = 0
        for biases in batches:
            values, index = biases.values, biases.places
            # Several requests often have the same bias.
            key: object = (values.data_ptr(), values.dtype, values.shape, values.stride())
            if len(values) > biases.count:  # without biases of other rows
                values, key = biases.in_order, biases  # hashed by identity
                index = torch.arange(biases.count, device="cpu")
            if key not in begins:
                begins[key] = end
                tables.append(values)
                end += len(values)
            places.append(index + begins[key])
        table = tables[0] if len(tables) == 1 else torch.cat(tables)
        index = torch.cat(places)
        in_order = end == 1 or is_identity(index.numpy(), end)
        return cls(table, len(index), None if in_order else index)


def row_biases(bias: Any, count: int, size: int) -> RowBiases | None:
    """Return the biases of `count` rows over `size` tokens; None for the number 0.

    Args:
        bias: As `RowWeights` takes it.
        count: Number of rows.
        size: Number of ids in the vocabulary.

    Raises:
        ValueError: The shape is none of those that `RowWeights` takes.
        TypeError: `bias` is not numeric.
    """
    if type(bias) is float and bias == 0:
        return None
    if isinstance(bias, torch.Tensor) and bias.dtype != torch.bool:
        check_readable(bias, "bias")
        if bias.is_complex():
            raise TypeError(f"bias has values of type {bias.dtype}; expected numbers")
        values = bias.detach()
    else:
        array = checked_numbers("bias", bias)
        if not array.ndim and array == 0:
            return None
        is_small = array.dtype.itemsize < 4 or array.dtype == np.float32
        values = torch.from_numpy(native_array(array, np.float32 if is_small else np.float64))
    shape = tuple(values.shape)
    if shape in {(count,), (size,)} and count == size:
        raise ValueError(
            f"a bias of shape {shape} for {count} rows over {size} tokens is ambiguous: pass "
            f"shape ({count}, 1) for rows or (1, {size}) for tokens"
        )
    if shape in {(), (1, 1), (count,), (count, 1)}:
        return RowBiases(values.reshape(-1, 1), count)
    if shape in {(size,), (1, size), (count, size)}:
        return RowBiases(values.reshape(-1, size), count)
    raise ValueError(
        f"a bias of shape {shape} for {count} rows over {size} tokens; expected a number, "
        f"({count},), ({size},) or ({count}, {size})"
    )


def checked_biases(bias: Any, count: int, size: int) -> list[torch.Tensor] | list[None]:
    """Return the bias of each of `count` rows, shape `(size,)`; None if it is the number 0.

    Raises:
        ValueError: As `row_biases`, or a value is NaN or `inf`.
        TypeError: `bias` is not numeric.
    """
    biases = row_biases(bias, count, size)
    if biases is None:
        return [None] * count
    if biases.values.numel() and not bool(biases.values.max() < math.inf):  # true for NaN
        raise ValueError("bias is NaN or inf; expected finite numbers or -inf")
    return list(biases.values.expand(count, size))


def checked_numbers(name: str, values: Any) -> npt.NDArray[Any]:
    """Return a numeric argument as an array of numpy.

    Raises:
        TypeError: `values` is not numeric.
    """
    numbers = host_array(values, name)
    if numbers.dtype.kind not in "iuf" and numbers.size:
        raise TypeError(f"{name} has values of type {numbers.dtype}; expected numbers")
    return numbers
