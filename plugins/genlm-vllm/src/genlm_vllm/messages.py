"""Messages between the engine and vLLM's workers, pickled if these are in other processes.

Before a step, the workers receive new queries and the new tokens of requests (`StepInputs`).
After it, they receive which sequences are computed (a `ComputedPart` for each query), and
return results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from genlm.plugin import GroupReduction, Reduction, Transport

TRANSPORT = Transport("vLLM's process")
"""Packs requested outputs and results for other processes."""


class Outputs(tuple[Reduction | GroupReduction | None, ...]):
    """Requested outputs of a query. One that another process cannot load fails alone."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _load_outputs, (TRANSPORT.pack_outputs(self),)


def _load_outputs(packed: Any) -> Outputs:
    return Outputs(TRANSPORT.unpack_outputs(packed))


@dataclass(frozen=True)
class VocabularyIds:
    """The ids of a vocabulary. Workers compute rows with them, and have no tokenizer.

    Attributes:
        size: Number of ids.
        missing_ids: Ids below `size` without a token.
    """

    size: int
    missing_ids: tuple[int, ...] = ()


class NewQuery(NamedTuple):
    """A query that the workers have not received yet.

    Attributes:
        query_id: Id of the query.
        outputs: Its outputs; of a `GroupQuery`, its reduction.
        row_of: `GroupQuery.row_of`; None for a query for one sequence.
        total: Number of sequences.
        targets: `Query.targets`; target i follows position `first + i`.
        first: Position of the token that the first target follows.
        name: Id of the request that computes the text with the targets.
    """

    query_id: int
    outputs: Outputs
    row_of: np.ndarray[Any, np.dtype[np.int64]] | None = None
    total: int = 1
    targets: tuple[int, ...] = ()
    first: int = 0
    name: str = ""


@dataclass(slots=True)
class StepInputs:
    """Inputs of the workers for a step.

    Attributes:
        tokens: The new token of requests, by the request's id.
        queries: New queries by id.
        dropped: Ids of earlier queries whose results are not needed.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    queries: dict[int, NewQuery] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.queries or self.dropped)

    def add(self, query: NewQuery) -> None:
        """Add a new query."""
        self.queries[query.query_id] = query

    def drop(self, query_id: int) -> None:
        """Drop a query, which the workers may have received."""
        if self.queries.pop(query_id, None) is None:
            self.dropped.append(query_id)


class ComputedPart(NamedTuple):
    """Sequences of a query that the last step computed.

    Attributes:
        query_id: Id of the query.
        names: The requests that computed the sequences.
        places: Places of the sequences in the query.
        is_last: Whether this part completes the query.
    """

    query_id: int
    names: list[str]
    places: list[int]
    is_last: bool
