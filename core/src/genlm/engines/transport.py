"""`Transport`: requested outputs and results that are sent between processes.

Values of a class are pickled together, tensors as arrays. A value that cannot be
pickled, or whose class or function the other process cannot import, fails alone.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from genlm.core.base.errors import EvaluationError, describe_error
from genlm.core.queries.query import (
    Completion,
    GroupReduction,
    GroupResult,
    Reduced,
    Reduction,
)
from genlm.core.rows.row_functions import ColumnsOfFunction, ReductionOfFunction

_SAFE = frozenset({bool, bytes, float, int, str, type(None), np.ndarray, torch.Tensor})
"""Classes that every process can load, besides those of `_OWN`."""

_OWN = ("genlm.core.", "genlm.engines.")
"""Packages whose classes every process can load."""

_SINGLE = -1

_SEPARATE_BYTES = 2**20
"""Size from which on arrays are not a part of pickled bytes, which would copy them."""

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class _Part(NamedTuple):
    """Values of a class, or with a function, that are pickled together.

    Attributes:
        places: Places of the values.
        data: The pickled list of the values.
        arrays: Memory of their large arrays, shape `(bytes,)` each.
        is_group: Whether the values are `GroupReduction`s.
    """

    places: list[int]
    data: bytes
    arrays: list[_Bytes]
    is_group: bool


PackedValues: TypeAlias = list[_Part]
"""The parts of values, in which each place occurs once."""


class PackedCompletions(NamedTuple):
    """Results of queries in the form in which they are sent.

    Attributes:
        data: The pickled results without rows.
        rows: The rows among the results, including those of populations, in the order of the
            results, shape `(n, vocab_size)`, float32; None if no result is a row. Rows are sent
            separately from `data`.
    """

    data: bytes
    rows: np.ndarray[Any, np.dtype[np.float32]] | None


class Transport:
    """Packs the requested outputs of queries and the results of an engine.

    Both processes construct it with the same arguments.

    Args:
        process: Name of the engine's process in messages, such as "a replica".
        dumps_by_value: Pickles what `pickle` cannot, and classes and functions of the main
            module, such as `cloudpickle.dumps`; by default only importable ones are sent.
    """

    def __init__(
        self, process: str, dumps_by_value: Callable[[Any], bytes] | None = None
    ) -> None:
        self._process = process
        self._dumps_by_value = dumps_by_value

    # -- requested outputs ---------------------------------------------------------

    def pack_outputs(
        self, outputs: Sequence[Reduction | GroupReduction | None]
    ) -> PackedValues:
        """Pack requested outputs; None, the row itself, stays None.

        Large arrays are not copied; they must not change until the result is sent.
        """
        return self._pack(outputs, self._unsendable_output)

    def unpack_outputs(self, packed: PackedValues) -> list[Any]:
        """Unpack requested outputs; outputs that cannot be loaded here fail when computed."""

        def failing_output(error: Exception, is_group: bool) -> object:
            message = (
                f"a reduction cannot be loaded in {self._process}, where its module must be "
                f"installed: {describe_error(error)}"
            )
            return _failing_output(message, is_group)

        outputs = _unpack(packed, failing_output)
        for place, output in enumerate(outputs):
            if output is not None and not isinstance(output, (Reduction, GroupReduction)):
                error = TypeError(f"it was pickled as {type(output).__name__}")
                outputs[place] = failing_output(error, False)
        return outputs

    def _unsendable_output(self, output: Any, error: Exception) -> object:
        code = user_code(output) or type(output)
        message = f"{code.__name__} cannot be sent to {self._process}: {describe_error(error)}"
        return _failing_output(message, isinstance(output, GroupReduction))

    # -- results ----------------------------------------------------------------------

    def pack_completions(
        self, completions: Sequence[Completion], vocab_size: int
    ) -> PackedCompletions:
        """Pack results; a result that cannot be packed becomes an `EvaluationError`."""
        ids: list[tuple[int, bool]] = []  # with `is_checked`
        counts: list[int] = []  # number of values of each `Reduced`, or `_SINGLE`
        values: list[Any] = []
        for query_id, result, error, is_checked in completions:
            ids.append((query_id, is_checked))
            if error is None and type(result) is Reduced:
                counts.append(len(result.values))
                values += result.values
            else:
                counts.append(_SINGLE)
                values.append(result if error is None else error)
        blocks: list[tuple[int, torch.Tensor]] = []  # places of results, and their rows
        for place, value in enumerate(values):
            if _is_row(value, vocab_size):
                blocks.append((place, value.detach()[None]))
                values[place] = None
            elif isinstance(value, GroupResult) and _are_rows(value.columns, vocab_size):
                blocks.append((place, value.columns[0].detach()))
                values[place] = _with_picklable_errors(value._replace(columns=()))
            else:
                values[place] = _with_picklable_errors(value)
        places = [(place, len(rows)) for place, rows in blocks]
        data = self._pack(values, self._unsendable_result)
        return PackedCompletions(
            pickle.dumps((ids, counts, places, data), pickle.HIGHEST_PROTOCOL),
            _joined([rows for _, rows in blocks]) if blocks else None,
        )

    def unpack_completions(self, packed: PackedCompletions) -> list[Completion]:
        """Unpack results; each row is a copy that belongs to the caller."""
        ids, counts, places, data = pickle.loads(packed.data)  # noqa: S301 - our own process's

        def load_error(error: Exception, _is_group: bool) -> object:
            return EvaluationError(
                f"a result cannot be loaded from {self._process}: {describe_error(error)}"
            )

        values = _unpack(data, load_error)
        begin = 0
        for place, count in places:
            assert packed.rows is not None  # noqa: S101 - there are rows
            group, size = values[place], packed.rows.shape[1]
            is_group = isinstance(group, GroupResult)
            rows = torch.empty((count, size) if is_group else (size,), dtype=torch.float32)
            rows.view(count, size).numpy()[:] = packed.rows[begin : begin + count]
            values[place] = group._replace(columns=(rows,)) if is_group else rows
            begin += count
        completions, begin = [], 0
        for (query_id, is_checked), count in zip(ids, counts, strict=True):
            end = begin + (count if count >= 0 else 1)
            if count >= 0:
                completions.append(Completion(query_id, Reduced(tuple(values[begin:end]))))
            elif isinstance(values[begin], Exception):
                completions.append(Completion(query_id, error=values[begin]))
            else:
                completions.append(Completion(query_id, values[begin], None, is_checked))
            begin = end
        return completions

    def _unsendable_result(self, value: Any, error: Exception) -> object:
        return EvaluationError(
            f"a result of type {type(value).__name__} cannot be returned from "
            f"{self._process}: {describe_error(error)}"
        )

    # -- values -----------------------------------------------------------------------

    def _pack(
        self, values: Sequence[Any], substitute: Callable[[Any, Exception], object]
    ) -> PackedValues:
        """Pickle the values that every process can load together, and others by `user_code`.

        Args:
            values: The values.
            substitute: Function that returns the replacement of a value that cannot be pickled.
        """
        groups: dict[tuple[object, bool], tuple[list[int], list[Any]]] = {}
        for place, value in enumerate(values):
            key = (user_code(value), isinstance(value, GroupReduction))
            places, members = groups.setdefault(key, ([], []))
            places.append(place)
            members.append(value)
        parts: list[_Part] = []
        for (_, is_group), (places, members) in groups.items():
            try:
                parts.append(_Part(places, *self._dumps(members), is_group))
            except Exception:  # noqa: BLE001 - an object may raise anything when pickled
                parts += [
                    _Part([place], *self._dumps_alone(value, substitute), is_group)
                    for place, value in zip(places, members, strict=True)
                ]
        return parts

    def _dumps_alone(
        self, value: Any, substitute: Callable[[Any, Exception], object]
    ) -> tuple[bytes, list[_Bytes]]:
        try:
            return self._dumps([value])
        except Exception as error:  # noqa: BLE001 - as above
            return self._dumps([substitute(value, error)])

    def _dumps(self, values: list[Any]) -> tuple[bytes, list[_Bytes]]:
        """Return pickled values, and the memory of their large arrays."""
        by_value = self._dumps_by_value
        module = getattr(user_code(values[0]), "__module__", None)
        if by_value is None or module != "__main__":
            arrays: list[_Bytes] = []

            def is_pickled(buffer: pickle.PickleBuffer) -> bool:
                memory = np.frombuffer(buffer.raw(), np.uint8)
                if len(memory) < _SEPARATE_BYTES:
                    return True
                arrays.append(memory)
                return False

            try:
                data = io.BytesIO()
                _Pickler(data, pickle.HIGHEST_PROTOCOL, buffer_callback=is_pickled).dump(values)
                return data.getvalue(), arrays
            except (pickle.PicklingError, AttributeError, TypeError):
                if by_value is None:
                    raise
        assert by_value is not None  # noqa: S101 - see above
        return by_value(values), []


def _unpack(packed: PackedValues, substitute: Callable[[Exception, bool], object]) -> list[Any]:
    values: list[Any] = [None] * sum(len(part.places) for part in packed)
    for places, data, arrays, is_group in packed:
        try:
            # Arrays that Ray has mapped are read-only, which tensors cannot be.
            buffers = [each if each.flags.writeable else each.copy() for each in arrays]
            members = pickle.loads(data, buffers=buffers)  # noqa: S301 - of a trusted process
        except Exception as error:  # noqa: BLE001 - such as a module that is not installed here
            members = [substitute(error, is_group)] * len(places)
        for place, value in zip(places, members, strict=True):
            values[place] = value
    return values


def user_code(value: Any) -> Any:
    """Return the class or the function of a value that other processes may lack, or None.

    An object of genlm may contain a reduction or a function of the program.
    """
    kind = type(value)
    while kind.__module__.startswith(_OWN):
        inner = getattr(value, "reduction", None)
        value = getattr(value, "function", None) if inner is None else inner
        kind = type(value)
    if kind in _SAFE:
        return None
    return value if kind is FunctionType else kind


def _is_row(value: object, vocab_size: int) -> bool:
    """Whether a value is a row; other tensors are results of reductions."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.shape == (vocab_size,)
        and value.layout == torch.strided
        and not value.is_meta
    )


def _are_rows(columns: tuple[torch.Tensor, ...], vocab_size: int) -> bool:
    """Whether the columns of a population are its rows."""
    if len(columns) != 1 or columns[0].dtype != torch.float32:
        return False
    return columns[0].ndim == 2 and columns[0].shape[1] == vocab_size


def _joined(blocks: Sequence[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return rows as one array; a single block in main memory is not copied."""
    rows = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))
    return rows.cpu().contiguous().numpy()


def picklable_error(error: Exception) -> Exception:
    """Return an exception that another process can unpickle: `error` itself if possible."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - its constructor or attributes may raise anything
        return EvaluationError(describe_error(error))
    return error


def _with_picklable_errors(value: Any) -> Any:
    if isinstance(value, Exception):
        return picklable_error(value)
    if isinstance(value, GroupResult):
        errors = {place: picklable_error(error) for place, error in value.errors.items()}
        return GroupResult(value.columns, errors)
    return value


def _failing_output(reason: str, is_group: bool) -> Reduction | GroupReduction:
    """Return a reduction that stands for one that could not be sent, and fails."""
    return (ColumnsOfFunction if is_group else ReductionOfFunction)(_Failure(reason))


@dataclass(frozen=True)
class _Failure:
    """A function of rows that raises an error."""

    reason: str

    def __call__(self, _rows: torch.Tensor) -> torch.Tensor:
        raise EvaluationError(self.reason)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()  # the other process may not use the device
    try:
        return torch.from_numpy, (tensor.contiguous().numpy(),)
    except (RuntimeError, TypeError):  # numpy has no bfloat16, and no sparse arrays
        # A copy, without the memory of the tensor that it is a view of.
        return tensor.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays on the CPU, which takes a tenth of the time."""

    dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduce_tensor}
