"""Draws, normalizers and entries of log-weight rows, concurrent calls in one reduction.

Rows stay on their device, and one copy to the host brings the answers of all rows of a
device and length. Computed in float64 (on Apple's GPUs, which lack it, in float32), on the
thread of the event loop that asks. Draws take their randomness from torch's global generator
in the order of the calls, so `torch.manual_seed` makes them reproducible.
"""

from __future__ import annotations

import asyncio
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import genlm
from genlm.plugin import draw_tokens

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
"""From rows of log-probabilities `(n, vocab)` to the index drawn from each, `(n,)`."""

MAX_ITERATIONS = 8
"""Maximum number of event loop iterations for which calls wait for further calls."""

MOST_VALUES = 2**22
"""Maximum number of entries in a reduction: 32 MiB in float64, 32 rows of 128,000 tokens."""


# -- methods of drawing -------------------------------------------------------------------


def gumbel_max(logps: torch.Tensor) -> torch.Tensor:
    """Draw the index of the largest sum of log-probability and Gumbel noise.

    Args:
        logps: Log-probabilities, `(vocab,)` or `(n, vocab)`; they need not be normalised. An
            arbitrary index is drawn from a row in which all are -inf.

    Returns:
        The index of each row, `()` or `(n,)`, int64.
    """
    logps = _wide(logps)
    noise = torch.rand(logps.shape, dtype=logps.dtype, device=logps.device)
    # Noise of -inf, from 0, would make the only possible index as bad as the others.
    noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_().log_()
    return torch.sub(logps, noise, out=noise).argmax(-1)


def multinomial(logps: torch.Tensor) -> torch.Tensor:
    """Draw an index by `torch.multinomial`; as `gumbel_max`."""
    logps = _wide(logps)
    possible = logps.masked_fill(logps.amax(-1, keepdim=True).isneginf(), 0.0)
    return torch.multinomial(possible.softmax(-1), 1).squeeze(-1)


def inverse_cdf(logps: torch.Tensor) -> torch.Tensor:
    """Draw an index by inverting the cumulative distribution; as `gumbel_max`.

    Takes one uniform number for each row, from which `genlm.plugin.draw_tokens` draws.
    """
    rows = _wide(logps).reshape(-1, logps.shape[-1])
    uniforms = torch.rand((len(rows),), dtype=rows.dtype, device=rows.device).tolist()
    drawn = draw_tokens(rows, [1.0] * len(rows), uniforms)
    # Rows without support have -1; the other methods return an index of theirs too.
    return drawn.clamp_(min=0).reshape(logps.shape[:-1])


DRAW_METHODS: dict[str, Picker] = {
    "gumbel_max": gumbel_max,
    "multinomial": multinomial,
    "inverse_cdf": inverse_cdf,
}
"""Methods that `set_draw_method` accepts by name."""

_chosen: dict[str, Picker] = {"picker": gumbel_max}


def set_draw_method(method: str | Picker) -> None:
    """Choose how `draw_from` draws, for this process; by default `"gumbel_max"`.

    Args:
        method: A name in `DRAW_METHODS`, or a function from log-probabilities `(n, vocab)`
            to indices `(n,)`.

    Raises:
        ValueError: Another name.
        TypeError: It is neither a name nor callable.
    """
    if isinstance(method, str):
        if method not in DRAW_METHODS:
            raise ValueError(
                f"method={method!r}: expected one of {', '.join(DRAW_METHODS)}, or a callable"
            )
        method = DRAW_METHODS[method]
    if not callable(method):
        raise TypeError(f"method={method!r}: expected a name in DRAW_METHODS or a callable")
    _chosen["picker"] = method


# -- calls --------------------------------------------------------------------------------


async def draw_from(weights: Row, target: Row | None = None) -> tuple[int, float, float]:
    """Draw an index from a row of log-weights, and weigh it.

    Args:
        weights: Log-weights to draw from, `(vocab,)`.
        target: Log-weights of the same indices, which makes this a step of importance
            sampling: `weights` is the proposal.

    Returns:
        The index; the log of the row's sum, or with a target `target[index] - logp`; and
        `logp`, the log-probability with which the index was drawn. From a row in which all
        are -inf an arbitrary index, -inf and -inf.

    Raises:
        ValueError: A row that is not one-dimensional, holds no real numbers or NaN, or sums
            to infinity, or a target of another length.
        EvaluationError: The method given to `set_draw_method` raised.
    """
    row = _checked(weights)
    other = None if target is None else _checked(target).to(row.device)
    if other is not None and len(other) != len(row):
        raise ValueError(
            f"a target of {len(other)} log-weights for a proposal of {len(row)}; both are over "
            f"the same vocabulary"
        )
    drawn: tuple[int, float, float] = await _answer(_draws, row, other)
    return drawn


async def logsumexp_from(weights: Row) -> float:
    """Return the log of the sum of a row of log-weights.

    Raises:
        ValueError: As `draw_from`.
    """
    total: float = await _answer(_totals, _checked(weights))
    return total


async def logp_at(weights: Row, index: int) -> float:
    """Return one entry of a row of log-weights.

    Args:
        weights: Log-weights, `(vocab,)`.
        index: Index of the entry; negative indices count from the end.

    Raises:
        IndexError: The index is out of range.
        ValueError: The row is not one-dimensional or holds no real numbers.
    """
    row = _checked(weights)
    index = operator.index(index)
    if not -len(row) <= index < len(row):
        raise IndexError(f"index {index} of a row of {len(row)} log-weights")
    value: float = await _answer(_entries, row, index)
    return value


def _checked(weights: Row) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor):
        try:
            weights = torch.as_tensor(np.asarray(weights))
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected a row of log-weights; {error}") from error
    if weights.ndim != 1 or not len(weights) or weights.is_complex():
        raise ValueError(
            f"expected a row of log-weights, real numbers of shape (vocab,); found shape "
            f"{tuple(weights.shape)} of {weights.dtype}"
        )
    return weights.detach()


# -- concurrent calls ---------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Call:
    """A call that waits for its answer; `detail` is the target or the index."""

    reduce: Callable[[list[_Call]], list[Any]]
    row: torch.Tensor
    detail: Any
    future: asyncio.Future[Any]


_waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Call]] = (
    weakref.WeakKeyDictionary()
)
"""The calls of each event loop that will be answered together."""


async def _answer(
    reduce: Callable[[list[_Call]], list[Any]], row: torch.Tensor, detail: Any = None
) -> Any:
    loop = asyncio.get_running_loop()
    call = _Call(reduce, row, detail, loop.create_future())
    calls = _waiting.setdefault(loop, [])
    calls.append(call)
    if len(calls) == 1:
        loop.call_soon(_answer_all, loop, 0, MAX_ITERATIONS)
    return await call.future


def _answer_all(loop: asyncio.AbstractEventLoop, before: int, iterations: int) -> None:
    """Answer the calls of an event loop once an iteration has added no further ones."""
    calls = _waiting[loop]
    if len(calls) > before and iterations:
        loop.call_soon(_answer_all, loop, len(calls), iterations - 1)
        return
    del _waiting[loop]
    alike: dict[Any, list[_Call]] = {}
    for call in calls:
        if not call.future.done():  # else it was cancelled
            kind = (call.reduce, call.row.device, len(call.row))
            alike.setdefault(kind, []).append(call)
    for batch in alike.values():
        size = max(1, MOST_VALUES // len(batch[0].row))
        for begin in range(0, len(batch), size):
            _finish(batch[begin : begin + size])


def _finish(batch: list[_Call]) -> None:
    """Finish the futures of a batch, each with its answer or an error."""
    try:
        answers = batch[0].reduce(batch)
    except Exception as error:  # noqa: BLE001 - passed to the callers
        answers = [_failure(error) for _ in batch]
    for call, answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            call.future.set_exception(answer)
        else:
            call.future.set_result(answer)


def _failure(cause: Exception) -> genlm.EvaluationError:
    failure = genlm.EvaluationError(f"drawing failed: {type(cause).__name__}: {cause}")
    failure.__cause__ = cause
    return failure


def _draws(batch: list[_Call]) -> list[Any]:
    rows = _stacked(batch)
    totals = rows.logsumexp(-1)
    empty = totals.isneginf()
    logps = rows.sub_(totals.masked_fill(empty, 0.0).unsqueeze(-1))
    # A method may refuse all rows for one that is not a distribution, which fails below.
    possible = torch.where((totals < math.inf).unsqueeze(-1), logps, 0.0)
    index = torch.as_tensor(_chosen["picker"](possible), device=rows.device).reshape(len(batch))
    logp = logps.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    logw = totals.clone()
    for place, call in enumerate(batch):
        if call.detail is not None:
            logw[place] = call.detail[index[place : place + 1]][0] - logp[place]
    found = torch.stack(
        [totals, index.to(rows.dtype), logw.masked_fill(empty, -math.inf), logp]
    )
    return [
        _checked_total(total, (int(drawn), weight, logprob))
        for total, drawn, weight, logprob in zip(*found.tolist(), strict=True)
    ]


def _totals(batch: list[_Call]) -> list[Any]:
    return [_checked_total(total, total) for total in _stacked(batch).logsumexp(-1).tolist()]


def _entries(batch: list[_Call]) -> list[Any]:
    entries: list[Any] = torch.stack([_wide(call.row[call.detail]) for call in batch]).tolist()
    return entries


def _checked_total(total: float, answer: Any) -> Any:
    """Return the answer, or an error if the sum of the log-weights is not finite."""
    if total < math.inf:
        return answer
    return ValueError(f"log-weights whose sum is e^{total}; expected a finite sum, without NaN")


def _stacked(batch: list[_Call]) -> torch.Tensor:
    return torch.stack([_wide(call.row) for call in batch])


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
