"""Draws, log normalisers and entries of log-weight rows, for concurrent calls at once.

Rows remain on their device; the results of all rows of a device and length are copied to the
host at once. The dtype is float64, or float32 on Apple GPUs, which do not support float64. The
thread of the caller's event loop computes. Draws use torch's global generator in the order of
the calls, so `torch.manual_seed` makes them reproducible.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import genlm
from genlm.plugin import LoopBatches, describe_error, draw_tokens

__all__ = [
    "DRAW_METHODS",
    "draw_from",
    "gumbel_max",
    "inverse_cdf",
    "logp_at",
    "logsumexp_from",
    "multinomial",
    "set_draw_method",
]

Row = torch.Tensor | npt.NDArray[Any] | Sequence[float]
"""Log-weights of one vocabulary, `(vocab,)`, not necessarily normalised."""

Picker = Callable[[torch.Tensor], torch.Tensor]
"""Function from rows of log-probabilities `(n, vocab)` to drawn indices `(n,)`."""

MAX_VALUES = 2**22
"""Maximum number of entries in a reduction; 32 MiB in float64, as 32 rows of 128,000 tokens."""


# -- draw methods --------------------------------------------------------------------------


def gumbel_max(logps: torch.Tensor) -> torch.Tensor:
    """Draw the index of the largest sum of log-probability and Gumbel noise.

    Args:
        logps: Log-probabilities, `(vocab,)` or `(n, vocab)`, not necessarily normalised. If all
            entries of a row are -inf, an arbitrary index is drawn.

    Returns:
        Drawn indices, `()` or `(n,)`, int64.
    """
    logps = _wide(logps)
    noise = torch.rand(logps.shape, dtype=logps.dtype, device=logps.device)
    # Noise of -inf, from 0, would make a possible index as unlikely as impossible ones.
    noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_().log_()
    return torch.sub(logps, noise, out=noise).argmax(-1)


def multinomial(logps: torch.Tensor) -> torch.Tensor:
    """Draw an index with `torch.multinomial`; see `gumbel_max`."""
    logps = _wide(logps)
    possible = logps.masked_fill(logps.amax(-1, keepdim=True).isneginf(), 0.0)
    return torch.multinomial(possible.softmax(-1), 1).squeeze(-1)


def inverse_cdf(logps: torch.Tensor) -> torch.Tensor:
    """Draw an index by inverting the cumulative distribution; see `gumbel_max`.

    `genlm.plugin.draw_tokens` draws with one uniform number per row.
    """
    rows = _wide(logps).reshape(-1, logps.shape[-1])
    uniforms = torch.rand((len(rows),), dtype=rows.dtype, device=rows.device).tolist()
    drawn = draw_tokens(rows, [1.0] * len(rows), uniforms)
    # Rows without support have -1; the other methods return an arbitrary index.
    return drawn.clamp_(min=0).reshape(logps.shape[:-1])


DRAW_METHODS: dict[str, Picker] = {
    "gumbel_max": gumbel_max,
    "multinomial": multinomial,
    "inverse_cdf": inverse_cdf,
}
"""Methods that `set_draw_method` accepts by name."""

_draw_method: dict[str, Picker] = {"picker": gumbel_max}


def set_draw_method(method: str | Picker) -> None:
    """Set the method of `draw_from` in this process; the default is `"gumbel_max"`.

    Args:
        method: A name in `DRAW_METHODS`, or a function from log-probabilities `(n, vocab)`
            to indices `(n,)`.

    Raises:
        ValueError: The name is unknown.
        TypeError: The argument is neither a name nor callable.
    """
    if isinstance(method, str):
        if method not in DRAW_METHODS:
            raise ValueError(
                f"method={method!r}: expected one of {', '.join(DRAW_METHODS)}, or a callable"
            )
        method = DRAW_METHODS[method]
    if not callable(method):
        raise TypeError(f"method={method!r}: expected a name in DRAW_METHODS or a callable")
    _draw_method["picker"] = method


# -- calls --------------------------------------------------------------------------------


async def draw_from(weights: Row, target: Row | None = None) -> tuple[int, float, float]:
    """Draw an index from a row of log-weights, and compute its importance weight.

    Args:
        weights: Log-weights to draw from, `(vocab,)`.
        target: Log-weights of the target distribution for a step of importance sampling with
            the proposal `weights`.

    Returns:
        The index; the log normaliser of the row, or `target[index] - logp` with a target; and
        `logp`, the log-probability of the drawn index. If all entries are -inf: an arbitrary
        index, -inf and -inf.

    Raises:
        ValueError: A row is not one-dimensional, is not real, has NaN or an infinite sum, or
            the lengths differ.
        EvaluationError: The method of `set_draw_method` raised.
    """
    row = _as_row(weights)
    target_row = None if target is None else _as_row(target).to(row.device)
    if target_row is not None and len(target_row) != len(row):
        raise ValueError(
            f"a target of {len(target_row)} log-weights for a proposal of {len(row)}; both "
            f"must have the same vocabulary"
        )
    drawn: tuple[int, float, float] = await _submit(_draws, row, target_row)
    return drawn


async def logsumexp_from(weights: Row) -> float:
    """Return the log normaliser of a row of log-weights.

    Raises:
        ValueError: The row is invalid; see `draw_from`.
    """
    total: float = await _submit(_totals, _as_row(weights))
    return total


async def logp_at(weights: Row, index: int) -> float:
    """Return one entry of a row of log-weights.

    Args:
        weights: Log-weights, `(vocab,)`.
        index: Index of the entry; negative indices count from the end.

    Raises:
        IndexError: The index is out of range.
        ValueError: The row is not one-dimensional or not real.
    """
    row = _as_row(weights)
    index = operator.index(index)
    if not -len(row) <= index < len(row):
        raise IndexError(f"index {index} of a row of {len(row)} log-weights")
    value: float = await _submit(_entries, row, index)
    return value


def _as_row(weights: Row) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor):
        try:
            weights = torch.as_tensor(np.asarray(weights))
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected a row of log-weights; {error}") from error
    if weights.ndim != 1 or not len(weights) or weights.is_complex():
        raise ValueError(
            f"expected a row of log-weights, real numbers of shape (vocab,); got shape "
            f"{tuple(weights.shape)} of {weights.dtype}"
        )
    return weights.detach()


# -- concurrent calls ---------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Call:
    """A pending call; `detail` is the target or the index."""

    reduce: Callable[[list[_Call]], list[Any]]
    row: torch.Tensor
    detail: Any
    future: asyncio.Future[Any]


async def _submit(
    reduce: Callable[[list[_Call]], list[Any]], row: torch.Tensor, detail: Any = None
) -> Any:
    loop = asyncio.get_running_loop()
    call = _Call(reduce, row, detail, loop.create_future())
    _calls.add(loop, call)
    return await call.future


def _complete(calls: list[_Call]) -> None:
    """Complete the calls of an event loop."""
    batches: dict[Any, list[_Call]] = {}
    for call in calls:
        if not call.future.done():  # else it was cancelled
            key = (call.reduce, call.row.device, len(call.row))
            batches.setdefault(key, []).append(call)
    for batch in batches.values():
        size = max(1, MAX_VALUES // len(batch[0].row))
        for begin in range(0, len(batch), size):
            _finish(batch[begin : begin + size])


_calls = LoopBatches(_complete)
"""Pending calls of each event loop."""


def _finish(batch: list[_Call]) -> None:
    """Complete the futures of a batch with results or errors."""
    try:
        results = batch[0].reduce(batch)
    except Exception as error:  # noqa: BLE001 - passed to the callers
        results = [_failure(error) for _ in batch]
    for call, result in zip(batch, results, strict=True):
        if isinstance(result, Exception):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


def _failure(cause: Exception) -> genlm.EvaluationError:
    failure = genlm.EvaluationError(f"drawing failed: {describe_error(cause)}")
    failure.__cause__ = cause
    return failure


def _draws(batch: list[_Call]) -> list[Any]:
    rows = _stacked(batch)
    totals = rows.logsumexp(-1)
    empty = totals.isneginf()
    logps = rows.sub_(totals.masked_fill(empty, 0.0).unsqueeze(-1))
    # Rows that are not distributions, which fail below, must not make the method fail.
    possible = torch.where((totals < math.inf).unsqueeze(-1), logps, 0.0)
    index = torch.as_tensor(_draw_method["picker"](possible), device=rows.device).reshape(
        len(batch)
    )
    logp = logps.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    logw = totals.clone()
    for place, call in enumerate(batch):
        if call.detail is not None:
            logw[place] = call.detail[index[place : place + 1]][0] - logp[place]
    columns = torch.stack(
        [totals, index.to(rows.dtype), logw.masked_fill(empty, -math.inf), logp]
    )
    return [
        _or_error(total, (int(drawn), weight, logprob))
        for total, drawn, weight, logprob in zip(*columns.tolist(), strict=True)
    ]


def _totals(batch: list[_Call]) -> list[Any]:
    return [_or_error(total, total) for total in _stacked(batch).logsumexp(-1).tolist()]


def _entries(batch: list[_Call]) -> list[Any]:
    entries: list[Any] = torch.stack([_wide(call.row[call.detail]) for call in batch]).tolist()
    return entries


def _or_error(total: float, result: Any) -> Any:
    """Return the result, or an error if the sum of the log-weights is not finite."""
    if total < math.inf:
        return result
    return ValueError(f"log-weights whose sum is e^{total}; expected a finite sum, without NaN")


def _stacked(batch: list[_Call]) -> torch.Tensor:
    return torch.stack([_wide(call.row) for call in batch])


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
