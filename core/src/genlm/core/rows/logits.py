"""Rows of log-probabilities: computation from logits, and checks that they are distributions.

A row is natural-log probabilities over the vocabulary, float32, normalised.
Models often have more logits than the tokenizer has ids (embeddings padded to a
round number) and sometimes fewer (tokens added to the tokenizer only).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import GroupValues
from genlm.core.vocab import Vocabulary

_SUM_TOLERANCE = 1e-2
"""Maximum distance of the sum of a row's probabilities from 1. Rows of a correct engine are
within 1e-4; the larger bound distinguishes a broken computation from coarse rounding."""

_VALUES_ON_CPU = 2**20
"""Maximum number of entries of rows that are computed at once on a CPU: 4 MiB in float32, so
that intermediate results stay in the CPU's caches and memory does not grow with the batch."""

_VALUES_ON_DEVICE = 2**27
"""Maximum number on other devices: 512 MiB in float32, 1,000 rows over 128,000 ids."""

_scratch = threading.local()

_missing: WeakKeyDictionary[Vocabulary, dict[tuple[int, torch.device], torch.Tensor]]
_missing = WeakKeyDictionary()


def rows_from_logits(
    logits: torch.Tensor, vocabulary: Vocabulary, *, reuses_memory: bool = False
) -> torch.Tensor:
    """Normalise logits over exactly the ids that the vocabulary has.

    Logits beyond the vocabulary and those of ids without tokens are removed before the
    normalisation; ids without logits get `-inf`.

    Args:
        logits: Shape `(n, width)`, any floating dtype, any device.
        vocabulary: Vocabulary of the rows.
        reuses_memory: Whether the next calls on this thread may overwrite the result, which
            saves the allocation of memory on a CPU.

    Returns:
        Natural-log probabilities, shape `(n, vocabulary.size)`, float32, on the device of
        `logits`, with `logsumexp` 0 in every row. The result never aliases `logits`.

    Raises:
        TypeError: `logits` is not a tensor.
        ValueError: `logits` is not a matrix.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits is {type(logits).__name__}; expected a torch.Tensor")
    if logits.ndim != 2:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)}; expected rows, shape (n, width)"
        )
    size = vocabulary.size
    known = known_logits(logits, vocabulary).float()
    if known.shape[1] == size:
        is_reused = reuses_memory and known.device.type == "cpu"
        memory = scratch_memory("rows", len(known), size) if is_reused else None
        return torch.log_softmax(known, -1, out=memory)
    rows = torch.log_softmax(known, -1)
    padded = rows.new_full((rows.shape[0], size), float("-inf"))
    padded[:, : rows.shape[1]] = rows
    return padded


def known_logits(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return the logits of the vocabulary's ids, `-inf` for ids that no token has.

    The result has shape `(n, min(width, vocabulary.size))`, the dtype of `logits`, and may
    share memory with `logits`.
    """
    size = vocabulary.size
    known = logits if logits.shape[1] <= size else logits[:, :size]
    if vocabulary.missing_ids:
        index = _missing_index(vocabulary, known.shape[1], known.device)
        known = known.index_fill(1, index, float("-inf"))
    return known


def row_parts(count: int, size: int, device: torch.device) -> list[tuple[int, int]]:
    """Return begin and end of parts of `count` rows of `size` entries, computed at once."""
    values = _VALUES_ON_CPU if device.type == "cpu" else _VALUES_ON_DEVICE
    limit = max(1, values // max(1, size))
    return [(begin, min(begin + limit, count)) for begin in range(0, count, limit)]


def joined_parts(
    parts: Iterable[tuple[torch.Tensor, ...]], count: int
) -> tuple[torch.Tensor, ...]:
    """Concatenate the columns of parts, each copied before the next one is computed.

    Small results that stay in memory while larger tensors are allocated and freed would split
    the memory of these tensors, and the C library would request more from the system for each
    part.

    Args:
        parts: Tensors with an entry for each row of a part; at least one part.
        count: Number of rows.
    """
    joined: tuple[torch.Tensor, ...] = ()
    end = 0
    for columns in parts:
        begin, end = end, end + len(columns[0])
        if end - begin == count:
            return columns
        if not joined:
            joined = tuple(column.new_empty((count, *column.shape[1:])) for column in columns)
        for target, column in zip(joined, columns, strict=True):
            target[begin:end] = column
    return joined


def scratch_memory(use: str, count: int, size: int) -> torch.Tensor:
    """Return uninitialised main memory for some rows, shape `(count, size)`, float32.

    Calls of a thread with the same `use` return the same memory: the C library returns large
    blocks to the system when they are freed, and the page faults of new blocks take longer than
    a softmax.
    """
    memory: torch.Tensor | None = getattr(_scratch, use, None)
    if memory is None or memory.numel() < count * size:
        with torch.inference_mode(False):  # later calls may be outside of it
            memory = torch.empty(count * size, dtype=torch.float32, device="cpu")
        setattr(_scratch, use, memory)
    return memory[: count * size].view(count, size)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor, such as indices, random numbers or masks, on a device.

    A copy from pageable memory to a GPU waits for all operations that were launched before. On
    CUDA the tensor is therefore copied from pinned memory, without waiting.
    """
    is_copied = device.type == "cuda" and tensor.device.type == "cpu"
    if is_copied and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def main_memory(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors in main memory, after one wait for each CUDA device."""
    copies = tuple(tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def device_index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy integers to a device as int64, without waiting for its computation.

    An index that is a list would be copied from pageable memory; see `moved`.
    """
    return moved(torch.tensor(values, dtype=torch.int64, device="cpu"), device)


def copied_rows(rows: torch.Tensor) -> list[torch.Tensor]:
    """Copy each row into separate memory.

    On CUDA a few kernels copy all rows; `torch.unbind_copy` would launch one for each row.
    """
    count, size = rows.shape
    copies = [rows.new_empty(size) for _ in range(count)]
    torch.split_with_sizes_copy(rows.reshape(-1), [size] * count, out=copies)
    return copies


def checked_values(computed: Any, count: int, size: int, method: str) -> GroupValues:
    """Check the rows over `size` ids, or the logits, of `count` sequences, and detach them.

    Raises:
        EvaluationError: The result is not `GroupValues` of a tensor, or the tensor has another
            shape or dtype.
    """
    if not isinstance(computed, GroupValues):
        raise EvaluationError(
            f"{method} returned {type(computed).__name__}; expected "
            f"GroupValues(values, are_logits=...)"
        )
    values: Any = computed.values
    if not isinstance(values, torch.Tensor):
        raise EvaluationError(
            f"{method} returned {type(values).__name__}; expected a torch.Tensor with one row "
            f"for each sequence"
        )
    shape = tuple(values.shape)
    if computed.are_logits:
        is_valid, expected = len(shape) == 2 and shape[0] == count, f"({count}, ...)"
    else:
        is_valid = shape == (count, size) and values.dtype == torch.float32
        expected = f"({count}, {size}), torch.float32"
    if not is_valid:
        raise EvaluationError(
            f"{method} returned {'logits' if computed.are_logits else 'rows'} of shape "
            f"{shape}, {values.dtype}, for {count} sequences; expected {expected}"
        )
    return GroupValues(values.detach(), computed.are_logits)


def invalid_rows(
    rows: Sequence[torch.Tensor] | torch.Tensor, size: int, *, normalised: bool = False
) -> dict[int, Exception]:
    """Find the rows that are not distributions: NaN, +inf, or a sum far from 1.

    Reads the sums of the rows from each device, which waits until the rows are computed.

    Args:
        rows: Candidates for natural-log probabilities, each of shape `(size,)`, float32, or
            all of them in one tensor.
        size: Number of ids in the vocabulary.
        normalised: Whether `rows`, one tensor, is a result of `rows_from_logits`: such rows
            can only be invalid by NaN, which is found without exponentials.

    Returns:
        An error for each invalid row, by its position.
    """
    if isinstance(rows, torch.Tensor) and rows.ndim == 2:
        if normalised:
            is_broken = rows[:, 0].isnan()  # either all entries of a row are NaN or none
            broken = is_broken.nonzero()[:, 0].tolist() if is_broken.any() else []
            return _invalid_sums(rows, broken, [math.nan] * len(broken), size)
        return _invalid_sums(rows, range(len(rows)), _sums(rows), size)
    errors: dict[int, Exception] = {}
    on_device: dict[torch.device, list[int]] = {}
    for position, row in enumerate(rows):
        if row.shape == (size,) and row.dtype == torch.float32:
            on_device.setdefault(row.device, []).append(position)
        else:
            errors[position] = _invalid_row(
                f"shape {tuple(row.shape)}, {row.dtype}; expected ({size},), torch.float32"
            )
    for positions in on_device.values():
        errors |= _invalid_sums(rows, positions, _sums([rows[i] for i in positions]), size)
    return errors


def _invalid_sums(
    rows: Sequence[torch.Tensor] | torch.Tensor,
    positions: Sequence[int],
    sums: list[float],
    size: int,
) -> dict[int, Exception]:
    errors: dict[int, Exception] = {}
    for position, total in zip(positions, sums, strict=True):
        if not abs(total - 1) <= _SUM_TOLERANCE:  # true for NaN
            nans = int(rows[position].isnan().sum())
            problem = f"NaN at {nans} of {size} ids" if nans else f"a sum of {total:.6g}"
            errors[position] = _invalid_row(problem)
    return errors


def _sums(rows: list[torch.Tensor] | torch.Tensor) -> list[float]:
    """Sum the probabilities of each row; one transfer for each part of rows on a GPU."""
    first = rows if isinstance(rows, torch.Tensor) else rows[0]
    sums: list[float] = []
    for begin, end in row_parts(len(rows), first.shape[-1], first.device):
        part = rows[begin:end]
        # In place where the memory is new: a second allocation of this size is slow on CPUs.
        weights = torch.stack(part).exp_() if isinstance(part, list) else part.detach().exp()
        sums += weights.sum(-1).tolist()
    return sums


def _invalid_row(problem: str) -> EvaluationError:
    return invalid_computation(f"a row that is not a distribution: {problem}")


def invalid_computation(result: str) -> EvaluationError:
    """Return the error of an engine whose results, as described, are not distributions."""
    return EvaluationError(
        f"the engine computed {result}. The weights contain NaN, the computation overflowed, "
        f"or the engine does not serve this model correctly: try dtype='float32' or another "
        f"engine"
    )


def _missing_index(vocabulary: Vocabulary, width: int, device: torch.device) -> torch.Tensor:
    """Return the ids below `width` that no token has, copied to each device once."""
    indices = _missing.setdefault(vocabulary, {})
    if (width, device) not in indices:
        missing = [token_id for token_id in vocabulary.missing_ids if token_id < width]
        with torch.inference_mode(False):  # later calls may compute gradients
            index = torch.tensor(missing, dtype=torch.long, device=device)
        indices[width, device] = index
    return indices[width, device]
