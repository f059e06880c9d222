"""The sequences of a population as columns, and the engine's state of the sequences.

The members of a population refer to its distinct sequences by index. Copying members copies
integers, equal members share a sequence, and an extension adds two columns, whatever the
lengths of the sequences are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDiedError,
    PopulationError,
)
from genlm.core.queries.sequence import TokenSequence

Integers64 = npt.NDArray[np.int64]

NO_TOKEN = -1
"""Placeholder for "no token" in arrays of token ids."""

_EMPTY: Integers64 = np.empty(0, np.int64)

_STORED_EVERY = 64
"""Lineages whose depth is a multiple of this number keep the `TokenSequence` objects of their
sequences."""


class Suffixes(NamedTuple):
    """Sequences as continuations of the sequences of an earlier lineage.

    Attributes:
        places: Index of the continued sequence in the earlier lineage, shape `(n,)`.
        token_ids: Tokens of the continuation, shape `(n, k)`, `NO_TOKEN` where a column adds no
            token.
    """

    places: Integers64
    token_ids: Integers64


class Lineage:
    """Distinct sequences of token ids, which extend a parent's sequences by at most one token.

    A lineage is immutable. `of_sequences` creates a first lineage, `extended` further ones.

    Attributes:
        parent: The lineage that this one extends; None for a first lineage.
        ancestors: Index of the extended sequence in the parent, shape `(n,)`; empty in a first
            lineage.
        token_ids: New token of each sequence, or `NO_TOKEN`, shape `(n,)`; empty in a first
            lineage.
        lengths: Number of token ids of each sequence, shape `(n,)`.
        depth: Number of lineages that this one extends.
        number: Number of the first lineage, in the order of their creation in this process.
        stored: Sequences that were built, None for the others; None if none was built.
    """

    __slots__ = ("ancestors", "depth", "lengths", "number", "parent", "stored", "token_ids")

    _numbers = itertools.count()

    def __init__(
        self,
        parent: Lineage | None,
        ancestors: Integers64,
        token_ids: Integers64,
        lengths: Integers64,
    ) -> None:
        self.parent = parent
        self.ancestors = ancestors
        self.token_ids = token_ids
        self.lengths = lengths
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.number: int = next(self._numbers) if parent is None else parent.number
        self.stored: list[TokenSequence | None] | None = None

    @classmethod
    def of_sequences(cls, sequences: Sequence[TokenSequence]) -> Lineage:
        """Return a first lineage of distinct sequences."""
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        lineage = cls(None, _EMPTY, _EMPTY, lengths)
        lineage.stored = list(sequences)
        return lineage

    def extended(self, places: Integers64, token_ids: Integers64) -> tuple[Lineage, Integers64]:
        """Extend every sequence by one token; equal results become one sequence.

        Args:
            places: Indices of sequences of this lineage, possibly repeated, shape `(n,)`.
            token_ids: Token for every entry of `places`, or `NO_TOKEN`, shape `(n,)`.

        Returns:
            The next lineage, and the indices of the extended sequences in it, shape `(n,)`.
        """
        ancestors, tokens = places, token_ids.copy()  # in the order of the members
        inverse = np.arange(len(places))
        if not is_ascending(places):  # otherwise the results are distinct
            keys = places * (int(token_ids.max()) + 2) + token_ids
            distinct, first_uses, inverses = np.unique(
                keys, return_index=True, return_inverse=True
            )
            if len(distinct) < len(keys):
                ancestors, tokens, inverse = places[first_uses], tokens[first_uses], inverses
        lengths = self.lengths[ancestors] + (tokens >= 0)
        return Lineage(self, ancestors, tokens, lengths), inverse

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, place: int) -> TokenSequence:
        """Return one sequence; see `sequences`."""
        stored = self.stored
        sequence = None if stored is None else stored[place]
        return self.sequences(np.array([place]))[0] if sequence is None else sequence

    def sequences(self, places: Integers64) -> list[TokenSequence]:
        """Return some sequences.

        Each extends the sequence of its nearest ancestor that has one, and is stored. Of the
        ancestors, only the first lineage, the nearest one with stored sequences, and those
        whose depth is a multiple of `_STORED_EVERY` keep them, for members that are not
        requested at every step.

        Args:
            places: Indices of sequences of this lineage, possibly repeated, shape `(n,)`.
        """
        indices = places.tolist()
        lineage, requested = self, indices
        steps = []  # from lineages that keep sequences to the nearest earlier one
        while True:
            storage: list[Any] = lineage._storage()
            missing = [place for place in dict.fromkeys(requested) if storage[place] is None]
            if not missing:
                break
            ancestors = np.array(missing)
            columns: list[Integers64] = []
            while not columns or (lineage.stored is None and lineage.depth % _STORED_EVERY):
                columns.append(lineage.token_ids[ancestors])
                ancestors = lineage.ancestors[ancestors]
                assert lineage.parent is not None  # noqa: S101 - a first lineage has all
                lineage = lineage.parent
            requested = ancestors.tolist()
            steps.append((storage, missing, columns, requested))
        for later, missing, added_columns, origins in reversed(steps):
            rows = np.stack(added_columns[::-1], axis=1)
            is_token = rows >= 0
            packed, begin = rows[is_token].astype(np.uint32).tobytes(), 0
            ends = (4 * is_token.sum(axis=1).cumsum()).tolist()
            for place, origin, end in zip(missing, origins, ends, strict=True):
                added, before = packed[begin:end], storage[origin]
                later[place] = TokenSequence(added, before) if added else before
                begin = end
            storage = later
        return [storage[place] for place in indices]

    def origins(self, places: Integers64, earlier: Lineage) -> Integers64:
        """Return the index of the sequence of an earlier lineage that each sequence continues.

        Args:
            places: Indices of sequences of this lineage, shape `(n,)`.
            earlier: This lineage or one of its ancestors.
        """
        lineage = self
        while lineage is not earlier and lineage.parent is not None:
            places, lineage = lineage.ancestors[places], lineage.parent
        return places

    def suffixes(self, places: Integers64, earlier: Lineage | None = None) -> Suffixes:
        """Return sequences as continuations of the sequences of an earlier lineage.

        Args:
            places: Indices of sequences of this lineage, shape `(n,)`.
            earlier: This lineage or one of its ancestors; by default the first lineage.
        """
        columns: list[Integers64] = []
        lineage = self
        while lineage is not earlier and lineage.parent is not None:
            columns.append(lineage.token_ids[places])
            places = lineage.ancestors[places]
            lineage = lineage.parent
        columns.reverse()
        empty = np.empty((len(places), 0), np.int64)
        return Suffixes(places, np.stack(columns, axis=1) if columns else empty)

    def last_tokens(self, places: Integers64, counts: Integers64) -> Integers64:
        """Return the last tokens of sequences.

        Args:
            places: Indices of sequences of this lineage, shape `(n,)`.
            counts: Number of tokens of each sequence, shape `(n,)`.

        Returns:
            Token ids in order, shape `(n, k)`, with `NO_TOKEN` at any position of a row.
        """
        parts = [np.empty((len(places), 0), np.int64)]
        remaining, lineage = counts.copy(), self
        while remaining.any():
            if lineage.parent is None:
                first = np.full((len(places), int(remaining.max())), NO_TOKEN)
                for row in np.flatnonzero(remaining).tolist():
                    sequence, count = lineage.sequence(int(places[row])), int(remaining[row])
                    first[row, :count] = sequence.ids_from(len(sequence) - count)
                parts.append(first)
                break
            column = np.where(remaining > 0, lineage.token_ids[places], NO_TOKEN)
            parts.append(column[:, None])
            remaining -= column >= 0
            places, lineage = lineage.ancestors[places], lineage.parent
        return np.concatenate(parts[::-1], axis=1)

    @property
    def first(self) -> Lineage:
        """The first lineage among the ancestors of this one, or this one."""
        lineage = self
        while lineage.parent is not None:
            lineage = lineage.parent
        return lineage

    def _storage(self) -> list[TokenSequence | None]:
        """Return the stored sequences; if there are none yet, drop those of older ancestors."""
        stored = self.stored  # another thread may drop them
        if stored is None:
            stored = self.stored = [None] * len(self)
            lineage, is_nearest = self.parent, True
            while lineage is not None:
                if lineage.stored is not None:
                    if not is_nearest:
                        if lineage.depth % _STORED_EVERY:  # 0 in the first one, which keeps all
                            lineage.stored = None
                        break
                    is_nearest = False
                lineage = lineage.parent
        return stored


class Source(NamedTuple):
    """Sequences of an earlier generation with a state, and later ones that begin like them.

    Attributes:
        generation: The earlier generation.
        origins: Indices of its sequences, shape `(n,)`.
        places: Index of the later sequence that begins with tokens of each, ascending, shape
            `(n,)`.
        lengths: Number of these tokens, shape `(n,)`.
    """

    generation: Generation
    origins: Integers64
    places: Integers64
    lengths: Integers64

    def of(self, places: Integers64) -> Source:
        """Return this source for some of the later sequences, which `places` numbers anew."""
        found = np.flatnonzero(np.isin(places, self.places))
        index = np.searchsorted(self.places, places[found])
        return Source(self.generation, self.origins[index], found, self.lengths[index])


class Generation:
    """A lineage and the engine's state of it, kept while populations refer to it.

    Attributes:
        lineage: The sequences.
        base: The generation whose state is used until this one has a state; `keep` sets it to
            None.
        joined: Sources of the first sequences of a concatenation or truncation; `keep` clears
            it.
        state: The state of the sequences that the engine has set by `keep`, an object of the
            core if their rows were computed as separate queries, or None. Engines recognise
            their states by the type. Only the engine's thread sets it, also while other threads
            derive populations. Any thread may drop it, after the last population of this
            generation and the last generation without a state that extends it.
    """

    __slots__ = ("__weakref__", "base", "joined", "lineage", "state")

    def __init__(self, lineage: Lineage, base: Generation | None = None) -> None:
        self.lineage = lineage
        self.base = base
        self.joined: list[Source] = []
        self.state: Any = None

    def keep(self, state: Any) -> None:
        """Set the state, and drop the references to earlier generations."""
        self.state = state
        self.base, self.joined = None, []

    @property
    def root(self) -> Generation:
        """The nearest generation with a state, or the first one if none has a state."""
        generation = self
        while (base := generation.base) is not None:  # None once there is a state; read once
            generation = base
        return generation

    def sources(self) -> list[Source]:
        """Return the nearest earlier generations with a state, and their common sequences."""
        root, members = self.root, np.arange(len(self.lineage))
        roots = self.lineage.origins(members, root.lineage)
        if root.state is not None:
            return [Source(root, roots, members, root.lineage.lengths[roots])]
        return [source.of(roots) for source in root.joined]

    def extended(
        self, places: Integers64, columns: Integers64
    ) -> tuple[Generation, Integers64]:
        """Extend every sequence by several tokens; equal results become one sequence.

        Args:
            places: Indices of sequences of the lineage, possibly repeated, shape `(n,)`.
            columns: Tokens for every entry of `places`, or `NO_TOKEN`, shape `(n, k)`.

        Returns:
            The next generation, and the indices of the sequences in its lineage, shape `(n,)`.
        """
        lineage = self.lineage
        for column in columns.T:
            lineage, places = lineage.extended(places, column)
        return (self if lineage is self.lineage else Generation(lineage, self)), places


def first_generation(sequences: Sequence[TokenSequence]) -> tuple[Generation, Integers64]:
    """Return a generation of the distinct sequences, and the index of every sequence in it."""
    places: dict[bytes, int] = {}
    distinct: list[TokenSequence] = []
    for sequence in sequences:
        if sequence.key not in places:
            places[sequence.key] = len(distinct)
            distinct.append(sequence)
    indices = np.array([places[sequence.key] for sequence in sequences], np.int64)
    return Generation(Lineage.of_sequences(distinct)), indices


def distinct_sequences(
    lineage: Lineage,
    places: Integers64,
    members: Integers64 | None,
    *,
    max_context: int | None = None,
) -> tuple[Integers64, Integers64]:
    """Return the distinct sequences of members, and the index of each member among them.

    Args:
        lineage: The sequences.
        places: Index of the sequence of each member of a population, shape `(n,)`.
        members: Indices of some members, ascending, at least one; None for all members.
        max_context: Maximum number of tokens of a sequence, None for no limit.

    Returns:
        `wanted` and `row_of` of a `GroupQuery`.

    Raises:
        PopulationError: The sequences of members exceed `max_context`.
    """
    member_places = places if members is None else places[members]
    if max_context is not None:
        lengths = lineage.lengths[member_places]
        if lengths.max() > max_context:
            too_long = (lengths > max_context).astype(np.int64)
            error = ContextLengthError(int(lengths.max()), max_context)
            raise_member_errors({1: error}, too_long, members, len(places))
    is_wanted = np.zeros(len(lineage), bool)
    is_wanted[member_places] = True
    [wanted] = is_wanted.nonzero()
    if len(wanted) == len(lineage):
        return wanted, member_places
    return wanted, (is_wanted.cumsum() - 1)[member_places]


def is_ascending(places: Integers64) -> bool:
    """Whether every index is above the one before it."""
    return bool((places[1:] > places[:-1]).all())


def is_identity(indices: Integers64, count: int) -> bool:
    """Whether indices are those from 0 to `count - 1`, in order."""
    return indices.tobytes() == np.arange(count).tobytes()


def raise_member_errors(
    errors: Mapping[int, Exception],
    row_of: Integers64,
    members: Integers64 | None,
    count: int,
) -> None:
    """Raise one `PopulationError` for the members whose sequences failed, if there are any.

    The error of an engine that was closed or has ended is raised itself.

    Args:
        errors: Errors of sequences, by their index in a query's `wanted`.
        row_of: Index in `wanted` of the sequence of each entry of `members`, shape `(m,)`.
        members: Indices of some members of a population, ascending and possibly repeated, shape
            `(m,)`; None for all members.
        count: Number of members of the population.
    """
    if errors:
        for error in errors.values():
            if isinstance(error, (EngineClosedError, EngineDiedError)):
                raise error
        failed = np.flatnonzero(np.isin(row_of, list(errors)))
        failed_members = failed if members is None else np.unique(members[failed])
        raise PopulationError(failed_members.tolist(), count, errors[min(errors)])
