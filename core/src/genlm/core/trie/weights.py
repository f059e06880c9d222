"""Conversion of weights to numpy and of results to numpy or torch.

torch is imported only when a caller passes a tensor or requests one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import WeightsError

__all__ = ["Returns", "Weights", "check_returns"]

Returns = Literal["numpy", "torch"]
"""Type of a result: a numpy array, or a torch tensor on the device of the weights."""


def check_returns(returns: Returns) -> None:
    """Raise `ValueError` unless `returns` is a valid `Returns`."""
    if returns not in get_args(Returns):
        raise ValueError(f"returns={returns!r}: expected one of {get_args(Returns)}")


@dataclass(frozen=True)
class Weights:
    """Weights of tokens as numpy rows of float32 or float64.

    Attributes:
        rows: Shape `(rows, columns)`; may share memory with the caller's weights, so it
            must not be written to.
        device: The torch device of the caller's weights, None for numpy.
    """

    rows: npt.NDArray[np.floating[Any]]
    device: Any = None

    @classmethod
    def of(cls, ws: Any, n_tokens: int) -> Weights:
        """Read one row of weights.

        float64 and integers become float64; float32, bfloat16 and float16 become float32.

        Args:
            ws: A numpy array, a torch tensor or a sequence of numbers, `(n_tokens,)`.
            n_tokens: The required length.

        Raises:
            WeightsError: The weights have another shape, or are not real numbers.
        """
        return cls._read(_array_like(ws), n_tokens, (1,))

    @classmethod
    def of_batch(cls, ws: Any, n_tokens: int) -> Weights:
        """Read rows of weights, `(rows, n_tokens)` or a sequence of rows; see `of`."""
        if isinstance(ws, list | tuple):
            ws = _stacked(ws, n_tokens)
        return cls._read(_array_like(ws), n_tokens, (2,))

    @classmethod
    def of_tokens(cls, ws: Any, n_tokens: int, tokens: npt.NDArray[np.int64]) -> Weights:
        """Read and convert only the weights of some tokens, from one row or several."""
        return cls._read(_array_like(ws), n_tokens, (1, 2), tokens)

    @classmethod
    def _read(
        cls,
        ws: Any,
        n_tokens: int,
        dimensions: tuple[int, ...],
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> Weights:
        shape = tuple(ws.shape)
        if len(shape) not in dimensions or shape[-1] != n_tokens:
            wanted = [("rows", n_tokens) if d == 2 else (n_tokens,) for d in dimensions]
            raise WeightsError(
                f"weights of shape {' or '.join(map(_shape, wanted))}", f"shape {_shape(shape)}"
            )
        if tokens is not None:
            ws = ws[..., _on_device_of(ws, tokens)]
        device, array = _as_numpy(ws)
        floats = _floats(array)
        return cls(floats if floats.ndim == 2 else floats[None], device)

    def deliver(self, result: npt.NDArray[Any], returns: Returns) -> Any:
        """Convert a result to the requested type."""
        check_returns(returns)
        if returns == "numpy":
            return result
        import torch

        tensor = torch.from_numpy(result)
        return tensor if self.device is None else tensor.to(self.device)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array_like(ws: Any) -> Any:
    if _is_tensor(ws) or isinstance(ws, np.ndarray):
        return ws
    try:
        return np.asarray(ws)
    except ValueError as error:  # lists of unequal lengths
        raise WeightsError(
            "an array of real numbers", f"{type(ws).__name__}: {error}"
        ) from error


def _stacked(rows: list[Any] | tuple[Any, ...], n_tokens: int) -> Any:
    """Stack a sequence of rows into one array or tensor."""
    arrays = [_array_like(row) for row in rows]
    for position, row in enumerate(arrays):
        if tuple(row.shape) != (n_tokens,):
            raise WeightsError(
                f"rows of shape ({n_tokens},)",
                f"shape {_shape(tuple(row.shape))} at position {position}",
            )
    if not rows:
        return np.empty((0, n_tokens))
    if all(map(_is_tensor, arrays)):
        import torch

        devices = sorted({str(row.device) for row in arrays})
        if len(devices) > 1:
            raise WeightsError(
                "rows on one device (row.to(device) moves one)",
                f"rows on {' and '.join(devices)}",
            )
        return torch.stack([row.detach() for row in arrays])
    return np.stack([_as_numpy(row)[1] for row in arrays])


def _on_device_of(ws: Any, tokens: npt.NDArray[np.int64]) -> Any:
    if not _is_tensor(ws):
        return tokens
    import torch

    return torch.from_numpy(tokens).to(ws.device)


def _as_numpy(ws: Any) -> tuple[Any, npt.NDArray[Any]]:
    """The values as numpy, and the device of a tensor or None."""
    if not _is_tensor(ws):
        return None, ws
    values = ws.detach()
    if values.is_floating_point() and values.element_size() < 4:
        values = values.float()  # numpy has no bfloat16
    return ws.device, values.cpu().numpy()


def _floats(array: npt.NDArray[Any]) -> npt.NDArray[np.floating[Any]]:
    if array.dtype.kind not in "fiub":
        raise WeightsError("real numbers", f"values of type {array.dtype}")
    small = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    return array.astype(np.float32 if small else np.float64, copy=False)


def _shape(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
