"""Transport of reductions to vLLM's processes and of results back.

Every reduction and result is pickled separately, so that a failure affects no other.
vLLM's messages carry the bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from genlm.plugin import EvaluationError, Reduced, Reduction

__all__ = ["pack_outputs", "pack_result", "unpack_outputs", "unpack_result"]


@dataclass(frozen=True)
class _Undeliverable(Reduction):
    """Stands for a reduction that could not be sent, and fails with the reason."""

    reason: str

    @classmethod
    def compute(
        cls, rows: torch.Tensor, requests: Sequence[_Undeliverable]
    ) -> Sequence[EvaluationError]:
        """Return the errors."""
        del rows
        return [EvaluationError(request.reason) for request in requests]


def pack_outputs(outputs: Sequence[Reduction | None]) -> list[bytes | None]:
    """Return the requested outputs of a row as bytes; None, the row itself, stays None."""
    return [None if output is None else _packed_reduction(output) for output in outputs]


def _packed_reduction(reduction: Reduction) -> bytes:
    try:
        return pickle.dumps(reduction, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - it fails this reduction alone
        reason = (
            f"{type(reduction).__name__} cannot be sent to vLLM's processes: "
            f"{type(error).__name__}: {error}"
        )
        return pickle.dumps(_Undeliverable(reason))


def unpack_outputs(packed: Sequence[bytes | None]) -> tuple[Reduction | None, ...]:
    """Undo `pack_outputs`."""
    return tuple(None if data is None else _unpacked_reduction(data) for data in packed)


def _unpacked_reduction(data: bytes) -> Reduction:
    try:
        reduction = pickle.loads(data)  # noqa: S301 - of the process that started this one
        if not isinstance(reduction, Reduction):
            raise TypeError(f"it was pickled as {type(reduction).__name__}")
    except Exception as error:  # noqa: BLE001 - it fails this reduction alone
        return _Undeliverable(
            f"a reduction cannot be loaded in vLLM's process, where its class must be "
            f"importable: {type(error).__name__}: {error}"
        )
    return reduction


def pack_result(result: Reduced | Exception) -> list[bytes] | bytes:
    """Return a query's values or error as bytes."""
    if isinstance(result, Exception):
        return _packed_value(result)
    return [_packed_value(value) for value in result.values]


def unpack_result(packed: list[bytes] | bytes) -> Reduced | Exception:
    """Undo `pack_result`."""
    if isinstance(packed, bytes):
        error: Exception = _unpacked_value(packed)
        return error
    return Reduced(tuple(map(_unpacked_value, packed)))


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays on the CPU: torch's format takes more bytes and time."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            value = value.detach().cpu()  # the other process may not use the device
            try:
                return torch.from_numpy, (value.numpy(),)
            except TypeError:  # bfloat16 and others that numpy does not have
                own: Any = value.clone()  # without the rest of the storage of a view
                return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed_value(value: Any) -> bytes:
    try:
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        data = buffer.getvalue()
        if isinstance(value, Exception):
            pickle.loads(data)  # noqa: S301 - some objects can be pickled, but not unpickled
    except Exception as error:  # noqa: BLE001 - it fails this value alone
        reason = f"{type(value).__name__}: {value}"
        if not isinstance(value, Exception):
            reason = (
                f"a result of type {type(value).__name__} cannot be returned from vLLM's "
                f"process: {type(error).__name__}: {error}"
            )
        return pickle.dumps(EvaluationError(reason))
    return data


def _unpacked_value(data: bytes) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301 - of a process that this one started
    except Exception as error:  # noqa: BLE001 - it fails this value alone
        return EvaluationError(
            f"a result cannot be loaded from vLLM's process: {type(error).__name__}: {error}"
        )
