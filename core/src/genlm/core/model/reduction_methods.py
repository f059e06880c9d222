"""Reduction and draw methods of `AsyncLM`.

The methods check their arguments and build a `Reduction`, which `reduce` or `batch_reduce`
computes. Every method has four forms: for one context and for several (`batch_...`), as a
coroutine method and as its blocking twin (`..._sync`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from genlm.core.base.blocking import blocking
from genlm.core.base.error_handling import map_batch
from genlm.core.base.validation import (
    Integers,
    checked_batch,
    checked_count,
    checked_ids,
    checked_number,
    is_sequence_like,
)
from genlm.core.model.context import TokenBatch, TokenIds
from genlm.core.model.members import ArrayLike
from genlm.core.model.requests import Requests
from genlm.core.queries.query import GroupReduction, Reduction
from genlm.core.rows.masks import Mask, MaskLike
from genlm.core.rows.reductions import (
    BiasedDraw,
    Draw,
    DrawnToken,
    LogMass,
    TokenLogprobs,
    TopK,
    TopTokens,
)
from genlm.core.rows.row_biases import checked_biases
from genlm.core.rows.row_functions import ReductionOfFunction, RowFunction, is_row_function
from genlm.core.rows.sampling import batch_seeds, checked_seed, seed_word, stream_uniform
from genlm.core.rows.truncation import Truncation
from genlm.core.vocab import Vocabulary

T = TypeVar("T")


class ReductionMethods:
    """Reduction and draw methods of `AsyncLM`.

    Contexts are token ids as for `next_token_logprobs`, or `Context` objects, and every method
    raises the errors of `next_token_logprobs`. Concurrent requests for one context share its
    evaluation, and only the results leave the device of the rows.
    """

    vocabulary: Vocabulary
    _requests: Requests

    # -- any reduction ----------------------------------------------------------------

    async def reduce(
        self,
        context: TokenIds,
        reduction: Reduction | RowFunction,
        *,
        lora_name: str | None = None,
    ) -> Any:
        """Return a reduction of the row of a context.

        Args:
            context: Token ids or a `Context`.
            reduction: Instance of a subclass of `Reduction`; or a function of rows, shape
                `(n, vocab_size)`, which must not change them and returns a tensor whose first
                dimension is n, or a tuple of such tensors. Concurrent requests with the same
                function share its calls. If the engine runs in other processes, these must be
                able to import the class or the function.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            The result of `compute` for this request, or the entry of the function's tensor, in
            main memory; it belongs to the caller. Results of functions and results None are not
            cached.

        Raises:
            TypeError: `reduction` is neither a `Reduction` nor a function.
            EvaluationError: `compute` of the reduction, or the function, raised.
            GenlmError: As `next_token_logprobs`.
        """
        checked = _checked_reduction(reduction)
        return await self._requests.result(context, checked, lora_name)

    reduce_sync = blocking(reduce)

    async def batch_reduce(
        self,
        contexts: TokenBatch,
        reductions: Sequence[Reduction | RowFunction],
        *,
        lora_name: str | None = None,
    ) -> list[Any]:
        """Return reductions of the rows of several contexts.

        Args:
            contexts: Several sequences of token ids, or `Context` objects.
            reductions: One reduction per context, as for `reduce`; they may differ.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            The results, in order.

        Raises:
            TypeError: An element of `reductions` is neither a `Reduction` nor a function.
            ValueError: The numbers of reductions and contexts differ.
            GenlmError: As `reduce`, for the first context that fails; its `places` are the
                indices of all contexts that fail.
        """
        contexts = list(checked_batch(contexts))
        if isinstance(reductions, Reduction | GroupReduction) or callable(reductions):
            count = len(contexts)
            raise ValueError(f"one reduction for {count} contexts; pass [reduction] * {count}")
        checked = map_batch(_checked_reduction, reductions)
        return await self._requests.batch(contexts, checked, lora_name)

    batch_reduce_sync = blocking(batch_reduce)

    # -- given tokens -----------------------------------------------------------------

    async def token_logprobs(
        self, context: TokenIds, token_ids: Integers, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of given next tokens.

        Args:
            context: Token ids or a `Context`.
            token_ids: Ids of next tokens; may be empty.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            Natural-log probabilities, shape `(len(token_ids),)`, float32, on the CPU.

        Raises:
            TokenIdError: An id is outside the vocabulary.
            TokenTypeError: `token_ids` is not a flat sequence of integers.
            GenlmError: As `next_token_logprobs`.
        """
        reduction = self._token_logprobs(token_ids)
        logprobs: torch.Tensor = await self.reduce(context, reduction, lora_name=lora_name)
        return logprobs

    token_logprobs_sync = blocking(token_logprobs)

    async def batch_token_logprobs(
        self,
        contexts: TokenBatch,
        token_ids: Sequence[Integers],
        *,
        lora_name: str | None = None,
    ) -> list[torch.Tensor]:
        """Return the log-probabilities of given next tokens of each context."""
        contexts = list(checked_batch(contexts))
        reductions = map_batch(self._token_logprobs, token_ids)
        _check_count("sequences of token ids", reductions, len(contexts))
        return await self.batch_reduce(contexts, reductions, lora_name=lora_name)

    batch_token_logprobs_sync = blocking(batch_token_logprobs)

    def _token_logprobs(self, token_ids: Integers) -> TokenLogprobs:
        return TokenLogprobs(checked_ids(token_ids, self.vocabulary.size))

    # -- the most likely tokens -------------------------------------------------------

    async def top_tokens(
        self, context: TokenIds, k: int, *, lora_name: str | None = None
    ) -> TopTokens:
        """Return the `k` most likely next tokens.

        Args:
            context: Token ids or a `Context`.
            k: Number of tokens, from 1 to the size of the vocabulary.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            Log-probabilities and ids, in descending order of probability; ties in ascending
            order of ids.

        Raises:
            TypeError: `k` is not an integer.
            ValueError: `k` is below 1 or above the size of the vocabulary.
            GenlmError: As `next_token_logprobs`.
        """
        top: TopTokens = await self.reduce(context, self._top_k(k), lora_name=lora_name)
        return top

    top_tokens_sync = blocking(top_tokens)

    async def batch_top_tokens(
        self, contexts: TokenBatch, k: int, *, lora_name: str | None = None
    ) -> list[TopTokens]:
        """Return the `k` most likely next tokens of each context."""
        contexts = list(checked_batch(contexts))
        reductions = [self._top_k(k)] * len(contexts)
        return await self.batch_reduce(contexts, reductions, lora_name=lora_name)

    batch_top_tokens_sync = blocking(batch_top_tokens)

    def _top_k(self, k: int) -> TopK:
        return TopK(checked_count("k", k, self.vocabulary.size))

    # -- sets of tokens ---------------------------------------------------------------

    async def log_mass(
        self, context: TokenIds, mask: MaskLike, *, lora_name: str | None = None
    ) -> float:
        """Return the log-probability that the next token is in a set.

        Args:
            context: Token ids or a `Context`.
            mask: The set, in any form that `Mask` accepts.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            `logsumexp` of the row over the mask; `-inf` for an empty mask.

        Raises:
            ValueError: The length of the mask is not the size of the vocabulary.
            TokenIdError: An id is outside the vocabulary.
            TokenTypeError: `mask` is not a mask.
            GenlmError: As `next_token_logprobs`.
        """
        reduction = LogMass(self._mask(mask))
        log_mass: float = await self.reduce(context, reduction, lora_name=lora_name)
        return log_mass

    log_mass_sync = blocking(log_mass)

    async def batch_log_mass(
        self,
        contexts: TokenBatch,
        masks: Sequence[MaskLike],
        *,
        lora_name: str | None = None,
    ) -> list[float]:
        """Return the log-probability of a set of next tokens for each context."""
        contexts = list(checked_batch(contexts))
        mask_list = self._mask_list(masks, len(contexts))
        reductions = map_batch(lambda mask: LogMass(self._mask(mask)), mask_list)
        return await self.batch_reduce(contexts, reductions, lora_name=lora_name)

    batch_log_mass_sync = blocking(batch_log_mass)

    def _mask(self, allowed: MaskLike) -> Mask:
        size = self.vocabulary.size
        if isinstance(allowed, Mask) and allowed.vocab_size == size:
            return allowed
        return Mask(allowed, size)

    # -- draws ------------------------------------------------------------------------

    async def draw(
        self,
        context: TokenIds,
        mask: MaskLike | None = None,
        *,
        temperature: float = 1.0,
        bias: ArrayLike = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> DrawnToken:
        """Draw the next token, optionally among the tokens of a mask.

        The probability of an allowed token is proportional to
        `exp((logprob + bias) / temperature)`. The token depends only on the arguments and the
        row, not on the engine. The random number has position `len(context)` in the seed's
        stream, so one seed suffices for all steps of one sequence. Equal contexts with equal
        seeds draw equal tokens, and different contexts of one length share the random number.
        Use a different seed for every particle, and a new one after resampling, or call
        `batch_draw(contexts, seed=...)` with a new number at every step.

        Args:
            context: Token ids or a `Context`.
            mask: Allowed tokens, in any form that `Mask` accepts; None for all.
            temperature: Divisor of the log-probabilities; 0 selects the most likely token.
            bias: Addend of the log-probabilities: shape `(vocab_size,)`, or a number; `-inf`
                excludes a token, as a mask does. An array must not change before the result.
            top_k: Number of most likely allowed tokens to which the draw is limited.
            top_p: Share of the probability of these tokens at the temperature, in (0, 1]; the
                draw is limited to the fewest most likely tokens that reach it.
            min_p: Share of the probability of the most likely allowed token at the temperature,
                in [0, 1], that the drawn token has.
            seed: Random seed; None for fresh randomness.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            The id, its log-probability in the row, the log mass of the mask after the bias (0
            without both), and the log-probability with which the token was drawn.

        Raises:
            ValueError: The length of the mask or of the bias is not the size of the vocabulary,
                or another argument is out of range.
            TypeError: The bias is not numeric.
            GenlmError: As `next_token_logprobs`.
        """
        settings = self._draw_settings(temperature, top_k, top_p, min_p)
        allowed = None if mask is None else self._mask(mask)
        [token_bias] = checked_biases(bias, 1, self.vocabulary.size)
        draw = _draw(_uniform(context, seed), allowed, settings, token_bias)
        drawn: DrawnToken = await self._requests.result(context, draw, lora_name)
        return drawn

    draw_sync = blocking(draw)

    async def batch_draw(
        self,
        contexts: TokenBatch,
        masks: Sequence[MaskLike | None] | None = None,
        *,
        temperature: float = 1.0,
        bias: ArrayLike = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        lora_name: str | None = None,
    ) -> list[DrawnToken]:
        """Draw the next token of each context; see `draw`.

        Args:
            contexts: Contexts as for `draw`.
            masks: One mask per context; None for all tokens.
            temperature: As `draw`.
            bias: As `draw`, for all contexts; or shape `(n,)` or `(n, vocab_size)`, for each.
            top_k: As `draw`.
            top_p: As `draw`.
            min_p: As `draw`.
            seed: One seed per context, or one number from which the seeds are derived; equal
                contexts then draw independently. Pass a new number at every step.
            lora_name: As `draw`.
        """
        contexts = list(checked_batch(contexts))
        count = len(contexts)
        settings = self._draw_settings(temperature, top_k, top_p, min_p)
        mask_list = [None] * count if masks is None else self._mask_list(masks, count)
        allowed = map_batch(lambda mask: None if mask is None else self._mask(mask), mask_list)
        biases = checked_biases(bias, count, self.vocabulary.size)
        uniforms = map(_uniform, contexts, batch_seeds(seed, count))
        draws = [
            _draw(uniform, mask, settings, token_bias)
            for uniform, mask, token_bias in zip(uniforms, allowed, biases, strict=True)
        ]
        return await self.batch_reduce(contexts, draws, lora_name=lora_name)

    batch_draw_sync = blocking(batch_draw)

    def _draw_settings(self, temperature: float, *limits: Any) -> tuple[float, Truncation]:
        """Check the temperature, and the limits of `Truncation` in its order."""
        truncation = Truncation.checked(self.vocabulary.size, *limits)
        return checked_number("temperature", temperature), truncation

    def _mask_list(self, masks: Sequence[T], count: int) -> list[T]:
        """Return the masks as a list; check that there is one per context."""
        ndim = getattr(masks, "ndim", 2)
        if isinstance(cast("object", masks), Mask) or ndim == 1:
            raise ValueError(f"one mask for {count} contexts; pass [mask] * {count}")
        if not is_sequence_like(masks):
            raise TypeError(f"masks={masks!r}; expected {count} masks, one for each context")
        is_packed = str(getattr(masks, "dtype", "")).endswith("int32")
        size = self.vocabulary.size
        items: list[Any] = [Mask.from_packed(row, size) if is_packed else row for row in masks]  # type: ignore[arg-type]
        _check_count("masks", items, count)
        return items


def _checked_reduction(reduction: Any) -> Reduction:
    if is_row_function(reduction):
        reduction = ReductionOfFunction(reduction)
    if not isinstance(reduction, Reduction):
        hint = (
            "; populations and reduce_text compute a GroupReduction"
            if isinstance(reduction, GroupReduction)
            else ""
        )
        raise TypeError(
            f"expected a function of rows, or an object of a subclass of genlm.Reduction; "
            f"found {reduction!r}{hint}"
        )
    try:
        hash(reduction)
    except TypeError as error:
        raise TypeError(
            f"{reduction!r} cannot be hashed, and equal reductions share one result: {error}. "
            f"Make the class a frozen dataclass with hashable fields, such as tuples"
        ) from error
    return reduction


def _draw(
    uniform: float,
    mask: Mask | None,
    settings: tuple[float, Truncation],
    bias: torch.Tensor | None,
) -> Draw:
    temperature, truncation = settings
    if bias is None:
        return Draw(uniform, temperature, mask, truncation)
    return BiasedDraw(uniform, temperature, mask, truncation, bias=bias)


def _uniform(context: TokenIds, seed: int | None) -> float:
    """Return the random number of a draw: that of the seed's stream at the context's length."""
    # An object without a length is rejected later, with the request.
    length = len(context) if is_sequence_like(context) else 0
    return stream_uniform(seed_word(checked_seed(seed)), length)


def _check_count(argument: str, values: Sequence[object], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{len(values)} {argument} for {count} contexts; pass one for each")
