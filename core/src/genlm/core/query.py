"""What the scheduler and an engine exchange: queries, requested outputs, and completions.

Plain values. `Query` and `Completion` are made for every request, so neither is a frozen
dataclass, which takes twice the time to make.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

from genlm.core.sequence import TokenSequence

if TYPE_CHECKING:
    import torch

    from genlm.core.generations import Generation, Integers64
    from genlm.core.group_sampling import GroupSampling, SampledGroup

__all__ = [
    "ROW_ONLY",
    "Completion",
    "GroupQuery",
    "GroupReduction",
    "GroupResult",
    "GroupValues",
    "Query",
    "Reduced",
    "Reduction",
    "SamplingParams",
    "TokenScores",
]

ROW_ONLY: tuple[None] = (None,)
"""The outputs of a query that asks for its row and nothing else."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a sequence.

    Attributes:
        max_tokens: The most tokens to draw, at least 1.
        temperature: Divides the log-probabilities; 0 takes the most likely token.
        stop_token_ids: Drawing one of these ends the continuation, which leaves it out.
        seed: Makes the continuation reproducible; None draws a fresh seed.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None


class Query:
    """One request to an engine, validated against its vocabulary and context.

    Two queries are equal if all their attributes are. Attributes are not changed after a query
    was made; `replace` makes another one.

    Attributes:
        query_id: Unique among the scheduler's queries; names the answer.
        adapter: Name of a loaded LoRA adapter, None for the base model.
        sampling: None asks for the next-token row; otherwise for a continuation
            (only engines with `Capability.SAMPLE` receive such queries).
        outputs: Requested outputs: the row itself (None) and reductions. An engine may
            ignore them and return the row, which the core then reduces.
        targets: If not empty, the query asks for `TokenScores` in place of a row: how likely
            each of these ids is at the end of the sequence, where all but the last of them
            are its last ids (only engines with `Capability.SCORE` receive such queries). Its
            output may be a `PositionReduction`, which is then computed of the rows before the
            targets.
        is_checked: Whether it was made of a `TokenSequence`, whose ids `AsyncLM` has checked.

    Args:
        query_id: As above.
        token_ids: The sequence, oldest first, never empty.
        adapter: As above.
        sampling: As above.
        outputs: As above.
        targets: As above.
    """

    __slots__ = (
        *("_sequence", "_token_ids", "adapter", "is_checked", "outputs", "query_id"),
        *("sampling", "targets"),
    )

    def __init__(
        self,
        query_id: int,
        token_ids: Sequence[int] | TokenSequence,
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        outputs: tuple[Reduction | None, ...] = ROW_ONLY,
        targets: tuple[int, ...] = (),
    ) -> None:
        self.query_id = query_id
        self.adapter = adapter
        self.sampling = sampling
        self.outputs = outputs
        self.targets = targets
        self.is_checked = type(token_ids) is TokenSequence
        self._sequence: TokenSequence | None = None
        self._token_ids: tuple[int, ...] | None = None
        if type(token_ids) is TokenSequence:
            self._sequence = token_ids
        else:
            self._token_ids = tuple(cast("Sequence[int]", token_ids))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, put together when first read."""
        if self._token_ids is None:
            assert self._sequence is not None  # noqa: S101 - one of the two is there
            self._token_ids = self._sequence.token_ids
        return self._token_ids

    @property
    def sequence(self) -> TokenSequence:
        """The token ids as a sequence, whose keys and last ids cost no more for long ones."""
        if self._sequence is None:
            assert self._token_ids is not None  # noqa: S101 - one of the two is there
            self._sequence = TokenSequence.of(self._token_ids)
        return self._sequence

    def __len__(self) -> int:
        """Number of token ids."""
        return len(self.sequence if self._token_ids is None else self._token_ids)

    def replace(self, **changes: Any) -> Query:
        """Return a copy with other attributes, by the names of the arguments."""
        tokens = self._token_ids if self._sequence is None else self._sequence
        arguments: dict[str, Any] = {
            "query_id": self.query_id,
            "token_ids": tokens,
            "adapter": self.adapter,
            "sampling": self.sampling,
            "outputs": self.outputs,
            "targets": self.targets,
        }
        return type(self)(**(arguments | changes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Query):
            return NotImplemented
        return self._details == other._details and self.token_ids == other.token_ids

    def __hash__(self) -> int:
        return hash(self._details)

    @property
    def _details(self) -> tuple[object, ...]:
        return self.query_id, self.adapter, self.sampling, self.outputs, self.targets

    def __repr__(self) -> str:
        more = "" if self.outputs == ROW_ONLY else f", outputs={self.outputs!r}"
        more += f", targets={self.targets}" if self.targets else ""
        return (
            f"Query(query_id={self.query_id}, token_ids={self.token_ids}, "
            f"adapter={self.adapter!r}, sampling={self.sampling!r}{more})"
        )


class Reduced(NamedTuple):
    """The answer to a query for reductions, or for a row and reductions.

    Attributes:
        values: A result for each of the query's `outputs`, in order: a row, the result of a
            reduction, or an exception that this output alone fails with.
    """

    values: tuple[Any, ...]


class TokenScores(NamedTuple):
    """Scores of given tokens, each after the tokens before it.

    Attributes:
        logprobs: Natural-log probabilities, shape `(n,)`, float32, in main memory; `-inf` for a
            target that is impossible.
        is_top: Whether no other token was more likely, shape `(n,)`, bool, in main memory.
    """

    logprobs: torch.Tensor
    is_top: torch.Tensor


class Reduction(abc.ABC):
    """A function of a row, requested in place of the row; equal instances share one result.

    Subclasses are immutable and hashable, such as frozen dataclasses. An engine that computes
    in other processes must be able to import them there.
    """

    is_cacheable: bool = True
    """Whether the output cache stores results for later requests with an equal instance. A
    result None is never stored."""

    @classmethod
    @abc.abstractmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Self]) -> Sequence[Any]:
        """Reduce one row for each request.

        When this raises, the requests are computed one by one, so that only those that cause
        it fail.

        Args:
            rows: Natural-log probabilities, shape `(len(requests), vocab_size)`, float32, on
                the engine's device. Must not be changed: other reductions read them.
            requests: Row i is that of request i.

        Returns:
            A result for each request, in main memory; an exception fails this request alone.
            Tensors and arrays that are views of the rows or of other memory, also those in
            tuples, lists and dictionaries, are copied for their callers.
        """


class GroupReduction(abc.ABC):
    """A function of the rows of a group; its results are columns with an entry for each member.

    The attributes of a subclass are columns as well, or numbers that all members share. An
    engine that computes in other processes must be able to import it there.
    """

    stays_on_device: ClassVar[bool] = False
    """Whether callers get the columns on the engine's device, and not in main memory."""

    @abc.abstractmethod
    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Reduce the rows of some members.

        Args:
            rows: Natural-log probabilities of distinct sequences, shape `(d, vocab_size)`,
                float32, on the engine's device. Must not be changed.
            row_of: The row of each member, shape `(m,)`, int64, in main memory.
            members: Which entries of this object's columns belong to these members, shape
                `(m,)`, int64, in main memory.

        Returns:
            Tensors whose first dimension is `m`; the same number of them, of equal dtypes and
            further dimensions, for all calls.
        """


@dataclass(frozen=True, slots=True, eq=False)
class GroupQuery:
    """A request for reductions of the rows of many sequences.

    Attributes:
        query_id: Unique among the scheduler's queries; names the answer.
        generation: The sequences.
        wanted: Sequences of the generation whose rows are needed, each once, shape `(d,)`.
        row_of: The place in `wanted` of each member's sequence, shape `(n,)`.
        reduction: Computes the columns of the answer.
        adapter: Name of a loaded LoRA adapter, None for the base model.
        lease: Keeps the engine's state of contexts, given as pairs of adapter and sequence key,
            alive until the object that it returns is dropped; None if the engine keeps nothing
            for contexts. An engine that keeps the generation by other means need not call it.
        sampling: Asks for continuations instead of `reduction`: `wanted` and `row_of` are those
            of the members that draw a first token, and the answer is a `SampledGroup`. Only an
            engine whose attribute `samples_groups` is true gets such a query. None otherwise.
    """

    query_id: int
    generation: Generation
    wanted: Integers64
    row_of: Integers64
    reduction: GroupReduction
    adapter: str | None = None
    lease: Callable[[list[tuple[str | None, bytes]]], object] | None = None
    sampling: GroupSampling | None = None

    def keep_contexts(self) -> None:
        """Have the generation keep what the engine has for its sequences, by their keys."""
        if self.generation.state is not None:
            return
        kept: object = ()
        if self.lease is not None:
            sequence = self.generation.lineage.sequence
            kept = self.lease([(self.adapter, sequence(i).key) for i in self.wanted.tolist()])
        self.generation.keep(kept)

    def __len__(self) -> int:
        """Number of token ids of the sequences."""
        return int(self.generation.lineage.lengths[self.wanted].sum())


class GroupResult(NamedTuple):
    """The answer to a `GroupQuery`.

    Attributes:
        columns: Results of the reduction, one entry per member; those of members that
            failed mean nothing. Empty if all failed.
        errors: Errors of sequences that failed, by their place in `wanted`.
    """

    columns: tuple[torch.Tensor, ...]
    errors: dict[int, Exception]


class GroupValues(NamedTuple):
    """What an engine computed for a part of a group.

    Attributes:
        values: Shape `(d, width)`, on the engine's device.
        are_logits: Whether they are logits, as `rows_from_logits` takes them, and not rows.
    """

    values: torch.Tensor
    are_logits: bool


class Completion(NamedTuple):
    """The answer to one query: a result or an error, never both.

    Attributes:
        query_id: The query that this answers.
        result: The row of log-probabilities, shape `(vocab_size,)`, or a `Reduced`; for a
            query with `sampling` the list of drawn token ids, for one with `targets` and no
            other output its `TokenScores`; for a `GroupQuery` a `GroupResult`, or a
            `SampledGroup`. A row shares its memory with no other tensor; it belongs to the
            receiver.
        error: The error, if the query failed.
    """

    query_id: int
    result: (
        torch.Tensor | Reduced | TokenScores | list[int] | GroupResult | SampledGroup | None
    ) = None
    error: Exception | None = None
