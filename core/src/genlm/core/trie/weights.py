"""Weights of tokens as rows, and results as numpy or torch.

torch is imported only when a caller passes a tensor or requests one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args

import numpy as np
import numpy.typing as npt

from genlm.core.base.arrays import unreadable_tensor
from genlm.core.base.errors import WeightsError

if TYPE_CHECKING:
    import torch

Returns = Literal["numpy", "torch"]
"""Type of a result: a numpy array, or a torch tensor on the device of the weights."""

Rows: TypeAlias = "npt.NDArray[Any] | torch.Tensor"


def check_returns(returns: Returns) -> None:
    """Raise `ValueError` unless `returns` is a valid `Returns`."""
    if returns not in get_args(Returns):
        raise ValueError(f"returns={returns!r}: expected one of {get_args(Returns)}")


def read_rows(ws: Any, n_tokens: int, dimensions: tuple[int, ...]) -> Rows:
    """Check weights and return them as rows, with the same dtype and device.

    Args:
        ws: A numpy array, a torch tensor, or a sequence of numbers or rows. Rows on several
            devices are copied to the host.
        n_tokens: The required number of columns.
        dimensions: The allowed numbers of dimensions.

    Returns:
        Real numbers, `(rows, n_tokens)`; may share memory with `ws`.

    Raises:
        WeightsError: The weights have another shape, are not real numbers, or are a
            sparse, quantised or nested tensor.
    """
    rows = (
        _stack_rows(ws, n_tokens) if dimensions == (2,) and isinstance(ws, list | tuple) else ws
    )
    rows = _array_like(rows)
    shape = tuple(rows.shape)
    if len(shape) not in dimensions or shape[-1] != n_tokens:
        expected = [("rows", n_tokens) if d == 2 else (n_tokens,) for d in dimensions]
        raise WeightsError(
            f"weights of shape {' or '.join(map(_shape, expected))}", f"shape {_shape(shape)}"
        )
    if rows.is_complex() if _is_tensor(rows) else rows.dtype.kind not in "fiub":
        dtype = str(rows.dtype).removeprefix("torch.")
        raise WeightsError("real numbers", f"values of type {dtype}")
    matrix: Rows = rows if rows.ndim == 2 else rows[None]
    return matrix


def numpy_rows(
    rows: Rows, columns: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.floating[Any]]:
    """Convert rows, or only some of their columns, to numpy on the host.

    float64 and integers become float64; float32, bfloat16 and float16 become float32.

    Raises:
        WeightsError: The rows are a tensor without dense values.
    """
    if _is_tensor(rows):
        if problem := unreadable_tensor(rows):
            raise WeightsError("an array or a dense tensor", problem)
        if columns is not None:
            import torch

            rows = rows[:, torch.from_numpy(columns).to(rows.device)]
        array = _on_host(rows)
    else:
        array = np.asarray(rows)
        if columns is not None:
            array = array.take(columns, axis=1)
    small = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    return array.astype(np.float32 if small else np.float64, copy=False)


def convert_result(values: Rows, returns: Returns, rows: Rows) -> Any:
    """Convert a result to the requested type; a new tensor is on the device of the weights."""
    if returns == "numpy":
        return values.cpu().numpy() if _is_tensor(values) else values
    if _is_tensor(values):
        return values
    import torch

    tensor = torch.from_numpy(values)
    return tensor.to(rows.device) if _is_tensor(rows) else tensor


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array_like(ws: Any) -> Any:
    if _is_tensor(ws):
        # A trie for a device may compute shapes and dtypes on the device meta.
        if not ws.is_meta and (problem := unreadable_tensor(ws)):
            raise WeightsError("an array or a dense tensor", problem)
        return ws.detach()
    try:
        return np.asarray(ws)
    except ValueError as error:  # lists of unequal lengths
        raise WeightsError(
            "an array of real numbers", f"{type(ws).__name__}: {error}"
        ) from error


def _stack_rows(rows: list[Any] | tuple[Any, ...], n_tokens: int) -> Any:
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
    if all(map(_is_tensor, arrays)) and len({row.device for row in arrays}) == 1:
        import torch

        if len({row.is_floating_point() for row in arrays}) > 1:
            arrays = [row.double() for row in arrays]  # torch would round the integers
        return torch.stack(arrays)
    return np.stack([_on_host(row) if _is_tensor(row) else row for row in arrays])


def _on_host(values: torch.Tensor) -> npt.NDArray[Any]:
    if values.is_floating_point() and values.element_size() < 4:
        values = values.float()  # numpy has no bfloat16
    array: npt.NDArray[Any] = values.cpu().numpy()
    return array


def _shape(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
