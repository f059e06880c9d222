"""Comparing rows of log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["describe_difference", "row_error"]


def row_error(row: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of a log-probability; infinite where only one is impossible.

    Args:
        row: Shape `(vocab_size,)`.
        expected: The same, float64, on the CPU.
    """
    if row.shape != expected.shape:
        return float("inf")
    differences = _differences(row, expected)
    return float(differences.max()) if len(differences) else 0.0


def describe_difference(row: Any, expected: torch.Tensor) -> str:
    """Say where a row differs most from the expected one."""
    if not isinstance(row, torch.Tensor):
        return f"a {type(row).__name__}"
    if row.shape != expected.shape:
        return f"shape {tuple(row.shape)} instead of {tuple(expected.shape)}"
    differences = _differences(row, expected)
    worst = int(differences.argmax())
    return (
        f"{float(row[worst]):.6g} instead of {float(expected[worst]):.6g} at id {worst}, "
        f"{int((differences > 1e-4).sum())} of {len(row)} ids off by more than 1e-4"
    )


def _differences(row: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    found = row.detach().cpu().double()
    same = found == expected  # infinities that agree would subtract to NaN
    differences = torch.where(same, 0.0, (found - expected).abs())
    return differences.nan_to_num(nan=float("inf"))
