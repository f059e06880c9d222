"""Weights on their way to a device: shapes, dtypes, and who computes.

torch is not imported here; only who passes a tensor, or names a device, has need of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from genlm import WeightsError

if TYPE_CHECKING:
    import torch

__all__ = ["as_rows", "as_tensor", "result_dtype", "stacked"]


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a torch tensor; torch need not be there."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def stacked(ws: Any, n_tokens: int) -> Any:
    """A sequence of rows as one array, or as one tensor if all are on one device.

    Anything else is returned as it is, and so are rows that don't fit together.
    """
    if not isinstance(ws, list | tuple):
        return ws
    import numpy as np

    if not ws:
        return np.empty((0, n_tokens))
    if not any(map(is_tensor, ws)):
        return ws
    if not all(map(is_tensor, ws)) or len({row.device for row in ws}) > 1:
        return [_on_host(row) if is_tensor(row) else row for row in ws]
    if len({row.shape for row in ws}) > 1:
        return ws
    import torch

    return torch.stack([row.detach() for row in ws])


def _on_host(row: torch.Tensor) -> Any:
    row = row.detach()
    narrow = row.is_floating_point() and row.element_size() < 4
    return (row.float() if narrow else row).cpu().numpy()


def as_tensor(ws: Any, device: torch.device | None) -> torch.Tensor | None:
    """The weights as a tensor that is to be reduced where it is.

    Args:
        ws: What the caller gave.
        device: Where weights on the CPU are to go; None leaves them.

    Returns:
        The tensor on its device; None if it is the CPU's numpy that has to read them.

    Raises:
        WeightsError: They are no array of numbers that torch knows.
    """
    if is_tensor(ws):
        moved = ws if device is None or ws.device.type != "cpu" else ws.to(device)
        return moved.detach()
    if device is None:
        return None
    import numpy as np
    import torch

    try:
        return torch.tensor(np.asarray(ws), device=device)
    except (TypeError, ValueError) as error:
        raise WeightsError("real numbers", f"{type(ws).__name__}: {error}") from error


def as_rows(ws: torch.Tensor, n_tokens: int, dimensions: tuple[int, ...]) -> torch.Tensor:
    """Check a tensor and make it rows of a floating dtype.

    Args:
        ws: `(n_tokens,)` or `(rows, n_tokens)`.
        n_tokens: Columns that it must have.
        dimensions: Which of the two shapes are right, by their number of dimensions.

    Returns:
        `(rows, n_tokens)`; integers become floats of 64 bits where the device has them.
        Shares memory with `ws` if it can.

    Raises:
        WeightsError: The shape or the kind of number is another.
    """
    import torch

    shape = tuple(ws.shape)
    if len(shape) not in dimensions or shape[-1] != n_tokens:
        wanted = [f"(rows, {n_tokens})" if d == 2 else f"({n_tokens},)" for d in dimensions]
        raise WeightsError(f"weights of shape {' or '.join(wanted)}", f"shape {shape}")
    if ws.is_complex():
        raise WeightsError("real numbers", f"values of type {ws.dtype}")
    if not ws.is_floating_point():
        ws = ws.to(torch.float32 if ws.device.type == "mps" else torch.float64)
    elif ws.element_size() < 2:
        ws = ws.float()
    return ws if ws.ndim == 2 else ws[None]


def result_dtype(rows: torch.Tensor) -> torch.dtype:
    """float64 for float64, float32 for what is smaller."""
    import torch

    return torch.float64 if rows.dtype == torch.float64 else torch.float32
