"""Conversion of weights to tensors on the device that reduces them.

torch is imported only when a caller passes a tensor or names a device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from genlm.plugin import WeightsError

if TYPE_CHECKING:
    import torch

__all__ = ["as_rows", "as_tensor", "result_dtype", "stacked"]


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether the value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def stacked(ws: Any, n_tokens: int) -> Any:
    """Stack a sequence of tensors on one device; move tensors of several devices to the host.

    Other weights, and rows of unequal shapes, are returned unchanged.
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
    """Convert weights to a tensor on the device that reduces them.

    Args:
        ws: The caller's weights.
        device: The device for weights on the CPU; None leaves them there.

    Returns:
        The tensor; None if the weights are not a tensor and `device` is None.

    Raises:
        WeightsError: The weights are not an array of numbers that torch supports.
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
    """Check a tensor and convert it to rows of a floating dtype.

    Args:
        ws: `(n_tokens,)` or `(rows, n_tokens)`.
        n_tokens: The required number of columns.
        dimensions: The allowed numbers of dimensions.

    Returns:
        `(rows, n_tokens)`; integers become float64, on MPS float32. May share memory with
        `ws`.

    Raises:
        WeightsError: The tensor has another shape, or is complex.
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
    """The dtype of results: float64 for float64, else float32."""
    import torch

    return torch.float64 if rows.dtype == torch.float64 else torch.float32
