"""`Population`: sequences of one model that are extended, drawn from and copied as arrays."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    NoReturn,
    TypeAlias,
    overload,
)

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.blocking import blocking
from genlm.core.context import Context
from genlm.core.errors import (
    ContextLengthError,
    PopulationError,
    TokenIdError,
    TokenTypeError,
)
from genlm.core.generations import NO_TOKEN, Generation, Integers64, Lineage
from genlm.core.group_reductions import (
    DrawColumns,
    MassColumns,
    Rows,
    SeveralDrawColumns,
    TokenColumns,
    TopColumns,
    WeightColumns,
    checked_reduction,
)
from genlm.core.query import GroupReduction, Reduction
from genlm.core.reductions import TopTokens
from genlm.core.row_masks import RowMasks
from genlm.core.sampling import uniforms
from genlm.core.sequence import TokenSequence
from genlm.core.validation import (
    checked_integer,
    checked_share,
    checked_stop,
    checked_top_k,
)

if TYPE_CHECKING:
    from genlm.core.lm import AsyncLM
    from genlm.core.row_masks import MasksLike
    from genlm.core.validation import Stop

__all__ = ["DrawnTokens", "Population", "SampledTokens"]

Flags: TypeAlias = npt.NDArray[np.bool_]
ArrayLike: TypeAlias = "npt.ArrayLike | torch.Tensor"


class DrawnTokens(NamedTuple):
    """A token drawn for each member of a population. All tensors are in main memory.

    Attributes:
        token_ids: Shape `(n,)`, int64; -1 for members that have no token to draw.
        logprobs: The model's log-probability of each token, shape `(n,)`, float32.
        log_mass: Log of the total probability of the allowed tokens, after `bias`, shape
            `(n,)`, float32: what a particle's log-weight gains. `-inf` for a member without
            an allowed token, 0 for a finished one.
        draw_logprob: The log-probability with which each token was drawn, shape `(n,)`,
            float32.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    log_mass: torch.Tensor
    draw_logprob: torch.Tensor


class SampledTokens(NamedTuple):
    """Continuations of the members of a population. All tensors are in main memory.

    Attributes:
        token_ids: Shape `(n, k)`, int64, -1 after the end of a member; k is the number of
            tokens of the longest continuation.
        logprobs: The model's log-probability of each token, shape `(n, k)`, float32; 0 for -1.
        draw_logprob: The log-probability with which each token was drawn, shape `(n, k)`,
            float32; 0 for -1.
        population: The population that is extended by the tokens.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    draw_logprob: torch.Tensor
    population: Population


class _Settings(NamedTuple):
    """What the members of a population are drawn with.

    Attributes:
        active: Members that are drawn from, ascending.
        log_mass: Log-mass of the other members, shape `(n,)`: 0 if finished, else `-inf`.
        columns: Masks, temperature and bias of the active members.
    """

    active: Integers64
    log_mass: torch.Tensor
    columns: WeightColumns


class Population:
    """N token sequences of one model and adapter: make it with `AsyncLM.population`.

    Immutable: `extend` and indexing return new populations, in time that does not depend on
    the lengths of the sequences. Equal members are computed once. What the engine keeps for a
    population, such as keys and values, is freed when no population refers to it.

        pop = llm.population(prompt, 1000)
        for _ in range(steps):
            drawn = await pop.draw(masks, seed=seed)
            log_weights += drawn.log_mass.numpy()
            pop = pop.extend(drawn.token_ids)
            pop = pop[genlm.smc.systematic_resampling(log_weights, rng.random())]

    Each method that computes is one request for all members, and has a blocking twin,
    `draw_sync` for `draw`. When some members fail, it raises one `PopulationError` that lists
    them; the population is unchanged and can be asked again.
    A cancelled request is dropped as a whole.
    """

    __slots__ = (
        *("__weakref__", "_finished", "_generation", "_lm", "_places", "_step"),
        *("_adapter", "lora_name"),
    )

    def __init__(
        self,
        lm: AsyncLM,
        generation: Generation,
        places: Integers64,
        *,
        lora_name: str | None,
        adapter: str | None,
        finished: Flags | None = None,
        step: int = 0,
    ) -> None:
        self._lm = lm
        self._generation = generation
        self._places = places
        self._finished = np.zeros(len(places), bool) if finished is None else finished
        self._step = step
        self.lora_name = lora_name
        """Name of the LoRA adapter of all members, None for the base model."""
        self._adapter = adapter

    # -- members ----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lengths(self) -> torch.Tensor:
        """Number of token ids of each member, shape `(n,)`, int64."""
        return torch.from_numpy(self._lineage.lengths[self._places])

    @property
    def finished(self) -> torch.Tensor:
        """Which members were marked as finished, shape `(n,)`, bool."""
        return torch.from_numpy(self._finished.copy())

    @property
    def tokens(self) -> torch.Tensor:
        """The token ids of each member, shape `(n, longest)`, int64, then -1."""
        lineage = self._lineage
        beginnings, after = lineage.suffixes(self._places)
        first = lineage.first
        lengths = lineage.lengths[self._places]
        found = np.full((len(self), int(lengths.max(initial=0))), NO_TOKEN)
        for place in np.unique(beginnings).tolist():
            found[beginnings == place, : first.lengths[place]] = first.sequence(place).token_ids
        adds = after >= 0
        columns = first.lengths[beginnings][:, None] + np.cumsum(adds, axis=1) - 1
        rows = np.broadcast_to(np.arange(len(self))[:, None], adds.shape)
        found[rows[adds], columns[adds]] = after[adds]
        return torch.from_numpy(found)

    @overload
    def __getitem__(self, index: int) -> Context: ...
    @overload
    def __getitem__(self, index: slice | ArrayLike) -> Population: ...
    def __getitem__(self, index: Any) -> Context | Population:
        """Return a member as a `Context`, or members as a population.

        Args:
            index: An integer; or a slice, an index array, repeated or not, or a boolean for
                each member, as numpy or torch indexes.

        Raises:
            IndexError: An index that is out of range, or not of these forms.
        """
        if isinstance(index, torch.Tensor):
            index = index.cpu().numpy()
        if isinstance(index, slice):
            chosen = np.arange(len(self))[index]
        else:
            array = np.asarray(index)
            if array.ndim == 0 and array.dtype.kind in "iu":
                return self._context(int(array))
            if array.ndim != 1 or (array.dtype.kind not in "iub" and array.size):
                raise IndexError(
                    f"a population is indexed by an integer, a slice, or an array of integers "
                    f"or booleans of one dimension; found {array.dtype} of shape {array.shape}"
                )
            chosen = np.arange(len(self))[array if array.size else array.astype(np.int64)]
        return self._with(
            self._generation, self._places[chosen], self._finished[chosen], self._step
        )

    def __iter__(self) -> Iterator[Context]:
        return map(self._context, range(len(self)))

    @staticmethod
    def cat(populations: Sequence[Population]) -> Population:
        """Return a population of the members of several, in order.

        Raises:
            ValueError: There are none, or they have different models or adapters.
        """
        if not populations:
            raise ValueError("no populations; pass at least one")
        parts = [each._parts for each in populations]  # noqa: SLF001 - of the same class
        models, generations, places, finished, steps = zip(*parts, strict=True)
        if len(set(models)) > 1:
            raise ValueError("the populations have different models or adapters")
        generation = generations[0]
        if all(each is generation for each in generations):
            joined = np.concatenate(places)
        else:
            generation, joined = first_generation(
                [
                    each.lineage.sequence(place)
                    for each, own in zip(generations, places, strict=True)
                    for place in own.tolist()
                ]
            )
        ended, step = np.concatenate(finished), max(steps)
        return populations[0]._with(generation, joined, ended, step)  # noqa: SLF001

    @property
    def _parts(self) -> tuple[tuple[object, ...], Generation, Integers64, Flags, int]:
        model = self._lm._model, self._adapter  # noqa: SLF001 - a part of AsyncLM
        return model, self._generation, self._places, self._finished, self._step

    def extend(self, token_ids: ArrayLike) -> Population:
        """Return the population whose members continue these; nothing is computed.

        Args:
            token_ids: A token for each member, shape `(n,)`, or several, shape `(n, k)`; -1
                adds nothing. Integers of numpy, torch or lists.

        Raises:
            ValueError: Another shape.
            PopulationError: Ids outside the vocabulary.
        """
        new = _integers(token_ids)
        if new.ndim not in {1, 2} or len(new) != len(self):
            raise ValueError(
                f"token ids of shape {new.shape} for {len(self)} members; expected "
                f"({len(self)},) or ({len(self)}, k)"
            )
        columns = new[:, None] if new.ndim == 1 else new
        size = self._lm.vocabulary.size
        if columns.size and (columns.min() < NO_TOKEN or columns.max() >= size):
            wrong = (columns < NO_TOKEN) | (columns >= size)
            members = np.flatnonzero(wrong.any(axis=1))
            place = int(wrong[members[0]].argmax())
            error = TokenIdError(int(columns[members[0], place]), place, size, "token_ids")
            raise PopulationError(members.tolist(), len(self), error)
        lineage, places = self._lineage, self._places
        for column in columns.T:
            lineage, places = lineage.extended(places, column)
        generation = self._generation
        if lineage is not self._lineage:
            generation = Generation(lineage, generation)
        step = self._step + columns.shape[1]
        return self._with(generation, places, self._finished, step)

    def finish(self, members: ArrayLike) -> Population:
        """Return the population in which more members are finished: not drawn from again.

        Args:
            members: Which members, shape `(n,)`, bool.

        Raises:
            ValueError: Not a boolean for each member.
        """
        finished = self._finished | _flags(members, len(self))
        return self._with(self._generation, self._places, finished, self._step)

    # -- rows and reductions ----------------------------------------------------------

    async def next_token_logprobs(self) -> torch.Tensor:
        """Return the row of each member.

        Returns:
            Natural-log probabilities, shape `(n, vocab_size)`, float32, on the engine's
            device. The tensor is the caller's.

        Raises:
            PopulationError: Members whose contexts are full, or whose rows are not
                distributions.
            GenlmError: As `AsyncLM.next_token_logprobs`.
        """
        if not len(self):
            return torch.empty(0, self._lm.vocabulary.size)
        return (await self._reduced(Rows()))[0]

    next_token_logprobs_sync = blocking(next_token_logprobs)

    async def token_logprobs(self, token_ids: ArrayLike) -> torch.Tensor:
        """Return the log-probabilities of given next tokens.

        Args:
            token_ids: Shape `(n,)` or `(n, k)`; -1 stands for no token.

        Returns:
            The same shape, float32, in main memory; 0 for -1.

        Raises:
            ValueError: Another shape, or ids outside the vocabulary.
            PopulationError: As `next_token_logprobs`.
        """
        ids = _integers(token_ids)
        if ids.ndim not in {1, 2} or len(ids) != len(self):
            raise ValueError(f"token ids of shape {ids.shape} for {len(self)} members")
        size = self._lm.vocabulary.size
        if ids.size and (ids.min() < NO_TOKEN or ids.max() >= size):
            raise ValueError(f"token ids must be from 0 to {size - 1}, or -1 for none")
        if not ids.size:
            return torch.empty(ids.shape)
        columns = torch.from_numpy(ids.reshape(len(ids), -1))
        found = (await self._reduced(TokenColumns(columns)))[0]
        return found.view(ids.shape)

    token_logprobs_sync = blocking(token_logprobs)

    async def top_tokens(self, k: int) -> TopTokens:
        """Return the `k` most likely next tokens of each member.

        Returns:
            Log-probabilities and ids, both of shape `(n, k)`, in main memory, the most likely
            first; of equals the lowest id first.
        """
        count = checked_top_k(checked_integer("k", k, 1), self._lm.vocabulary.size, "k")
        assert count is not None  # noqa: S101 - it is only for None
        if not len(self):
            return TopTokens(torch.empty(0, count), torch.empty(0, count, dtype=torch.long))
        return TopTokens(*await self._reduced(TopColumns(count)))

    top_tokens_sync = blocking(top_tokens)

    async def reduce(self, reduction: GroupReduction | Reduction) -> Any:
        """Return a reduction of one's own of each member's row.

        Args:
            reduction: A `GroupReduction`, whose columns have an entry for each member, or a
                `Reduction` that all members share.

        Returns:
            What it computed for each member: a tensor whose first dimension is n, or a tuple
            of them.

        Raises:
            TypeError: Neither of them.
            EvaluationError: Its `compute` raised.
            PopulationError: As `next_token_logprobs`.
        """
        reduction = checked_reduction(reduction)
        if len(self):
            columns = await self._reduced(reduction)
        else:
            rows, nothing = torch.empty(0, self._lm.vocabulary.size), torch.empty(0).long()
            columns = reduction.compute(rows, nothing, nothing)
        return columns[0] if len(columns) == 1 else columns

    reduce_sync = blocking(reduce)

    # -- draws ------------------------------------------------------------------------

    async def log_mass(
        self, masks: MasksLike, *, mask_index: ArrayLike | None = None, bias: ArrayLike = 0.0
    ) -> torch.Tensor:
        """Return the log of the probability that each member's next token is in a set.

        Args:
            masks: As `draw`.
            mask_index: As `draw`.
            bias: As `draw`.

        Returns:
            Shape `(n,)`, float32, in main memory; `-inf` for a member with an empty mask, 0
            for a finished one.
        """
        settings = self._settings(masks, mask_index, 1.0, bias)
        found = settings.log_mass
        if len(settings.active):
            [found[settings.active]] = await self._reduced(
                MassColumns(settings.columns), settings.active
            )
        return found

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
        seed: int | None = None,
    ) -> DrawnTokens:
        """Draw the next token of each member.

        A token is drawn in proportion to `exp((logprob + bias) / temperature)` among the
        allowed ones. The random number of a member depends on the seed, on the index of the
        member, and on how many tokens the population was extended by; it is the same on every
        engine and device. So one seed serves all steps, and copies of a member differ.

        Args:
            masks: The allowed tokens; None for all. One mask for all members, in any form that
                `Mask` takes; a list of such masks, with None for all tokens; booleans of shape
                `(m, vocab_size)`; or packed bits, int32 of shape `(m, ceil(vocab_size / 32))`,
                as the bitmasks of xgrammar and llguidance. Arrays are numpy's or torch's, on
                any device, and must not change before the result. A future of such an array,
                with `mask_index`, is waited for when the model has computed the rows.
            mask_index: Which of m masks each member has, shape `(n,)`; by default member i has
                mask i.
            temperature: A number, or one for each member, shape `(n,)`; 0 takes the most
                likely token.
            bias: Is added to the log-probabilities: a number, or shape `(n,)`,
                `(vocab_size,)` or `(n, vocab_size)`.
            top_k: Draw from the k most likely of the allowed tokens.
            top_p: Draw from the fewest most likely of these that have this share of their
                probability, in (0, 1].
            seed: Makes the draws reproducible; None takes fresh randomness.

        Returns:
            Tokens and their log-probabilities. A member without an allowed token gets token
            -1 and a log-mass of `-inf`, a finished one gets -1 and 0. Neither is computed.

        Raises:
            ValueError: A shape that does not fit the members or the vocabulary, or a number
                out of range.
            PopulationError: As `next_token_logprobs`.
        """
        settings = self._settings(masks, mask_index, temperature, bias)
        k, share = checked_top_k(top_k, self._lm.vocabulary.size), checked_share(top_p)
        numbers = uniforms(_checked_seed(seed), settings.active, self._step)
        reduction = DrawColumns(settings.columns, numbers, k, share)
        return await self._drawn(reduction, settings, (len(self),))

    draw_sync = blocking(draw)

    async def draw_without_replacement(
        self,
        k: int,
        masks: MasksLike | None = None,
        *,
        mask_index: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike = 0.0,
        seed: int | None = None,
    ) -> DrawnTokens:
        """Draw `k` different next tokens of each member, one after the other.

        Each is drawn as by `draw` from the tokens that are left, and the first is the token
        that `draw` returns for the same seed. Kool, van Hoof, Welling: "Stochastic beams and
        where to find them", 2019, draws them by the Gumbel-top-k trick, from the same
        distribution.

        Args:
            k: Number of tokens, from 1 on.
            masks: As `draw`.
            mask_index: As `draw`.
            temperature: As `draw`, above 0.
            bias: As `draw`.
            seed: As `draw`.

        Returns:
            Tensors of shape `(n, k)`, and `log_mass` of shape `(n,)`; token -1 where fewer
            than `k` tokens are possible. The sum of `draw_logprob` is the log-probability of
            drawing these tokens in this order.
        """
        count = checked_integer("k", k, 1)
        settings = self._settings(masks, mask_index, temperature, bias)
        numbers = uniforms(_checked_seed(seed), settings.active, self._step, count)
        reduction = SeveralDrawColumns(settings.columns, numbers)
        return await self._drawn(reduction, settings, (len(self), count))

    draw_without_replacement_sync = blocking(draw_without_replacement)

    async def sample(
        self,
        max_tokens: int,
        *,
        stop: Stop = (),
        temperature: ArrayLike = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> SampledTokens:
        """Draw up to `max_tokens` tokens for each member that is not finished.

        Draws what as many calls of `draw` and `extend` draw with the same seed.

        Args:
            max_tokens: The most tokens to draw for a member.
            stop: Token ids, or texts, `str` or `bytes`, one or several. A member is finished
                with a token of these ids, or with the token that completes one of the texts
                among the tokens that this call draws.
            temperature: As `draw`.
            top_k: As `draw`.
            top_p: As `draw`.
            seed: As `draw`.

        Returns:
            The tokens, and the population that is extended by them. The token that finishes a
            member is the last of its tokens.
        """
        texts, ids = checked_stop(stop, self._lm.vocabulary.size)
        ends = np.array(sorted(ids), np.int64)
        seed = _checked_seed(seed)
        steps: list[DrawnTokens] = []
        tails = [b""] * len(self)
        population = self
        for _ in range(checked_integer("max_tokens", max_tokens, 0)):
            if population._finished.all():
                break
            drawn = await population.draw(
                temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
            )
            token_ids = drawn.token_ids.numpy()
            finished = np.isin(token_ids, ends)
            if texts:
                finished |= self._completed(texts, tails, token_ids)
            population = population.extend(token_ids).finish(finished)
            steps.append(drawn)
        if not steps:
            nothing = torch.empty(len(self), 0)
            return SampledTokens(nothing.long(), nothing, nothing.clone(), population)
        return SampledTokens(
            torch.stack([each.token_ids for each in steps], 1),
            torch.stack([each.logprobs for each in steps], 1),
            torch.stack([each.draw_logprob for each in steps], 1),
            population,
        )

    sample_sync = blocking(sample)

    def _completed(
        self, texts: tuple[bytes, ...], tails: list[bytes], token_ids: Integers64
    ) -> Flags:
        """Append tokens to the members' tails; return which of these now have a text."""
        longest = max(map(len, texts))
        found = np.zeros(len(self), bool)
        for member in np.flatnonzero(token_ids >= 0).tolist():
            tail = tails[member] + bytes(self._lm.byte_vocab[token_ids[member]])
            found[member] = any(text in tail for text in texts)
            tails[member] = tail[max(0, len(tail) - longest + 1) :]
        return found

    async def score(self, continuations: ArrayLike) -> torch.Tensor:
        """Return the log-probability of each token of a continuation of each member.

        Engines with `Capability.SCORE` compute all positions of a member in one pass.

        Args:
            continuations: Token ids, shape `(n, k)`; -1 after the end of shorter ones.

        Returns:
            Shape `(n, k)`, float32, in main memory; 0 for -1.

        Raises:
            ValueError: Another shape, or a token after -1.
            GenlmError: As `AsyncLM.batch_score`.
        """
        ids = _integers(continuations)
        if ids.ndim != 2 or len(ids) != len(self):
            raise ValueError(
                f"continuations of shape {ids.shape}; expected ({len(self)}, k) with -1 after "
                f"the end of shorter ones"
            )
        counts = (ids >= 0).sum(1)
        if (np.arange(ids.shape[1]) < counts[:, None]).tobytes() != (ids >= 0).tobytes():
            raise ValueError("a continuation has a token after -1; -1 is for its end only")
        found = torch.zeros(ids.shape)
        members = np.flatnonzero(counts).tolist()
        contexts = [self._context(member) for member in members]
        texts = [
            context.extend(ids[member, : counts[member]])
            for context, member in zip(contexts, members, strict=True)
        ]
        starts = [len(context) for context in contexts]
        scored = await self._lm.batch_score(texts, starts)
        for member, scores in zip(members, scored, strict=True):
            found[member, : len(scores)] = scores
        return found

    score_sync = blocking(score)

    # -- parts ------------------------------------------------------------------------

    @property
    def _lineage(self) -> Lineage:
        return self._generation.lineage

    def _with(
        self, generation: Generation, places: Integers64, finished: Flags, step: int
    ) -> Population:
        return Population(
            self._lm,
            generation,
            places,
            lora_name=self.lora_name,
            adapter=self._adapter,
            finished=finished,
            step=step,
        )

    def _context(self, member: int) -> Context:
        sequence = self._lineage.sequence(int(self._places[member]))
        return Context(self._lm, sequence, self.lora_name, self._adapter)

    async def _drawn(
        self, reduction: GroupReduction, settings: _Settings, shape: tuple[int, ...]
    ) -> DrawnTokens:
        """Draw for the active members, and return the draws of all."""
        active, log_mass = settings.active, settings.log_mass
        columns = await self._reduced(reduction, active) if len(active) else ()
        if len(active) == len(self) > 0:
            return DrawnTokens(*columns)
        unset = log_mass.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        found = DrawnTokens(torch.full(shape, NO_TOKEN), unset.clone(), log_mass, unset.clone())
        places = torch.from_numpy(active)
        for column, part in zip(found, columns, strict=False):
            column[places] = part
        return found

    async def _reduced(
        self, reduction: GroupReduction, members: Integers64 | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the columns of a reduction, which has an entry for each of some members.

        Args:
            reduction: Reduction to compute.
            members: Ascending, at least one; None for all.
        """
        requests = self._lm._requests  # noqa: SLF001 - both make requests of one model
        requests.adapter_of(self, None)
        wanted, row_of = self._distinct(members)
        answer = await requests.group(
            self._generation, wanted, row_of, reduction, self._adapter
        )
        if answer.errors:
            failed = np.isin(row_of, list(answer.errors))
            self._fail(failed, members, answer.errors[min(answer.errors)])
        return answer.columns

    def _distinct(self, members: Integers64 | None) -> tuple[Integers64, Integers64]:
        """Return the distinct sequences of members, and which of them each has."""
        places = self._places if members is None else self._places[members]
        longest = self._lm.max_context
        if longest is not None:
            lengths = self._lineage.lengths[places]
            if lengths.max() > longest:
                error = ContextLengthError(int(lengths.max()), longest)
                self._fail(lengths > longest, members, error)
        if len(places) == len(self._lineage) and (np.diff(places) == 1).all():
            return places, places
        wanted, row_of = np.unique(places, return_inverse=True)
        return wanted, row_of

    def _fail(self, failed: Flags, members: Integers64 | None, error: Exception) -> NoReturn:
        places = np.flatnonzero(failed)
        own = places if members is None else members[places]
        raise PopulationError(own.tolist(), len(self), error)

    def _settings(
        self,
        masks: MasksLike | None,
        mask_index: ArrayLike | None,
        temperature: ArrayLike,
        bias: ArrayLike,
    ) -> _Settings:
        """Check what members are drawn with, and find those that are drawn from."""
        count, size = len(self), self._lm.vocabulary.size
        index = None if mask_index is None else _integers(mask_index, "mask_index")
        rows = None if masks is None else RowMasks(masks, count, size, index)
        log_mass = torch.zeros(count)
        active = ~self._finished
        if rows is not None and not rows.is_pending:
            dead = active & rows.is_empty
            log_mass[torch.from_numpy(dead)] = -math.inf
            active &= ~dead
        members = np.flatnonzero(active)
        columns = WeightColumns(rows, temperature, bias, count, size)
        if len(members) < count:
            columns = columns.of(members)
        return _Settings(members, log_mass, columns)

    def _is_of(self, model: object) -> bool:
        """Whether it belongs to the model that `AsyncLM` identifies by `model`."""
        return self._lm._model is model  # noqa: SLF001 - a part of AsyncLM

    def __repr__(self) -> str:
        lora = "" if self.lora_name is None else f", lora {self.lora_name!r}"
        lengths = self._lineage.lengths[self._places]
        tokens = f"{lengths.min()} to {lengths.max()} tokens" if len(self) else "no tokens"
        return f"<Population of {self._lm.name!r}{lora}: {len(self)} members, {tokens}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Population belongs to a loaded model and cannot be pickled; pickle its tokens, "
            "and make it again with the model's method population"
        )


def first_generation(sequences: Sequence[TokenSequence]) -> tuple[Generation, Integers64]:
    """Return a generation of the distinct ones of several sequences, and the place of each."""
    places: dict[bytes, int] = {}
    distinct: list[TokenSequence] = []
    for sequence in sequences:
        if sequence.key not in places:
            places[sequence.key] = len(distinct)
            distinct.append(sequence)
    found = np.array([places[sequence.key] for sequence in sequences], np.int64)
    return Generation(Lineage.of_sequences(distinct)), found


def _checked_seed(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else checked_integer("seed", seed, 0)


def _integers(values: ArrayLike, argument: str = "token_ids") -> Integers64:
    """Return an array of 64-bit integers.

    Raises:
        TokenTypeError: Something else than integers.
    """
    array = np.asarray(values.cpu().numpy() if isinstance(values, torch.Tensor) else values)
    if array.dtype.kind not in "iu" and array.size:
        raise TokenTypeError(f"an array of {array.dtype}", argument, "integers")
    return array.astype(np.int64, copy=False)


def _flags(values: ArrayLike, count: int) -> Flags:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    flags = np.asarray(array)
    if flags.dtype != bool or flags.shape != (count,):
        raise ValueError(
            f"members has shape {flags.shape} and type {flags.dtype}; expected a boolean for "
            f"each of {count} members"
        )
    return flags
