"""Values that the scheduler and an engine exchange: queries, requested outputs, completions.

`Query` and `Completion` are created for every request, so neither is a frozen dataclass, whose
construction takes twice the time.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias, cast

from genlm.core.queries.member_states import NO_CONTEXTS, Contexts
from genlm.core.queries.sequence import TokenSequence

if TYPE_CHECKING:
    import torch

    from genlm.core.engine.group_sampling import GroupSampling, SampledGroup
    from genlm.core.queries.generations import Generation, Integers64

Outputs: TypeAlias = "tuple[Reduction | GroupReduction | None, ...]"

ROW_ONLY: tuple[None] = (None,)
"""The outputs of a query that requests only the row."""

_MAX_PRINTED = 64
"""Maximum number of ids that the `repr` of a query contains."""


class Query:
    """One request to an engine, validated against its vocabulary and context size.

    Two queries are equal if all their attributes but `turn` are equal. Attributes must not be
    changed after `submit`; `replace` returns a new query.

    Attributes:
        query_id: Id of the query and of its completion, unique within the scheduler.
        token_ids: The sequence, oldest first, at least one id; assembled on first access.
        adapter: Name of a loaded LoRA adapter, None for the base model.
        outputs: Requested outputs: the row itself (None) and reductions. An engine may
            ignore them and return the row, which the core then reduces.
        targets: If not empty, the query requests `TokenScores` in place of a row: the scores
            of the last tokens of the sequence, where all targets but the last one are the last
            ids of the sequence. Only engines with `Capability.SCORE` receive such queries. The
            output may be a `GroupReduction`, whose members are the rows that predict the
            targets.
        turn: Number of queries of the same request before this one, by which engines order
            pending queries (`Turns`).
        is_checked: Whether the ids are a `TokenSequence`, which `AsyncLM` has checked.
    """

    __slots__ = (
        *("_sequence", "_token_ids", "adapter", "is_checked", "outputs", "query_id"),
        *("targets", "turn"),
    )

    def __init__(
        self,
        query_id: int,
        token_ids: Sequence[int] | TokenSequence,
        adapter: str | None = None,
        *,
        outputs: Outputs = ROW_ONLY,
        targets: tuple[int, ...] = (),
        turn: int = 0,
    ) -> None:
        self.query_id = query_id
        self.adapter = adapter
        self.outputs = outputs
        self.targets = targets
        self.turn = turn
        self.is_checked = type(token_ids) is TokenSequence
        self._sequence: TokenSequence | None = None
        self._token_ids: tuple[int, ...] | None = None
        if type(token_ids) is TokenSequence:
            self._sequence = token_ids
        else:
            self._token_ids = tuple(cast("Sequence[int]", token_ids))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, assembled on first access."""
        if self._token_ids is None:
            assert self._sequence is not None  # noqa: S101 - set by the constructor
            self._token_ids = self._sequence.token_ids
        return self._token_ids

    @property
    def sequence(self) -> TokenSequence:
        """The token ids as a `TokenSequence`, whose key and last ids are available in O(1)."""
        if self._sequence is None:
            assert self._token_ids is not None  # noqa: S101 - set by the constructor
            self._sequence = TokenSequence.of(self._token_ids)
        return self._sequence

    def __len__(self) -> int:
        """Number of token ids."""
        return len(self.sequence if self._token_ids is None else self._token_ids)

    @property
    def first_target(self) -> int:
        """Position of the token after which the first of the targets follows."""
        return len(self) - len(self.targets)

    def replace(self, **changes: Any) -> Query:
        """Return a copy with changed arguments."""
        tokens = self._token_ids if self._sequence is None else self._sequence
        arguments: dict[str, Any] = {
            "query_id": self.query_id,
            "token_ids": tokens,
            "adapter": self.adapter,
            "outputs": self.outputs,
            "targets": self.targets,
            "turn": self.turn,
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
        return self.query_id, self.adapter, self.outputs, self.targets

    def __repr__(self) -> str:
        more = "" if self.outputs == ROW_ONLY else f", outputs={self.outputs!r}"
        more += f", targets={self.targets}" if self.targets else ""
        ids = self.token_ids if len(self) <= _MAX_PRINTED else self.sequence
        return (
            f"Query(query_id={self.query_id}, token_ids={ids}, adapter={self.adapter!r}{more})"
        )


class Reduced(NamedTuple):
    """The result of a query for reductions, or for a row and reductions.

    Attributes:
        values: Results of the query's `outputs`, in order: a row, the result of a reduction,
            or the exception of a failed output.
    """

    values: tuple[Any, ...]


class TokenScores(NamedTuple):
    """Scores of given tokens, conditioned on the tokens before them.

    Attributes:
        logprobs: Natural-log probabilities, shape `(n,)`, float32, in main memory; `-inf` for
            an impossible token.
        is_top: Whether no other token was more likely, shape `(n,)`, bool, in main memory.
    """

    logprobs: torch.Tensor
    is_top: torch.Tensor


class Reduction(abc.ABC):
    """A function of a row, requested in place of the row; equal instances share one result.

    Subclasses are immutable and hashable, such as frozen dataclasses. If the engine runs in
    other processes, these must be able to import the subclass.
    """

    is_cacheable: bool = True
    """Whether the output cache stores results for later requests with an equal instance. A
    result None is never stored."""

    reads_logits: bool = False
    """Whether `compute_from_logits` computes this request, if the engine has logits."""

    @classmethod
    @abc.abstractmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Self]) -> Sequence[Any]:
        """Reduce one row for each request.

        If `compute` raises an exception of any kind, the requests are computed one by one, and
        only the requests that raise again fail.

        Args:
            rows: Natural-log probabilities, shape `(len(requests), vocab_size)`, float32, on
                the engine's device. They must not be changed: other reductions read them.
            requests: Requested instances; row i is the row of request i.

        Returns:
            One result per request, in main memory; an exception as result fails only its
            request. Tensors and arrays that are views of the rows or of other memory, also
            those in tuples, lists and dictionaries, are copied for their callers.
        """

    @classmethod
    def compute_from_logits(
        cls, logits: torch.Tensor, requests: Sequence[Self]
    ) -> Sequence[Any] | None:
        """Reduce logits, for requests with `reads_logits`.

        If it raises or returns None for several requests, they are computed one by one; those
        for which it does so again are computed by `compute`.

        Args:
            logits: As `rows` of `compute`, but neither normalised nor checked, in the floating
                dtype in which the engine computed them.
            requests: As `compute`.

        Returns:
            As `compute`; None if a request needs its normalised row, for example because the
            row is not a distribution. The default returns None.
        """
        del logits, requests
        return None


class GroupReduction(abc.ABC):
    """A function of the rows of a group; its results are columns with an entry for each member.

    The attributes of a subclass are also columns, or numbers that all members share. If the
    engine runs in other processes, these must be able to import the subclass.
    """

    stays_on_device: ClassVar[bool] = False
    """Whether the columns are returned on the engine's device, not in main memory."""

    @abc.abstractmethod
    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Reduce the rows of some members.

        Args:
            rows: Natural-log probabilities of distinct sequences, shape `(d, vocab_size)`,
                float32, on the engine's device. They must not be changed, or used after the
                call.
            row_of: Index of each member's row, shape `(m,)`, int64, in main memory.
            members: Indices of these members in the columns of this object, shape `(m,)`,
                int64, in main memory.

        Returns:
            Tensors whose first dimension is `m`. Their number, dtypes and further dimensions
            are the same in all calls.
        """

    def compute_from_logits(
        self, logits: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        """Reduce logits, for reductions that do not need normalised rows.

        Args:
            logits: As `rows` of `compute`, but neither normalised nor checked, in the floating
                dtype in which the engine computed them.
            row_of: As `compute`.
            members: As `compute`.

        Returns:
            As `compute`; None if `compute` must be called instead, because the reduction needs
            rows, or because a row is not a distribution. The default returns None.
        """
        del logits, row_of, members
        return None

    def of(self, members: Integers64) -> GroupReduction:
        """Return the reduction of some members, for engines that divide groups.

        Args:
            members: Indices of members in the columns of this object, shape `(m,)`; they are
                the members 0 to m - 1 of the result.

        Returns:
            By default a reduction that calls this one, and thus contains the columns of all
            members.
        """
        return MembersOf(self, members)


class MembersOf(GroupReduction):
    """A reduction of some members of another one."""

    def __init__(self, reduction: GroupReduction, members: Integers64) -> None:
        self.reduction = reduction
        self._members = members

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Call the other reduction."""
        return self.reduction.compute(rows, row_of, members.new_tensor(self._members)[members])

    def compute_from_logits(
        self, logits: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        """Call the other reduction."""
        chosen = members.new_tensor(self._members)[members]
        return self.reduction.compute_from_logits(logits, row_of, chosen)


@dataclass(frozen=True, slots=True, eq=False)
class GroupQuery:
    """A request for reductions of the rows of many sequences.

    Attributes:
        query_id: Id of the query and of its completion, unique within the scheduler.
        generation: The sequences.
        wanted: Indices of the sequences of the generation whose rows are requested, without
            repetition unless there is `dropped`, shape `(d,)`.
        row_of: Index in `wanted` of the sequence of each member, shape `(n,)`.
        reduction: Reduction that computes the columns of the result.
        adapter: Name of a loaded LoRA adapter, None for the base model.
        lease: Function of a list of pairs of adapter and sequence key, which keeps the engine's
            state of these contexts alive until its result is dropped; None if the engine has no
            state of contexts. An engine that stores the state of the generation itself need not
            call it.
        sampling: Parameters of continuations that are computed instead of `reduction`, else
            None: `wanted` and `row_of` then belong to the members that draw a first token, and
            the result is a `SampledGroup`. Only engines with an attribute `samples_groups`
            receive such queries.
        dropped: Number of last tokens of each of these sequences that do not precede its row,
            shape `(d,)`: rows are requested after several prefixes of a sequence, the shortest
            first. None for rows after whole sequences. Only engines with an attribute
            `scored_columns`, the maximum number of rows of a sequence, receive such queries.
    """

    query_id: int
    generation: Generation
    wanted: Integers64
    row_of: Integers64
    reduction: GroupReduction
    adapter: str | None = None
    lease: Callable[[list[tuple[str | None, bytes]]], object] | None = None
    sampling: GroupSampling | None = None
    dropped: Integers64 | None = None

    @property
    def lengths(self) -> Integers64:
        """Number of token ids of each sequence, shape `(d,)`."""
        lengths = self.generation.lineage.lengths[self.wanted]
        return lengths if self.dropped is None else lengths - self.dropped

    def sequences(self, places: Integers64 | slice) -> list[TokenSequence]:
        """Return some sequences, by their indices in `wanted`."""
        sequences = self.generation.lineage.sequences(self.wanted[places])
        if self.dropped is None:
            return sequences
        lengths = self.lengths[places].tolist()
        return [each.prefix(n) for each, n in zip(sequences, lengths, strict=True)]

    def keep_contexts(self) -> None:
        """Lease the contexts of the sequences, unless the generation has another state."""
        generation, wanted = self.generation, self.wanted
        if self.dropped is not None or not isinstance(generation.state, Contexts | None):
            return
        if self.lease is None:
            generation.keep(NO_CONTEXTS)
            return
        contexts, lineage = Contexts.of(generation), generation.lineage
        contexts.count_query(wanted)
        keys = [sequence.key for sequence in lineage.sequences(wanted)]
        contexts.put(wanted, keys, lineage.lengths[wanted])
        leased = [(self.adapter, key) for key in contexts.states if key is not None]
        generation.keep(contexts._replace(lease=self.lease(leased)))

    def __len__(self) -> int:
        """Number of token ids of the sequences."""
        return int(self.lengths.sum())


class GroupResult(NamedTuple):
    """The result of a `GroupQuery`.

    Attributes:
        columns: Results of the reduction, one entry per member; entries of failed members are
            undefined. Empty if all members failed.
        errors: Errors of failed sequences, by their index in `wanted`.
    """

    columns: tuple[torch.Tensor, ...]
    errors: dict[int, Exception]


class GroupValues(NamedTuple):
    """Rows or logits of several sequences.

    Attributes:
        values: Shape `(d, width)`, on the engine's device.
        are_logits: Whether the values are logits for `rows_from_logits`, not rows.
    """

    values: torch.Tensor
    are_logits: bool


class Completion(NamedTuple):
    """The result or the error of one query, never both.

    Attributes:
        query_id: Id of the query.
        result: The row of log-probabilities, shape `(vocab_size,)`, or a `Reduced`; for a
            query with `targets` and no other output its `TokenScores`; for a `GroupQuery` a
            `GroupResult` or a `SampledGroup`. A row shares its memory with no other tensor and
            belongs to the receiver.
        error: The error, if the query failed.
        is_checked: Whether the result is a row that is known to be a distribution. The core
            checks other rows.
    """

    query_id: int
    result: torch.Tensor | Reduced | TokenScores | GroupResult | SampledGroup | None = None
    error: Exception | None = None
    is_checked: bool = False
