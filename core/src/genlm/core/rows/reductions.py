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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from genlm.core.queries.query import Reduction
from genlm.core.rows.draws import batch_log_mass
from genlm.core.rows.group_reductions import DrawColumns
from genlm.core.rows.logits import device_index, moved
from genlm.core.rows.masks import Mask
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.selection import batch_top_k
from genlm.core.rows.truncation import UNLIMITED, Truncation

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
        ids = [token_id for request in requests for token_id in request.token_ids]
        places = torch.from_numpy(np.repeat(np.arange(len(requests)), sizes))
        logprobs = rows[moved(places, rows.device), device_index(ids, rows.device)].cpu()
        return torch.split(logprobs, sizes)


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
            TopTokens(logprobs[place, : request.k], ids[place, : request.k])
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
    0), no token is drawn: `token_id` is -1, `draw_logprob` 0, and the other attributes are
    `-inf`. A particle to whose log-weight `log_mass` or `logprob - draw_logprob` is added then
    has weight 0.

    Attributes:
        token_id: Id of the token.
        logprob: The model's log-probability of the token.
        log_mass: Log-probability of the mask in the row, after a bias; 0 without both.
        draw_logprob: The log-probability with which the token was drawn: under the mask, the
            bias, the temperature and the truncation. With a mask alone `logprob - log_mass`.
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
        truncation: Limits of the draw, one number each.
    """

    uniform: float
    temperature: float = 1.0
    mask: Mask | None = None
    truncation: Truncation = UNLIMITED

    is_cacheable = False  # no later request has the same random number

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        """Whether the draw sets nothing but a mask."""
        return self.temperature == 1 and self.truncation == UNLIMITED

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Draw]) -> Sequence[DrawnToken]:
        """Draw from all rows at once."""
        places = torch.arange(len(requests), device="cpu")
        columns = _draw_columns(rows, requests).compute(rows, places, places)
        return _drawn_tokens(columns)

    @classmethod
    def compute_from_logits(
        cls, logits: torch.Tensor, requests: Sequence[Draw]
    ) -> Sequence[DrawnToken] | None:
        """Draw from all logits at once; see `DrawColumns.compute_from_logits`."""
        places = torch.arange(len(requests), device="cpu")
        columns = _draw_columns(logits, requests).compute_from_logits(logits, places, places)
        return None if columns is None else _drawn_tokens(columns)


@dataclass(frozen=True, eq=False)
class BiasedDraw(Draw):
    """A token drawn from the row plus a bias: `DrawnToken`.

    Attributes:
        bias: Addend of the log-probabilities, shape `(vocab_size,)`.
    """

    bias: torch.Tensor = field(kw_only=True)

    __eq__ = object.__eq__  # equality of `Draw` would ignore the bias
    __hash__ = object.__hash__

    reads_logits = False

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Draw]) -> Sequence[DrawnToken]:
        """Draw from all rows at once."""
        biases = [request.bias for request in requests if isinstance(request, BiasedDraw)]
        places = torch.arange(len(requests), device="cpu")
        bias = torch.stack([moved(each.detach().float(), rows.device) for each in biases])
        columns = _draw_columns(rows, requests, bias).compute(rows, places, places)
        return _drawn_tokens(columns)


def _draw_columns(
    values: torch.Tensor, requests: Sequence[Draw], bias: torch.Tensor | float = 0.0
) -> DrawColumns:
    masks = [request.mask for request in requests]
    temperatures = [request.temperature for request in requests]
    weights = RowWeights(
        values.shape,
        masks if any(mask is not None for mask in masks) else None,
        temperature=temperatures if len(set(temperatures)) > 1 else temperatures[0],
        bias=bias,
        truncation=Truncation.of_rows([request.truncation for request in requests]),
    )
    return DrawColumns(weights, np.array([request.uniform for request in requests]))


def _drawn_tokens(columns: tuple[torch.Tensor, ...]) -> list[DrawnToken]:
    # One transfer, because every transfer waits for the device; float32 represents ids
    # below 2**24.
    token_ids, *logs = columns
    numbers = torch.stack([token_ids.float(), *logs]).cpu()
    return [DrawnToken(int(token_id), *logs) for token_id, *logs in numbers.T.tolist()]
