"""`Members`: the token sequences of a population, and operations that return populations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.arrays import host_array, native_array, signed_index
from genlm.core.base.error_handling import map_batch
from genlm.core.base.errors import PopulationError, TokenIdError, TokenTypeError
from genlm.core.base.immutable import Immutable
from genlm.core.base.validation import (
    checked_batch,
    checked_integer,
    checked_size,
    is_sequence_like,
)
from genlm.core.model.adapters import BASE_MODEL, Adapter
from genlm.core.model.context import Context, TokenBatch, TokenIds
from genlm.core.queries.generations import (
    NO_TOKEN,
    Generation,
    Integers64,
    Lineage,
    first_generation,
)
from genlm.core.queries.joined_generations import joined_generation

if TYPE_CHECKING:
    from genlm.core.model.lm import AsyncLM
    from genlm.core.model.requests import Requests

Flags: TypeAlias = npt.NDArray[np.bool_]
ArrayLike: TypeAlias = "npt.ArrayLike | torch.Tensor"
MembersT = TypeVar("MembersT", bound="Members")


class Members(Immutable):
    """N token sequences of one model and adapter, immutable; see `Population`."""

    __slots__ = (
        *("__weakref__", "_adapter", "_finished", "_generation", "_lm", "_places", "_scored"),
        "_step",
    )

    _pickling_error = (
        "a Population belongs to a loaded model and cannot be pickled; pickle its tokens, "
        "and create it again with the model's method population"
    )

    def __init__(
        self,
        lm: AsyncLM,
        generation: Generation,
        places: Integers64,
        adapter: Adapter,
        *,
        finished: Flags | None = None,
        step: int = 0,
    ) -> None:
        self._lm = lm
        self._generation = generation
        self._places = places
        self._finished = np.zeros(len(places), bool) if finished is None else finished
        self._step = step
        self._adapter = adapter
        # Continuations that were scored last, and the population extended by them.
        self._scored: tuple[Integers64, Any] | None = None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lora_name(self) -> str | None:
        """Name of the LoRA adapter of all members, None for the base model."""
        return self._adapter.name

    @property
    def lengths(self) -> torch.Tensor:
        """Number of token ids of each member, shape `(n,)`, int64."""
        return torch.from_numpy(self._lineage.lengths[self._places])

    @property
    def finished(self) -> torch.Tensor:
        """Flags of the finished members, shape `(n,)`, bool."""
        return torch.from_numpy(self._finished.copy())

    @property
    def tokens(self) -> torch.Tensor:
        """The token ids of each member, padded with -1, shape `(n, longest)`, int64."""
        lineage = self._lineage
        first_places, new_ids = lineage.suffixes(self._places)
        first = lineage.first
        lengths = lineage.lengths[self._places]
        padded = np.full((len(self), int(lengths.max(initial=0))), NO_TOKEN)
        for place in np.unique(first_places).tolist():
            prompt_ids = first.sequence(place).token_ids
            padded[first_places == place, : len(prompt_ids)] = prompt_ids
        positions = np.arange(padded.shape[1])
        is_after_first = positions >= first.lengths[first_places][:, None]
        padded[is_after_first & (positions < lengths[:, None])] = new_ids[new_ids >= 0]
        return torch.from_numpy(padded)

    @property
    def last_tokens(self) -> torch.Tensor:
        """The last token id of each member, shape `(n,)`, int64.

        Unlike `tokens`, this takes the same time for members of any length.
        """
        if not len(self):
            return torch.empty(0, dtype=torch.long, device="cpu")
        last = self._lineage.last_tokens(self._places, np.ones(len(self), np.int64))
        return torch.from_numpy(last.max(axis=1))

    @overload
    def __getitem__(self, index: int) -> Context: ...
    @overload
    def __getitem__(self, index: slice | ArrayLike) -> Self: ...
    def __getitem__(self, index: Any) -> Context | Self:
        """Return a member as a `Context`, or members as a population.

        Args:
            index: An integer; or a slice, a list or array of indices, possibly with
                repetitions, or of n booleans, as in numpy and torch.

        Raises:
            IndexError: The index is out of range or of another form.
        """
        if isinstance(index, tuple):
            raise IndexError(
                f"population[{', '.join(map(repr, index))}] has {len(index)} indices, and a "
                f"population has one dimension; pass a list, such as population[[0, 1]]"
            )
        if isinstance(index, slice):
            members = np.arange(len(self))[index]
        else:
            array = host_array(index, "an index of a population")
            if array.ndim == 0 and array.dtype.kind in "iu":
                return self._context(int(array))
            if array.ndim != 1 or (array.dtype.kind not in "iub" and array.size):
                raise IndexError(
                    f"a population is indexed by an integer, a slice, or an array of integers "
                    f"or booleans of one dimension; found {array.dtype} of shape {array.shape}"
                )
            members = np.arange(len(self))[signed_index(array)]
        return self._derive(
            self._generation, self._places[members], self._finished[members], self._step
        )

    def __iter__(self) -> Iterator[Context]:
        return map(self._context, range(len(self)))

    @staticmethod
    def cat(populations: Iterable[MembersT]) -> MembersT:
        """Return the concatenation of several populations.

        Draws continue with the random numbers of the population that was extended by the most
        tokens.

        Raises:
            ValueError: There are no populations, or their models or adapters differ.
            TypeError: One of them is not a population.
        """
        if not isinstance(populations, Iterable):
            raise TypeError(f"expected populations; found {populations!r}")
        populations = list(populations)
        if not populations:
            raise ValueError("no populations; pass at least one")
        for population in populations:
            if not isinstance(population, Members):
                raise TypeError(f"expected populations; found {population!r}")
        parts = [population._parts for population in populations]  # noqa: SLF001 - of the same class
        models, generations, places, finished, steps = zip(*parts, strict=True)
        if len(set(models)) > 1:
            place = next(place for place, model in enumerate(models) if model != models[0])
            raise ValueError(
                f"the populations have different models or adapters: {populations[0]!r} and, "
                f"at index {place}, {populations[place]!r}"
            )
        generation = generations[0]
        if all(other is generation for other in generations):
            all_places = np.concatenate(places)
        else:
            generation, all_places = joined_generation([*zip(generations, places, strict=True)])
        all_finished, step = np.concatenate(finished), max(steps)
        return populations[0]._derive(generation, all_places, all_finished, step)  # noqa: SLF001

    @property
    def _parts(self) -> tuple[tuple[object, ...], Generation, Integers64, Flags, int]:
        model = self._lm._scheduler, self._adapter  # noqa: SLF001 - internal to genlm.core.model
        return model, self._generation, self._places, self._finished, self._step

    def extend(self, token_ids: ArrayLike) -> Self:
        """Return the population in which each member is extended by tokens; computes no row.

        Args:
            token_ids: One token for each member, shape `(n,)`, or several, shape `(n, k)`; -1
                adds no token. A numpy or torch array of integers, or lists, of which the
                shorter ones add fewer tokens.

        Raises:
            ValueError: The shape is not one of these.
            PopulationError: Ids are outside the vocabulary.
        """
        ids = self._checked_tokens(token_ids)
        columns = ids[:, None] if ids.ndim == 1 else ids
        scored = self._scored
        if scored is not None and np.array_equal(columns, scored[0]):
            population: Self = scored[1]
            return population
        generation, places = self._generation.extended(self._places, columns)
        step = self._step + columns.shape[1]
        return self._derive(generation, places, self._finished, step)

    def truncate(self, lengths: ArrayLike) -> Self:
        """Return the population of the first tokens of each member; computes no row.

        Truncated members are not finished. The engine's state of their tokens is used.

        Args:
            lengths: Maximum number of tokens of the members, one number or one for each,
                shape `(n,)`; at least 1.

        Raises:
            TypeError: A length is not an integer.
            ValueError: A length is below 1, or there is not one for each member.
        """
        limits = checked_counts("lengths", lengths, len(self), 1)
        current = self._lineage.lengths[self._places]
        is_shorter = limits < current
        if not is_shorter.any():
            return self
        generation, places = joined_generation(
            [(self._generation, self._places)], np.minimum(limits, current)
        )
        return self._derive(generation, places, self._finished & ~is_shorter, self._step)

    def finish(self, members: ArrayLike) -> Self:
        """Return the population with some members marked as finished; these draw no tokens.

        Extensions and copies of a finished member are finished, too; `resume` continues them.

        Args:
            members: Flags of the members to finish, shape `(n,)`, bool.

        Raises:
            ValueError: `members` is not one boolean for each member.
        """
        finished = self._finished | _flags(members, len(self))
        return self._derive(self._generation, self._places, finished, self._step)

    def resume(self) -> Self:
        """Return the population of the same sequences, of which none is finished.

        Draws continue with the next random numbers of a seed.
        """
        return self._derive(
            self._generation, self._places, np.zeros(len(self), bool), self._step
        )

    @property
    def _lineage(self) -> Lineage:
        return self._generation.lineage

    def _checked_tokens(self, token_ids: ArrayLike) -> Integers64:
        """Return token ids of the members, shape `(n,)` or `(n, k)`, -1 for no token."""
        if isinstance(token_ids, tuple) and hasattr(token_ids, "token_ids"):  # a draw
            found = f"{type(token_ids).__name__}; pass its token_ids"
            raise TokenTypeError(found, "token_ids", "integers")
        ids = checked_array(token_ids)
        if ids.ndim not in {1, 2} or len(ids) != len(self):
            raise ValueError(
                f"token ids of shape {ids.shape} for {len(self)} members; expected "
                f"({len(self)},) or ({len(self)}, k)"
            )
        size = self._lm.vocabulary.size
        if ids.size and (ids.min() < NO_TOKEN or ids.max() >= size):
            columns = ids.reshape(len(ids), -1)
            is_invalid = (columns < NO_TOKEN) | (columns >= size)
            members = np.flatnonzero(is_invalid.any(axis=1))
            position = int(is_invalid[members[0]].argmax())
            token_id = int(columns[members[0], position])
            error = TokenIdError(token_id, position, size, "token_ids")
            raise PopulationError(members.tolist(), len(self), error)
        return ids

    def _derive(
        self, generation: Generation, places: Integers64, finished: Flags, step: int
    ) -> Self:
        return type(self)(
            self._lm,
            generation,
            places,
            self._adapter,
            finished=finished,
            step=step,
        )

    def _context(self, member: int) -> Context:
        sequence = self._lineage.sequence(int(self._places[member]))
        return Context(self._lm, sequence, self._adapter)

    def __repr__(self) -> str:
        lora = "" if self.lora_name is None else f", lora {self.lora_name!r}"
        lengths = self._lineage.lengths[self._places]
        tokens = f"{lengths.min()} to {lengths.max()} tokens" if len(self) else "no tokens"
        return f"<Population of {self._lm.name!r}{lora}: {len(self)} members, {tokens}>"


def initial_members(
    requests: Requests, prompts: TokenIds | TokenBatch, size: int | None, lora_name: str | None
) -> tuple[Generation, Integers64, Adapter]:
    """Check the arguments of `AsyncLM.population`.

    Returns:
        The generation, the place of each member in it, and the adapter of the members.
    """
    if size is None:
        sequences = checked_batch(
            cast("TokenBatch", prompts), "pass the number of members as `size`"
        )
        if getattr(sequences, "ndim", 1) == 2:  # numpy and torch
            sequences = [ids[ids != NO_TOKEN] for ids in cast("Iterable[Any]", sequences)]
        parts = map_batch(lambda prompt: requests.context_parts(prompt, lora_name), sequences)
    elif has_several(prompts):
        raise TokenTypeError(
            "several: pass them without `size`, one for each member",
            "`prompts` with `size`",
            "one sequence of token ids",
        )
    else:
        parts = [requests.context_parts(cast("TokenIds", prompts), lora_name)]
    adapters = {adapter for _, adapter in parts}
    if len(adapters) > 1:
        raise ValueError(
            f"the members of a population have one adapter; found "
            f"{', '.join(sorted(str(adapter.name) for adapter in adapters))}"
        )
    generation, places = first_generation([sequence for sequence, _ in parts])
    if size is not None:
        places = places.repeat(checked_size(size, 0))
    return generation, places, adapters.pop() if adapters else BASE_MODEL


def has_several(prompts: Any) -> bool:
    """Whether an argument is a list of sequences, or an array of rows."""
    if isinstance(prompts, (list, tuple)) and prompts:
        return is_sequence_like(prompts[0]) and not isinstance(prompts[0], (str, bytes))
    return getattr(prompts, "ndim", 1) > 1


def checked_array(values: ArrayLike, argument: str = "token_ids") -> Integers64:
    """Return an array of 64-bit integers; lists of token ids are padded with -1."""
    try:
        array = host_array(values, argument)
    except ValueError:
        is_ids = argument == "token_ids" and isinstance(values, (list, tuple))
        rows = [checked_array(row) for row in values] if is_ids else []  # type: ignore[union-attr]
        if not rows or any(row.ndim != 1 for row in rows):
            raise
        array = np.full((len(rows), max(map(len, rows))), NO_TOKEN)
        for place, row in enumerate(rows):
            array[place, : len(row)] = row
    if array.dtype.kind not in "iu" and array.size:
        found = f"an array of {array.dtype}" if array.ndim else type(values).__name__
        raise TokenTypeError(found, argument, "integers")
    return native_array(signed_index(array), np.int64)


def _flags(values: ArrayLike, count: int) -> Flags:
    flags = host_array(values, "members")
    flags = flags if flags.size else flags.astype(bool)  # an empty list
    if flags.dtype != bool or flags.shape != (count,):
        raise ValueError(
            f"members has shape {flags.shape} and type {flags.dtype}; expected a boolean for "
            f"each of {count} members"
        )
    return flags


def checked_counts(name: str, values: ArrayLike, count: int, minimum: int) -> Integers64:
    """Return a number for each of `count` members, from one number or one for each.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is below the minimum, or there is not one for each member.
    """
    if not is_sequence_like(values):
        return np.full(count, min(checked_integer(name, values, minimum), sys.maxsize))
    numbers = checked_array(values, name)
    if numbers.shape != (count,):
        raise ValueError(
            f"{name} has shape {numbers.shape}; expected a number or one for each of {count} "
            f"members"
        )
    if numbers.min(initial=minimum) < minimum:
        raise ValueError(f"{name} has {numbers.min()}; it must be {minimum} or more")
    return numbers
