"""Reductions: functions of rows, requested in place of rows.

A reduction is computed for all requests of its class in a batch at once, on the device of the
rows, before rows are copied for their callers; only its results leave the device. User-defined
reductions derive from `Reduction`:

    @dataclass(frozen=True)
    class Entropy(genlm.Reduction):
        @classmethod
        def compute(cls, rows, requests):
            return torch.special.entr(rows.exp()).sum(-1).tolist()
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from genlm.core.base.error_handling import compute_error
from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import Reduced, Reduction
from genlm.core.rows.draws import batch_draw, batch_log_mass
from genlm.core.rows.logits import copied_rows, invalid_rows, moved, row_parts, rows_from_logits
from genlm.core.rows.masks import Mask
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.selection import batch_top_k

if TYPE_CHECKING:
    from genlm.core.queries.query import Outputs
    from genlm.core.vocab import Vocabulary

__all__ = [
    "Draw",
    "DrawnToken",
    "LogMass",
    "ScoredToken",
    "TargetScore",
    "TokenLogprobs",
    "TopK",
    "TopTokens",
    "reduce_logits",
    "reduce_rows",
    "result_count_error",
]

_NUMBERS = frozenset({int, float, bool})

_ID_BYTES = 40
"""Memory of a Python integer and of the reference to it in a tuple."""


@dataclass(frozen=True)
class TokenLogprobs(Reduction):
    """The log-probabilities of some tokens: shape `(len(token_ids),)`, float32, on the CPU."""

    token_ids: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Memory of the ids."""
        return _ID_BYTES * len(self.token_ids)

    @classmethod
    def compute(
        cls, rows: torch.Tensor, requests: Sequence[TokenLogprobs]
    ) -> Sequence[torch.Tensor]:
        """Gather the tokens of all requests in one operation."""
        sizes = [len(request.token_ids) for request in requests]
        ids = torch.tensor(
            [token_id for request in requests for token_id in request.token_ids],
            dtype=torch.long,
        )
        places = torch.arange(len(requests)).repeat_interleave(torch.tensor(sizes))
        logprobs = rows[moved(places, rows.device), moved(ids, rows.device)].cpu()
        return [part.clone() for part in torch.split(logprobs, sizes)]


class TopTokens(NamedTuple):
    """The most likely tokens in descending order; ties in ascending order of ids.

    Attributes:
        logprobs: Natural-log probabilities, shape `(k,)`, float32, on the CPU.
        token_ids: Ids of the tokens, shape `(k,)`, int64, on the CPU.
    """

    logprobs: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True)
class TopK(Reduction):
    """The `k` most likely tokens: `TopTokens`."""

    k: int

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[TopK]) -> Sequence[TopTokens]:
        """Select for the largest k; results for smaller k are prefixes."""
        largest_k = max(request.k for request in requests)
        logprobs, ids = (column.cpu() for column in batch_top_k(rows, largest_k))
        return [
            TopTokens(logprobs[place, : request.k].clone(), ids[place, : request.k].clone())
            for place, request in enumerate(requests)
        ]


@dataclass(frozen=True)
class LogMass(Reduction):
    """The log-probability of a set of tokens: a float, `-inf` for the empty set."""

    mask: Mask

    @property
    def nbytes(self) -> int:
        """Memory of the mask."""
        return self.mask.nbytes

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[LogMass]) -> Sequence[float]:
        """Sum under all masks at once."""
        weights = RowWeights(rows.shape, [request.mask for request in requests])
        masses: list[float] = batch_log_mass(rows, weights).tolist()
        return masses


class DrawnToken(NamedTuple):
    """A drawn token.

    If no token of the mask is possible (the mask is empty, or all its tokens have probability
    0), no token is drawn: `token_id` is -1, and the other attributes are `-inf`. A particle to
    whose log-weight `log_mass` is added then has weight 0.

    Attributes:
        token_id: Id of the token.
        logprob: The model's log-probability of the token.
        log_mass: Log-probability of the mask in the row; 0 without a mask.
        draw_logprob: The log-probability with which the token was drawn: under the mask, the
            temperature, top-k and top-p. Without the last three `logprob - log_mass`.
    """

    token_id: int
    logprob: float
    log_mass: float
    draw_logprob: float


@dataclass(frozen=True)
class Draw(Reduction):
    """A token drawn from the row, or the most likely one at temperature 0: `DrawnToken`.

    Attributes:
        uniform: Random number in [0, 1).
        temperature: Divisor of the log-probabilities.
        mask: Allowed tokens; None for all.
        top_k: Number of most likely allowed tokens; None for no limit.
        top_p: Share of the probability at the temperature after top-k, in (0, 1], to which the
            most likely tokens are limited; 1 for no limit.
    """

    uniform: float
    temperature: float = 1.0
    mask: Mask | None = None
    top_k: int | None = None
    top_p: float = 1.0

    is_cacheable = False  # no later request has the same random number

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Draw]) -> Sequence[DrawnToken]:
        """Draw from all rows at once."""
        masks = [request.mask for request in requests]
        drawn = batch_draw(
            rows,
            [request.uniform for request in requests],
            RowWeights(
                rows.shape,
                masks if any(mask is not None for mask in masks) else None,
                temperature=[request.temperature for request in requests],
                top_k=[request.top_k for request in requests],
                top_p=[request.top_p for request in requests],
            ),
        )
        # One transfer, because every transfer waits for the device; float32 represents ids
        # below 2**24.
        columns = torch.stack([drawn.token_ids.float(), *drawn[1:]]).cpu()
        return [DrawnToken(int(token_id), *logs) for token_id, *logs in columns.T.tolist()]


class ScoredToken(NamedTuple):
    """The log-probability of a token, and whether no token is more likely."""

    logprob: float
    is_top: bool


@dataclass(frozen=True)
class TargetScore(Reduction):
    """The score of one token: `ScoredToken`."""

    token_id: int

    @classmethod
    def compute(
        cls, rows: torch.Tensor, requests: Sequence[TargetScore]
    ) -> Sequence[ScoredToken]:
        """Gather the tokens, and compare them with the largest entries."""
        ids = torch.tensor([request.token_id for request in requests])
        logprobs = rows.gather(1, moved(ids, rows.device)[:, None])[:, 0]
        is_top = logprobs >= rows.amax(-1)
        return list(map(ScoredToken, logprobs.tolist(), is_top.tolist()))


def reduce_rows(
    rows: torch.Tensor,
    outputs: Sequence[Outputs],
    *,
    normalised: bool = False,
    row_of: Sequence[int] | None = None,
) -> list[Reduced | Exception]:
    """Compute the outputs of queries from their rows, with few calls per class of reductions.

    Args:
        rows: Natural-log probabilities, shape `(n, vocab_size)`, float32; not changed.
        outputs: Requested outputs of each query: `Query.outputs`.
        normalised: Whether `rows` are a result of `rows_from_logits`, whose sums need no check.
        row_of: The row of each query; by default row i is that of query i.

    Returns:
        The `Reduced` of each query, or the error of a row that is not a distribution. Rows
        among the values are copies.
    """
    row_of = range(len(outputs)) if row_of is None else row_of
    invalid = invalid_rows(rows, rows.shape[1], normalised=normalised)
    results: list[list[Any]] = [[None] * len(query_outputs) for query_outputs in outputs]
    groups: dict[type, list[tuple[int, int]]] = {}
    for index, query_outputs in enumerate(outputs):
        if row_of[index] not in invalid:
            for place, output in enumerate(query_outputs):
                groups.setdefault(type(output), []).append((index, place))
    for kind, members in groups.items():
        for begin, end in row_parts(len(members), rows.shape[1], rows.device):
            part = members[begin:end]
            indices = [row_of[index] for index, _ in part]
            if kind is type(None):
                values: Sequence[Any] = copied_rows(_select_rows(rows, indices))
            else:
                requests = [outputs[index][place] for index, place in part]
                values = _compute(kind.compute, _select_rows(rows, indices), requests)  # type: ignore[attr-defined]
            for (index, place), value in zip(part, values, strict=True):
                results[index][place] = value
    return [
        invalid[row] if row in invalid else Reduced(tuple(values))
        for row, values in zip(row_of, results, strict=True)
    ]


def reduce_logits(
    logits: torch.Tensor,
    vocabulary: Vocabulary,
    outputs: Sequence[Outputs],
) -> list[Reduced | Exception]:
    """Compute the outputs of queries from logits, as `reduce_rows` of `rows_from_logits`.

    On a CPU, a few rows are computed at a time, so that they stay in its caches.

    Args:
        logits: Logits as for `rows_from_logits`; not changed.
        vocabulary: As `rows_from_logits`.
        outputs: As `reduce_rows`.
    """
    results: list[Reduced | Exception] = []
    for begin, end in row_parts(len(logits), logits.shape[1], logits.device):
        rows = rows_from_logits(logits[begin:end], vocabulary)
        results += reduce_rows(rows, outputs[begin:end], normalised=True)
    return results


def _select_rows(rows: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return rows by index: a view of consecutive rows, else a copy."""
    first, count = indices[0], len(indices)
    if indices == list(range(first, first + count)):
        return rows[first : first + count]
    return rows[moved(torch.tensor(indices), rows.device)]


def _own_copy(value: Any, rows: torch.Tensor) -> Any:
    """Copy values that share memory with the rows or are views of larger tensors or arrays."""
    if type(value) in _NUMBERS:  # the most frequent results, with tuples of numbers
        return value
    if isinstance(value, (tuple, list)) and not _NUMBERS.issuperset(map(type, value)):
        parts = [_own_copy(part, rows) for part in value]
        if not all(map(operator.is_, parts, value)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        return {key: _own_copy(part, rows) for key, part in value.items()}
    elif isinstance(value, torch.Tensor) and _is_view(value, rows):
        return value.clone()
    elif isinstance(value, np.ndarray) and value.base is not None:
        return value.copy()
    return value


def result_count_error(
    requests: Sequence[Reduction], results: Sequence[Any]
) -> EvaluationError:
    """Return an error for a `compute` that did not return one result for each request."""
    return EvaluationError(
        f"{type(requests[0]).__name__}.compute returned {len(results)} results for "
        f"{len(requests)} requests; return one for each"
    )


def _is_view(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    is_part = storage.nbytes() > tensor.nbytes
    return is_part or storage.data_ptr() == rows.untyped_storage().data_ptr()


def _compute(
    compute: Callable[[torch.Tensor, Sequence[Any]], Sequence[Any]],
    rows: torch.Tensor,
    requests: Sequence[Any],
) -> Sequence[Any]:
    try:
        values = compute(rows, requests)
        if len(values) == len(requests):
            return [_own_copy(value, rows) for value in values]
        problem: Exception = result_count_error(requests, values)
    except Exception as error:  # noqa: BLE001 - it fails the requests that cause it
        problem = compute_error(type(requests[0]), error)
    if len(requests) == 1:
        return [problem]
    return [
        value
        for index, request in enumerate(requests)
        for value in _compute(compute, rows[index : index + 1], [request])
    ]
