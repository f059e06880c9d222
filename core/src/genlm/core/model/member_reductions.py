"""`MemberReductions`: rows and reductions of the members of a population."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from genlm.core.base.blocking import blocking
from genlm.core.base.validation import checked_count
from genlm.core.model.draw_settings import DrawSettings
from genlm.core.model.members import ArrayLike, Members
from genlm.core.queries.generations import Integers64, raise_member_errors
from genlm.core.queries.query import GroupQuery, GroupReduction, Reduction
from genlm.core.rows.group_reductions import (
    DrawLogprobColumns,
    Rows,
    TokenColumns,
    TopColumns,
)
from genlm.core.rows.reductions import TopTokens
from genlm.core.rows.row_functions import RowFunction
from genlm.core.rows.row_masks import MasksLike
from genlm.core.rows.row_weights import check_log_masses
from genlm.core.rows.shared_reduction import checked_reduction


class MemberReductions(Members):
    """Rows and reductions of the members of a population; see `Population`."""

    __slots__ = ()

    async def next_token_logprobs(self) -> torch.Tensor:
        """Return the row of each member.

        Returns:
            Natural-log probabilities, shape `(n, vocab_size)`, float32, on the engine's
            device. The tensor is the caller's.

        Raises:
            PopulationError: The contexts of members are full, or their rows are not
                distributions.
            GenlmError: As `AsyncLM.next_token_logprobs`.
        """
        rows: torch.Tensor
        [rows] = await self._reduce(Rows())
        return rows

    next_token_logprobs_sync = blocking(next_token_logprobs)

    async def token_logprobs(
        self,
        token_ids: ArrayLike,
        masks: MasksLike | None = None,
        *,
        mask_index: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> torch.Tensor:
        """Return the log-probabilities of given next tokens.

        With settings of `Population.draw`, they are those with which `draw` draws the tokens,
        its `draw_logprob`; by default, those of the model.

        Args:
            token_ids: Token ids, shape `(n,)` or `(n, k)`; -1 stands for no token, and lists
                of different lengths are padded with it.
            masks: As `Population.draw`, and so are all further arguments.
            mask_index: Index of each member's mask.
            temperature: Temperature of the draws.
            bias: Addend of the log-probabilities.
            top_k: Limit of the draws.
            top_p: Limit of the draws.
            min_p: Limit of the draws.

        Returns:
            Natural-log probabilities, the same shape as `token_ids`, float32, in main memory;
            0 for -1, `-inf` for a token that `draw` would not draw.

        Raises:
            ValueError: The shape is not one of these, or as `Population.draw`.
            PopulationError: Ids are outside the vocabulary, or as `Population.draw`.
        """
        ids = self._checked_tokens(token_ids)
        limits = top_k, top_p, min_p
        settings = DrawSettings.of(
            self, masks, mask_index, limits, temperature=temperature, bias=bias
        )
        weights = settings.weights_unless_equal(self._lm.vocabulary.size)
        if not ids.size:
            return torch.empty(ids.shape, dtype=torch.float32, device="cpu")
        columns = torch.from_numpy(ids.reshape(len(ids), -1))
        logprobs: torch.Tensor
        if weights is None:
            [logprobs] = await self._reduce(TokenColumns(columns))
        else:
            reduction = DrawLogprobColumns(weights, columns)
            logprobs, log_masses = await self._reduce(reduction)
            check_log_masses(log_masses, np.arange(len(self)), len(self))
        return logprobs.view(ids.shape)

    token_logprobs_sync = blocking(token_logprobs)

    async def top_tokens(self, k: int) -> TopTokens:
        """Return the `k` most likely next tokens of each member.

        Returns:
            Log-probabilities and ids, both of shape `(n, k)`, in main memory, in descending
            order of probability; ties in ascending order of ids.
        """
        count = checked_count("k", k, self._lm.vocabulary.size)
        return TopTokens(*await self._reduce(TopColumns(count, len(self))))

    top_tokens_sync = blocking(top_tokens)

    async def reduce(self, reduction: GroupReduction | Reduction | RowFunction) -> Any:
        """Return a user-defined reduction of the row of each member.

        Args:
            reduction: A function of rows, as for `AsyncLM.reduce`; or a `Reduction` that all
                members share; or a `GroupReduction`, which has values of each member.

        Returns:
            The results of all members: a tensor whose first dimension is n, or a tuple of such
            tensors if there are several; a tuple of one tensor is returned as the tensor.

        Raises:
            TypeError: `reduction` is of another type.
            PopulationError: As `next_token_logprobs`, or the function raised.
        """
        columns = await self._reduce(checked_reduction(reduction))
        return columns[0] if len(columns) == 1 else columns

    reduce_sync = blocking(reduce)

    async def _reduce(
        self,
        reduction: GroupReduction,
        members: Integers64 | None = None,
        then: Callable[[tuple[torch.Tensor, ...]], Any] = lambda columns: columns,
    ) -> Any:
        """Return a function of the columns of some members, ascending, or of all members."""
        requests = self._lm._requests  # noqa: SLF001 - internal to genlm.core.model
        if not len(self._places if members is None else members):
            result = then(requests.reduce_no_rows(reduction))
            if isinstance(result, concurrent.futures.Future):
                return await asyncio.wrap_future(result)
            return result
        query = requests.group_query(
            self._generation, self._places, reduction, self._adapter.engine_name, members
        )
        return await self._result(query, members, then)

    async def _result(
        self,
        query: GroupQuery,
        members: Integers64 | None = None,
        then: Callable[[tuple[torch.Tensor, ...]], Any] | None = None,
    ) -> Any:
        """Return the `SampledGroup` of a query, or a function of its columns for members."""
        requests = self._lm._requests  # noqa: SLF001 - internal to genlm.core.model
        requests.adapter_of(self, None)

        def finish(results: list[Any]) -> Any:
            [result] = results
            if isinstance(result, Exception):
                raise result
            if then is None:
                return result
            raise_member_errors(result.errors, query.row_of, members, len(self))
            return then(result.columns)

        [result] = await requests.groups([query], finish)
        return result
