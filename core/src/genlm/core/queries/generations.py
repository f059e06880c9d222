"""The sequences of a population as columns, and the engine's state of them.

The members of a population refer to its distinct sequences by index. Copying members copies
integers, equal members share a sequence, and an extension adds two columns, whatever the
lengths of the sequences are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import ContextLengthError, PopulationError
from genlm.core.queries.sequence import TokenSequence

__all__ = [
    "NO_TOKEN",
    "Contexts",
    "Generation",
    "Integers64",
    "Lineage",
    "Suffixes",
    "distinct_sequences",
    "first_generation",
    "raise_failed",
]

Integers64 = npt.NDArray[np.int64]

NO_TOKEN = -1
"""Stands for "no token" in arrays of token ids."""

_NOTHING: Integers64 = np.empty(0, np.int64)


class Suffixes(NamedTuple):
    """Sequences as the tokens that follow sequences of an earlier lineage.

    Attributes:
        places: The sequence of the earlier lineage that each begins with, shape `(n,)`.
        token_ids: Tokens after it, shape `(n, k)`, `NO_TOKEN` where a column adds nothing.
    """

    places: Integers64
    token_ids: Integers64


class Lineage:
    """Distinct sequences of token ids, each a sequence of the parent and at most one token.

    Immutable. Make a first one with `of_sequences` and further ones with `extended`.

    Attributes:
        parent: The lineage that this one extends; None for a first one.
        ancestors: The sequence of the parent that each sequence extends, shape `(n,)`; empty
            in a first lineage.
        token_ids: The token that each sequence adds, shape `(n,)`, or `NO_TOKEN`; empty in a
            first lineage.
        lengths: Number of token ids of each sequence, shape `(n,)`.
    """

    __slots__ = ("_sequences", "ancestors", "lengths", "parent", "token_ids")

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
        self._sequences: list[TokenSequence | None] | None = None

    @classmethod
    def of_sequences(cls, sequences: Sequence[TokenSequence]) -> Lineage:
        """Return a first lineage of distinct sequences."""
        lengths = np.array([len(each) for each in sequences], np.int64)
        lineage = cls(None, _NOTHING, _NOTHING, lengths)
        lineage._sequences = list(sequences)
        return lineage

    def extended(self, places: Integers64, token_ids: Integers64) -> tuple[Lineage, Integers64]:
        """Extend sequences by a token each; equal results become one sequence.

        Args:
            places: Sequences of this lineage, shape `(n,)`, repeated or not.
            token_ids: The token of each, or `NO_TOKEN`, shape `(n,)`.

        Returns:
            The next lineage, and the place in it of each extended sequence, shape `(n,)`.
        """
        first = inverse = np.arange(len(places))  # in the order of the members
        if not _is_ascending(places):  # else the results are distinct
            keys = places * (int(token_ids.max()) + 2) + token_ids
            distinct, leaders, numbers = np.unique(keys, return_index=True, return_inverse=True)
            if len(distinct) < len(keys):
                first, inverse = leaders, numbers
        ancestors, tokens = places[first], token_ids[first]
        lengths = self.lengths[ancestors] + (tokens >= 0)
        return Lineage(self, ancestors, tokens, lengths), inverse

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, place: int) -> TokenSequence:
        """Return one sequence, which is made once, of the nearest ancestor that was made."""
        path: list[tuple[list[TokenSequence | None], int, int]] = []
        lineage = self
        while True:
            known = lineage._known_sequences()
            sequence = known[place]
            if sequence is not None:
                break
            path.append((known, place, int(lineage.token_ids[place])))
            place = int(lineage.ancestors[place])
            assert lineage.parent is not None  # noqa: S101 - a first one has all sequences
            lineage = lineage.parent
        for known, place, token_id in reversed(path):
            if token_id >= 0:
                sequence = TokenSequence(token_id.to_bytes(4, sys.byteorder), sequence)
            known[place] = sequence
        return sequence

    def suffixes(self, places: Integers64, earlier: Lineage | None = None) -> Suffixes:
        """Return sequences as what follows those of an earlier lineage.

        Args:
            places: Sequences of this lineage.
            earlier: This lineage or one that it descends from; by default the first one.
        """
        columns: list[Integers64] = []
        lineage = self
        while lineage is not earlier and lineage.parent is not None:
            columns.append(lineage.token_ids[places])
            places = lineage.ancestors[places]
            lineage = lineage.parent
        columns.reverse()
        nothing = np.empty((len(places), 0), np.int64)
        return Suffixes(places, np.stack(columns, axis=1) if columns else nothing)

    def last_tokens(self, places: Integers64, counts: Integers64) -> Integers64:
        """Return the last tokens of sequences.

        Args:
            places: Sequences of this lineage, shape `(n,)`.
            counts: How many tokens of each, shape `(n,)`.

        Returns:
            Shape `(n, k)`, each row in order, with `NO_TOKEN` among the tokens.
        """
        columns, left, lineage = [], counts.copy(), self
        while lineage.parent is not None and left.any():
            column = np.where(left > 0, lineage.token_ids[places], NO_TOKEN)
            columns.append(column)
            left -= column >= 0
            places, lineage = lineage.ancestors[places], lineage.parent
        columns.reverse()
        first = np.full((len(places), int(left.max())), NO_TOKEN)
        for place in np.flatnonzero(left).tolist():  # of first sequences
            sequence = lineage.sequence(int(places[place]))
            first[place, : left[place]] = sequence.ids_from(len(sequence) - int(left[place]))
        return np.concatenate([first, *(column[:, None] for column in columns)], axis=1)

    @property
    def first(self) -> Lineage:
        """The first lineage that this one descends from."""
        lineage = self
        while lineage.parent is not None:
            lineage = lineage.parent
        return lineage

    def _known_sequences(self) -> list[TokenSequence | None]:
        if self._sequences is None:
            self._sequences = [None] * len(self)
        return self._sequences


class Contexts(NamedTuple):
    """State of a generation whose sequences an engine has as contexts, not as arrays.

    Attributes:
        lease: Keeps the engine's state of the contexts alive; None if it has none.
    """

    lease: object


class Generation:
    """A lineage and the engine's state of it, kept while populations refer to it.

    Attributes:
        lineage: The sequences.
        base: The generation whose state is used until this one has a state;
            the engine sets it to None with `state`.
        state: The engine's state of the sequences; only the engine's thread reads and sets it.
            It is dropped on any thread, after the last population of this generation and the
            last generation without a state that extends it.
    """

    __slots__ = ("base", "lineage", "state")

    def __init__(self, lineage: Lineage, base: Generation | None = None) -> None:
        self.lineage = lineage
        self.base = base
        self.state: Any = None

    def keep(self, state: Any) -> None:
        """Set the state; the generation that this one extends is no longer needed."""
        self.state = state
        self.base = None

    def extended(
        self, places: Integers64, columns: Integers64
    ) -> tuple[Generation, Integers64]:
        """Extend sequences by several tokens each; equal results become one sequence.

        Args:
            places: Sequences of the lineage, shape `(n,)`, repeated or not.
            columns: The tokens of each, or `NO_TOKEN`, shape `(n, k)`.

        Returns:
            The next generation, and the place in its lineage of each sequence, shape `(n,)`.
        """
        lineage = self.lineage
        for column in columns.T:
            lineage, places = lineage.extended(places, column)
        return (self if lineage is self.lineage else Generation(lineage, self)), places

    @property
    def is_of_contexts(self) -> bool:
        """Whether the engine has no state of the sequences other than that of contexts."""
        base = self.with_state()
        return base is None or isinstance(base.state, Contexts)

    def with_state(self) -> Generation | None:
        """Return this generation or the nearest one before it that has a state, if any has."""
        generation: Generation | None = self
        while generation is not None and generation.state is None:
            generation = generation.base
        return generation


def first_generation(sequences: Sequence[TokenSequence]) -> tuple[Generation, Integers64]:
    """Return a generation of the distinct sequences, and the place of each sequence in it."""
    places: dict[bytes, int] = {}
    distinct: list[TokenSequence] = []
    for sequence in sequences:
        if sequence.key not in places:
            places[sequence.key] = len(distinct)
            distinct.append(sequence)
    found = np.array([places[sequence.key] for sequence in sequences], np.int64)
    return Generation(Lineage.of_sequences(distinct)), found


def distinct_sequences(
    lineage: Lineage,
    places: Integers64,
    members: Integers64 | None,
    *,
    max_context: int | None,
) -> tuple[Integers64, Integers64]:
    """Return the distinct sequences of members, and the place of each member's sequence.

    Members whose contexts are full are listed by a `PopulationError`.

    Args:
        lineage: The sequences.
        places: The sequence of each member of a population, shape `(n,)`.
        members: Some of the members, ascending, at least one; None for all.
        max_context: Maximum number of tokens of a sequence, None for no limit.
    """
    own = places if members is None else places[members]
    if max_context is not None:
        lengths = lineage.lengths[own]
        if lengths.max() > max_context:
            too_long = (lengths > max_context).astype(np.int64)
            error = ContextLengthError(int(lengths.max()), max_context)
            raise_failed({1: error}, too_long, members, len(places))
    if len(own) == len(lineage) and _is_ascending(own):  # all sequences in order
        return own, own
    wanted, row_of = np.unique(own, return_inverse=True)
    return wanted, row_of


def _is_ascending(places: Integers64) -> bool:
    return bool((places[1:] > places[:-1]).all())


def raise_failed(
    errors: Mapping[int, Exception],
    row_of: Integers64,
    members: Integers64 | None,
    count: int,
) -> None:
    """Raise one error that lists the members whose sequences failed, if any did.

    Args:
        errors: Errors of sequences, by their place in a query's `wanted`.
        row_of: The place in `wanted` of the sequence of each of `members`, or of all.
        members: Some of the members of a population; None for all.
        count: Number of members of the population.
    """
    if errors:
        failed = np.flatnonzero(np.isin(row_of, list(errors)))
        own = failed if members is None else members[failed]
        raise PopulationError(own.tolist(), count, errors[min(errors)])
