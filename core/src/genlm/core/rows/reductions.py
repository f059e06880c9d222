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

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from genlm.core.base.error_handling import compute_error, result_count_error
from genlm.core.queries.query import Reduced, Reduction
from genlm.core.rows.draws import batch_log_mass
from genlm.core.rows.group_reductions import DrawColumns
from genlm.core.rows.logits import (
    copied_rows,
    invalid_rows,
    known_logits,
    moved,
    row_parts,
    rows_from_logits,
    scratch_memory,
)
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
]

_NUMBERS = frozenset({int, float, bool})

_NO_REDUCTION = type(None)
"""Type of the output that stands for the row."""

_Compute: TypeAlias = Callable[[torch.Tensor, Sequence[Any]], Sequence[Any]]

_Place: TypeAlias = tuple[int, int]
"""Index of a query, and place of an output among those of the query."""

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

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        """Whether the draw sets nothing but a mask."""
        return self.temperature == 1 and self.top_k is None and self.top_p >= 1

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Draw]) -> Sequence[DrawnToken]:
        """Draw from all rows at once."""
        places = torch.arange(len(requests))
        columns = _draw_columns(rows, requests).compute(rows, places, places)
        return _drawn_tokens(columns)

    @classmethod
    def compute_from_logits(
        cls, logits: torch.Tensor, requests: Sequence[Draw]
    ) -> Sequence[DrawnToken] | None:
        """Draw from all logits at once; see `DrawColumns.compute_from_logits`."""
        places = torch.arange(len(requests))
        columns = _draw_columns(logits, requests).compute_from_logits(logits, places, places)
        return None if columns is None else _drawn_tokens(columns)


def _draw_columns(values: torch.Tensor, requests: Sequence[Draw]) -> DrawColumns:
    masks = [request.mask for request in requests]
    weights = RowWeights(
        values.shape,
        masks if any(mask is not None for mask in masks) else None,
        temperature=_setting([request.temperature for request in requests]),
        top_k=_setting([request.top_k for request in requests]),
        top_p=_setting([request.top_p for request in requests]),
    )
    return DrawColumns(weights, np.array([request.uniform for request in requests]))


def _setting(values: list[Any]) -> Any:
    """Return a setting of requests: one value if all are equal, which is faster."""
    return values[0] if values.count(values[0]) == len(values) else values


def _drawn_tokens(columns: tuple[torch.Tensor, ...]) -> list[DrawnToken]:
    # One transfer, because every transfer waits for the device; float32 represents ids
    # below 2**24.
    token_ids, *logs = columns
    numbers = torch.stack([token_ids.float(), *logs]).cpu()
    return [DrawnToken(int(token_id), *logs) for token_id, *logs in numbers.T.tolist()]


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


def reduce_rows(rows: torch.Tensor, outputs: Sequence[Outputs]) -> list[Reduced | Exception]:
    """Compute the outputs of queries from their rows, with few calls per class of reductions.

    On a CPU, a few rows are computed at a time, so that they stay in its caches.

    Args:
        rows: Natural-log probabilities, shape `(n, vocab_size)`, float32; not changed.
        outputs: Requested outputs of each query: `Query.outputs`.

    Returns:
        The `Reduced` of each query, or the error of a row that is not a distribution. Rows
        among the values are copies; if there is one row, and it has separate memory, it is the
        row itself.
    """
    return _reduce(rows, outputs, None)


def reduce_logits(
    logits: torch.Tensor,
    vocabulary: Vocabulary,
    outputs: Sequence[Outputs],
) -> list[Reduced | Exception]:
    """Compute the outputs of queries from logits, as `reduce_rows` of `rows_from_logits`.

    Rows are computed only for outputs that need them: see `Reduction.reads_logits`.

    On CUDA, logits are not copied to main memory. Requested rows are written twice: normalised
    in float32 by one operation for up to 2**27 entries, then copied into the memory of each
    caller by another. Reductions transfer their results, one number for each row says whether
    it is a distribution, and nothing else leaves the device.

    Args:
        logits: Logits as for `rows_from_logits`; not changed.
        vocabulary: As `rows_from_logits`.
        outputs: As `reduce_rows`.
    """
    return _reduce(logits, outputs, vocabulary)


def _reduce(
    values: torch.Tensor, outputs: Sequence[Outputs], vocabulary: Vocabulary | None
) -> list[Reduced | Exception]:
    """Compute outputs from rows, or from logits over a vocabulary."""
    results: list[Reduced | Exception] = []
    for begin, end in row_parts(len(values), values.shape[1], values.device):
        results += _reduce_part(values[begin:end], outputs[begin:end], vocabulary)
    return results


def _reduce_part(
    values: torch.Tensor, outputs: Sequence[Outputs], vocabulary: Vocabulary | None
) -> list[Reduced | Exception]:
    results: list[list[Any]] = [[None] * len(row_outputs) for row_outputs in outputs]
    places_of: dict[type, list[_Place]] = {}
    logits_places: dict[type, list[_Place]] = {}
    for row, row_outputs in enumerate(outputs):
        for place, output in enumerate(row_outputs):
            reads_logits = vocabulary is not None and getattr(output, "reads_logits", False)
            by_kind = logits_places if reads_logits else places_of
            by_kind.setdefault(type(output), []).append((row, place))

    def reduce(compute: _Compute, places: list[_Place], rows: torch.Tensor) -> None:
        requests = [outputs[row][place] for row, place in places]
        reduced = compute(_select_rows(rows, [row for row, _ in places]), requests)
        for (row, place), value in zip(places, reduced, strict=True):
            results[row][place] = value

    def copy(places: list[_Place], rows: torch.Tensor) -> None:
        distinct = list(dict.fromkeys(row for row, _ in places))
        copies = dict(zip(distinct, _copies(_select_rows(rows, distinct)), strict=True))
        unused = set(distinct)
        for row, place in places:
            results[row][place] = copies[row] if row in unused else copies[row].clone()
            unused.discard(row)

    if vocabulary is not None:
        for kind, places in logits_places.items():
            logits = known_logits(values, vocabulary)
            if logits.shape[1] == vocabulary.size:
                reduce(functools.partial(_compute_from_logits, kind), places, logits)
            missing = [(row, place) for row, place in places if results[row][place] is None]
            if missing:
                places_of.setdefault(kind, []).extend(missing)
    invalid: dict[int, Exception] = {}
    if places_of:
        if vocabulary is None:
            rows, is_normalised = values, False
        else:
            memory = _row_memory(values, places_of, vocabulary.size)
            rows, is_normalised = rows_from_logits(values, vocabulary, out=memory), True
        invalid = invalid_rows(rows, rows.shape[1], normalised=is_normalised)
        for kind, places in places_of.items():
            valid = [place for place in places if place[0] not in invalid]
            if valid and kind is _NO_REDUCTION:
                copy(valid, rows)
            elif valid:
                reduce(functools.partial(_compute, kind.compute), valid, rows)  # type: ignore[attr-defined]
    return [
        invalid.get(row) or Reduced(tuple(row_results))
        for row, row_results in enumerate(results)
    ]


def _row_memory(
    logits: torch.Tensor, kinds: Collection[type], size: int
) -> torch.Tensor | None:
    """Return memory for rows that are copied for their callers; None for new memory."""
    if logits.device.type != "cpu" or len(logits) == 1 or logits.shape[1] < size:
        return None
    # Results of other reductions may refer to the rows.
    return scratch_memory("rows", len(logits), size) if set(kinds) == {_NO_REDUCTION} else None


def _copies(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return rows that share no memory, so that callers can change them."""
    # A slice would keep the whole tensor alive; an expanded row aliases itself.
    owns_memory = rows.untyped_storage().nbytes() == rows.nbytes
    if len(rows) == 1 and owns_memory and not rows.is_inference():
        return [rows[0]]
    return copied_rows(rows)


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


def _is_view(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    is_part = storage.nbytes() > tensor.nbytes
    return is_part or storage.data_ptr() == rows.untyped_storage().data_ptr()


def _compute_from_logits(
    kind: type[Reduction], logits: torch.Tensor, requests: Sequence[Any]
) -> list[Any]:
    """Return the results of `compute_from_logits`, None for requests that need rows.

    Whether a request needs its row depends on this request alone.
    """
    try:
        values = kind.compute_from_logits(logits, requests)
    except Exception:  # noqa: BLE001 - `compute` finds the requests that cause it
        values = None
    if values is not None and len(values) == len(requests):
        return [_own_copy(value, logits) for value in values]
    if len(requests) == 1:
        return [None]
    return [
        value
        for index, request in enumerate(requests)
        for value in _compute_from_logits(kind, logits[index : index + 1], [request])
    ]


def _compute(
    compute: Callable[[torch.Tensor, Sequence[Any]], Sequence[Any]],
    rows: torch.Tensor,
    requests: Sequence[Any],
) -> Sequence[Any]:
    try:
        values = compute(rows, requests)
        if len(values) == len(requests):
            return [_own_copy(value, rows) for value in values]
        problem: Exception = result_count_error(type(requests[0]), len(values), len(requests))
    except Exception as error:  # noqa: BLE001 - it fails the requests that cause it
        problem = compute_error(type(requests[0]), error)
    if len(requests) == 1:
        return [problem]
    return [
        value
        for index, request in enumerate(requests)
        for value in _compute(compute, rows[index : index + 1], [request])
    ]
