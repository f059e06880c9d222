"""`Population`: sequences of one model that are extended, sampled and copied as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from genlm.core.base.blocking import blocking, off_loop
from genlm.core.base.method_names import name_methods
from genlm.core.base.validation import Stop, checked_count, checked_stop
from genlm.core.engine.group_sampling import GroupSampling, SampledGroup
from genlm.core.model.draw_settings import DrawSettings
from genlm.core.model.member_reductions import MemberReductions
from genlm.core.model.member_scores import MemberScores
from genlm.core.model.members import ArrayLike, Members, checked_counts
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.group_reductions import DrawColumns, MassColumns
from genlm.core.rows.logits import invalid_rows
from genlm.core.rows.row_masks import MasksLike
from genlm.core.rows.sampling import SeedLike, checked_seeds, member_seeds, uniforms


class SampledTokens(NamedTuple):
    """Continuations of the members of a population. All tensors are in main memory.

    Attributes:
        token_ids: Shape `(n, k)`, int64, -1 after the end of a member; k is the number of
            tokens of the longest continuation.
        logprobs: The model's log-probability of each token, shape `(n, k)`, float32; 0 for -1.
        draw_logprob: The log-probability with which each token was drawn, shape `(n, k)`,
            float32; 0 for -1.
        population: The population extended by the tokens.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    draw_logprob: torch.Tensor
    population: Population


class Population(MemberScores):
    """N token sequences of one model and adapter, created with `AsyncLM.population`.

    A population is immutable: `extend` and indexing return new populations, in time that does
    not depend on the lengths of the sequences. Equal members are computed once. The engine's
    state of a population, such as keys and values, is freed when no population refers to it.

        pop, log_weights = llm.population(prompt, 1000), np.zeros(1000)
        for _ in range(steps):
            drawn = await pop.draw(masks, seed=seed)
            log_weights = log_weights + drawn.log_mass.numpy()
            ancestors, log_weights = genlm.smc.resampled(log_weights, rng.random())
            pop = pop.extend(drawn.token_ids)[ancestors]

    Every coroutine method is one request for all members, and has a blocking twin, such as
    `draw_sync` for `draw`. If members fail, the method raises one `PopulationError` that lists
    them; the population is unchanged and the request can be repeated. Cancellation ends the
    request for all members. Rows are not cached: each request computes the newest token of each
    member.
    """

    __slots__ = ()

    # -- draws ------------------------------------------------------------------------

    async def log_mass(
        self, masks: MasksLike, *, mask_index: ArrayLike | None = None, bias: ArrayLike = 0.0
    ) -> torch.Tensor:
        """Return the log-probability that each member's next token is in a set.

        Args:
            masks: As `draw`.
            mask_index: As `draw`.
            bias: As `draw`.

        Returns:
            Log masses, shape `(n,)`, float32, in main memory; `-inf` for a member with an
            empty mask, 0 for a finished member.
        """
        settings = DrawSettings.of(self, masks, mask_index, bias=bias)
        [values] = await self._reduce(MassColumns(settings.active_weights), settings.active)
        return settings.masses_of_all(values)

    log_mass_sync = blocking(log_mass)

    async def draw(
        self,
        masks: MasksLike | None = None,
        *,
        mask_index: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        rows: torch.Tensor | None = None,
        seed: SeedLike = None,
    ) -> DrawnTokens:
        """Draw the next token of each member.

        The probability of an allowed token is proportional to
        `exp((logprob + bias) / temperature)`. The random number of a member depends on the
        seed, on the index of the member, and on the number of tokens that the population was
        extended by; it is the same on every engine and device. One seed therefore suffices for
        all steps, and copies of a member draw independently. Different populations have the
        same random numbers at the same step. For independent draws, use different seeds for two
        parts of a population, for a draft model and its target, and for a population that
        `AsyncLM.population` creates from these sequences, which begins with the first step.

        Args:
            masks: Allowed tokens; None for all. One mask for all members, in any form that
                `Mask` accepts; a list of such masks, with None for all tokens; booleans of
                shape `(m, vocab_size)`; or packed bits, int32 of shape
                `(m, ceil(vocab_size / 32))`, as the bitmasks of xgrammar and llguidance.
                Arrays are numpy or torch arrays, on any device, and must not change before the
                result.
            mask_index: Index of each member's mask among the m masks, shape `(n,)`; by default
                member i has mask i.
            temperature: One number for all members, or shape `(n,)`; 0 selects the most likely
                token.
            bias: Addend of the log-probabilities: a number, or shape `(n,)`, `(vocab_size,)`
                or `(n, vocab_size)`; `-inf` excludes a token, as a mask does.
            top_k: Number of most likely allowed tokens to which the draw is limited.
            top_p: Share of the probability of these tokens at the temperature, in (0, 1]; the
                draw is limited to the fewest most likely tokens that reach it.
            min_p: Share of the probability of the most likely allowed token at the temperature,
                in [0, 1], that any drawn token has.
            rows: Log-probabilities in place of the model's, which are then not computed:
                shape `(n, vocab_size)`, on any device, such as the result of
                `next_token_logprobs`.
            seed: Random seed; None for fresh randomness. Or one seed for each member, integers
                below 2**63 of shape `(n,)`: each member then draws as the only member of a
                population with this seed, and its random numbers do not depend on its index.

        Returns:
            Tokens and their log-probabilities. A member without an allowed token gets token
            -1 and log-mass `-inf`, a finished member -1 and 0; neither is computed.

        Raises:
            ValueError: A shape does not fit the members or the vocabulary, a number is out of
                range, or `rows` are not log-probabilities.
            TypeError: A temperature or bias is not numeric.
            PopulationError: As `next_token_logprobs`, or the bias of an allowed token is NaN or
                `inf`.
        """
        limits = top_k, top_p, min_p
        settings = DrawSettings.of(
            self, masks, mask_index, limits, temperature=temperature, bias=bias
        )
        drawn: DrawnTokens
        if rows is None:
            drawn = await self._draw(settings, seed)
        else:
            drawn = await off_loop(self._draw_from, rows, settings, seed)
        return drawn

    draw_sync = blocking(draw)

    async def draw_without_replacement(
        self,
        k: int,
        masks: MasksLike | None = None,
        *,
        mask_index: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike = 0.0,
        rows: torch.Tensor | None = None,
        seed: SeedLike = None,
    ) -> DrawnTokens:
        """Draw `k` different next tokens of each member, one after the other.

        Every token is drawn from the remaining tokens, with the distribution of the
        Gumbel-top-k trick of Kool, van Hoof, Welling: "Stochastic beams and where to find
        them", 2019. The first is the token that `draw` returns for the same seed, and draws of
        fewer tokens are the first of those of more tokens.

        Args:
            k: Number of tokens, at least 1 and at most the size of the vocabulary.
            masks: As `draw`.
            mask_index: As `draw`.
            temperature: As `draw`, above 0. At a temperature close to 0, such as 1e-30, the
                tokens are the most likely allowed ones, in order, for example of a beam search
                under a constraint.
            bias: As `draw`.
            rows: As `draw`.
            seed: As `draw`.

        Returns:
            Tensors of shape `(n, k)`, and `log_mass` of shape `(n,)`. The sum of `draw_logprob`
            is the log-probability of drawing these tokens in this order; `logprobs -
            draw_logprob`, without biases and temperatures, is that of all allowed tokens that
            remain before each draw. If fewer than `k` tokens are possible, the last ones are
            -1, with `logprobs` of `-inf` and `draw_logprob` of 0. The first token of a finished
            member is -1 with `logprobs` of 0, because its text is its only continuation.
        """
        count = checked_count("k", k, self._lm.vocabulary.size)
        settings = DrawSettings.of(self, masks, mask_index, temperature=temperature, bias=bias)
        if settings.active_weights.is_greedy:
            raise ValueError(
                "draws without replacement need a temperature above 0; top_tokens returns the "
                "most likely tokens"
            )
        drawn: DrawnTokens
        if rows is None:
            drawn = await self._draw(settings, seed, count)
        else:
            drawn = await off_loop(self._draw_from, rows, settings, seed, count)
        return drawn

    draw_without_replacement_sync = blocking(draw_without_replacement)

    async def sample(
        self,
        max_tokens: ArrayLike,
        masks: MasksLike | None = None,
        *,
        mask_index: ArrayLike | None = None,
        stop: Stop | None = None,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: SeedLike = None,
    ) -> SampledTokens:
        """Draw up to `max_tokens` tokens for each member that is not finished.

        Repeated calls of `draw` and `extend` with the same seed return the same tokens.

        Args:
            max_tokens: Maximum number of tokens: one number for all members, or shape `(n,)`.
                A member gets fewer if its context is full, which is logged as a warning, or if
                it has no allowed token.
            masks: As `draw`; the same for each token.
            mask_index: As `draw`.
            stop: Token ids and texts (`str` or `bytes`) that finish a member, one or several;
                `()` for none. By default the end of a text, which is the `eos_token_id` of the
                vocabulary if it has one; other ends replace it. A text finishes a member with
                the token that completes it among the tokens that this call draws; the text of a
                special token is its name.
            temperature: As `draw`.
            bias: As `draw`; the same for each token.
            top_k: As `draw`.
            top_p: As `draw`.
            min_p: As `draw`.
            seed: As `draw`.

        Returns:
            The tokens, and the population extended by them. The token that finishes a member is
            the last of its tokens. `extend(sampled.token_ids)` returns the same population
            without the members finished by this call, to continue after a stop text.

        Raises:
            PopulationError: The contexts of members are full before the first token, or as
                `next_token_logprobs`.
        """
        count, size = len(self), self._lm.vocabulary.size
        limit = checked_counts("max_tokens", max_tokens, count, 0)
        ends = checked_stop(stop, size, self._lm.vocabulary.eos_token_id)
        settings = DrawSettings.of(
            self,
            masks,
            mask_index,
            (top_k, top_p, min_p),
            temperature=temperature,
            bias=bias,
        )
        active = settings.active[limit[settings.active] > 0]
        limits = np.zeros(count, np.int64)
        limits[active] = limit[active]
        if self._lm.max_context is not None:
            room = self._lm.max_context + 1 - self.lengths.numpy()
            # A member whose context is full keeps a limit of 1, so that it fails as in `draw`.
            limits = np.minimum(limits, np.maximum(room, 1))
        sampling = GroupSampling(
            self._places,
            self._finished,
            limits,
            settings.weights,
            member_seeds(checked_seeds(seed, count), np.arange(count)).astype(np.int64),
            self._step,
            *ends,
        )
        if not len(active):
            self._lm._scheduler.check_open()  # noqa: SLF001 - internal to genlm.core.model
            empty = torch.empty(count, 0, dtype=torch.float32, device="cpu")
            return SampledTokens(empty.long(), empty, empty.clone(), self)
        query = self._lm._requests.sampling_query(  # noqa: SLF001 - internal to genlm.core.model
            self._generation, sampling, self._adapter.engine_name
        )
        group: SampledGroup = await self._result(query)
        step = self._step + group.token_ids.shape[1]
        cut = int((~group.finished & (limits < limit))[active].sum())
        self._lm._log_cut(cut, count, int(limit.max()))  # noqa: SLF001 - internal to genlm.core.model
        population = self._derive(group.generation, group.places, group.finished, step)
        return SampledTokens(group.token_ids, group.logprobs, group.draw_logprob, population)

    sample_sync = blocking(sample)

    # -- internals --------------------------------------------------------------------

    async def _draw(
        self,
        settings: DrawSettings,
        seed: SeedLike,
        count: int | None = None,
        then: Callable[[DrawnTokens], Any] = lambda drawn: drawn,
    ) -> Any:
        """Draw one token, or `count` different ones, for each active member.

        Return `then` of the draws of all members. The engine's thread calls `then`, or the
        calling thread in a blocking twin. If its result is a `concurrent.futures.Future`, the
        result of this future is returned.
        """
        key, active = checked_seeds(seed, len(self)), settings.active
        numbers = functools.partial(uniforms, key, active, self._step, count)
        return await self._reduce(
            DrawColumns(settings.active_weights, numbers),
            active,
            lambda columns: then(settings.draws_of_all(columns)),
        )

    def _draw_from(
        self,
        rows: torch.Tensor | np.ndarray[Any, Any],
        settings: DrawSettings,
        seed: SeedLike,
        count: int | None = None,
    ) -> DrawnTokens:
        """Draw as `_draw` for the active members from log-probabilities of all members."""
        size, active = self._lm.vocabulary.size, settings.active
        if not isinstance(rows, torch.Tensor):
            try:
                rows = torch.as_tensor(rows, device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"rows is {type(rows).__name__}; expected log-probabilities, shape "
                    f"({len(self)}, {size}): a tensor or an array ({error})"
                ) from error
        if rows.shape != (len(self), size):
            raise ValueError(
                f"rows of shape {tuple(rows.shape)}; expected ({len(self)}, {size}), the "
                f"log-probabilities of all tokens for each member"
            )
        rows = rows.float()
        members = [member for member in invalid_rows(rows, size) if member in active]
        if members:
            raise ValueError(
                f"rows: the probabilities of members {members} do not sum to 1; pass "
                f"log-probabilities, such as logits.log_softmax(1)"
            )
        numbers = uniforms(checked_seeds(seed, len(self)), active, self._step, count)
        columns = DrawColumns(settings.active_weights, numbers).compute(
            rows, torch.from_numpy(active), torch.arange(len(active), device="cpu")
        )
        return settings.draws_of_all(tuple(column.cpu() for column in columns))


name_methods(Population, (MemberScores, MemberReductions, Members))
