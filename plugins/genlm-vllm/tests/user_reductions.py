"""User-defined reductions in a module that vLLM's processes import by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from genlm import Reduction


@dataclass(frozen=True)
class ProcessId(Reduction):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[ProcessId]) -> Sequence[int]:
        return [os.getpid()] * len(rows)


def process_ids(rows: torch.Tensor) -> torch.Tensor:
    return torch.full((len(rows),), os.getpid())


class TwoPartError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True)
class Failing(Reduction):
    number: int

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Failing]) -> Sequence[Any]:
        if any(request.number % 2 for request in requests):
            raise TwoPartError("odd", "wrong")
        return [request.number for request in requests]


@dataclass(frozen=True)
class ReturnsFunction(Reduction):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[ReturnsFunction]) -> Sequence[Any]:
        return [lambda: 1 for _ in requests]


@dataclass(frozen=True)
class HasFunction(Reduction):
    function: Callable[[], int] = field(default=lambda: 1)

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[HasFunction]) -> Sequence[int]:
        return [request.function() for request in requests]


class CannotBeLoaded(HasFunction):
    def __reduce__(self) -> Any:
        return int, ("no number",)
