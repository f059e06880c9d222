"""`WorkerRows`: what the engine and its workers exchange for a step, and how rows are reduced.

Before a step the workers get the tokens that requests were fed; after it they reduce the rows
that it computed. Both are messages, which other processes receive pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from genlm.plugin import (
    Completion,
    GroupQuery,
    GroupValues,
    GroupWork,
    Reduced,
    device_index,
    reduce_logits,
)
from genlm_vllm.processes import Outputs, unpacked, without_frames
from genlm_vllm.row_sampler import RowSampler
from genlm_vllm.scores import ScoreStore, TextPart

__all__ = [
    "GroupPart",
    "RowPart",
    "StepInputs",
    "StepResults",
    "VocabularyIds",
    "WorkerRows",
]

_GATHERED = 2**22
"""Maximum number of logits that are gathered at once from a batch with other rows."""


@dataclass(slots=True)
class StepInputs:
    """What the workers need before a step.

    Attributes:
        fed: Ids of requests.
        token_ids: The next token of each.
        texts: Queries for scores, and their new requests.
        dropped: Queries that were cancelled.
    """

    fed: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[TextPart] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.fed or self.texts or self.dropped)


@dataclass(frozen=True)
class VocabularyIds:
    """The part of a vocabulary that makes rows; a worker has no tokenizer.

    Attributes:
        size: Number of ids.
        missing_ids: Ids below `size` without a token.
    """

    size: int
    missing_ids: tuple[int, ...] = ()


class RowPart(NamedTuple):
    """A query for a row that the last step computed.

    Attributes:
        query_id: Id of the query.
        name: Id of the request that computed it.
        outputs: The requested outputs, or bytes that `Transport.pack_outputs` returned.
    """

    query_id: int
    name: str
    outputs: Outputs | bytes


class GroupPart(NamedTuple):
    """Sequences of a group query whose rows were computed by the last step.

    Attributes:
        query_id: Id of the query.
        row_of: As of the query; None after its first part.
        outputs: The query's reduction, or bytes that `Transport.pack_outputs` returned.
        total: Number of sequences of the query.
        names: The requests that computed the sequences.
        places: Places of the sequences in the query.
        is_last: Whether the others are complete.
    """

    query_id: int
    row_of: np.ndarray[Any, np.dtype[np.int64]] | None
    outputs: Outputs | bytes
    total: int
    names: list[str]
    places: list[int]
    is_last: bool


@dataclass(slots=True)
class StepResults:
    """The queries that a step computed.

    Attributes:
        groups: Sequences of populations.
        rows: Queries for a row.
        scored: Queries for scores.
    """

    groups: list[GroupPart] = field(default_factory=list)
    rows: list[RowPart] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.groups or self.rows or self.scored)


class WorkerRows:
    """Reduces rows and returns scores in the worker that has them.

    Args:
        sampler: Keeps the logits.
        scores: Has the scores.

    Attributes:
        vocab_size: Number of ids of a row.
    """

    def __init__(self, sampler: RowSampler, scores: ScoreStore) -> None:
        self.sampler = sampler
        self._scores = scores
        self._vocabulary = scores.vocabulary
        self.vocab_size = scores.vocabulary.size
        self._works: dict[int, GroupWork] = {}

    def prepare(self, inputs: StepInputs) -> None:
        """Accept the inputs of a step."""
        for text in inputs.texts:
            self._scores.begin(text)
        for query_id in inputs.dropped:
            self._works.pop(query_id, None)
            self._scores.take(query_id)
        if inputs.fed:
            self.sampler.feed(inputs.fed, inputs.token_ids)

    def __len__(self) -> int:
        """Number of results that wait to be fetched."""
        return len(self._works) + len(self._scores.texts)

    def collect(self, wanted: StepResults) -> list[Completion]:
        """Return the results of queries that are complete.

        Scores that are missing have neither a result nor an error.
        """
        completions = [self._scored(query_id) for query_id in wanted.scored]
        if self._scores.is_active:
            # vLLM computes in inference mode, whose tensors cannot be changed outside.
            with torch.inference_mode(False), torch.no_grad():
                completions += self._rows(wanted.rows)
                for part in wanted.groups:
                    self._reduce(part)
                    if part.is_last:
                        result = self._works.pop(part.query_id).result()
                        completions.append(Completion(part.query_id, result))
        self.sampler.forget()
        return completions if self._scores.is_active else []

    def _scored(self, query_id: int) -> Completion:
        found: Any = self._scores.take(query_id)
        is_error = isinstance(found, Exception)
        return Completion(query_id, error=found) if is_error else Completion(query_id, found)

    def _rows(self, parts: Sequence[RowPart]) -> Iterator[Completion]:
        if not parts:
            return
        results: Sequence[Reduced | Exception]
        try:
            logits, rows = self.sampler.take([part.name for part in parts])
            outputs = [unpacked(part.outputs) for part in parts]
            if rows != list(range(len(logits))):
                logits = logits[device_index(rows, logits.device)]
            results = reduce_logits(logits, self._vocabulary, outputs)
        except Exception as error:  # noqa: BLE001 - out of memory, for one; vLLM goes on
            results = [without_frames(error)] * len(parts)
            outputs = [()] * len(parts)
        for part, result, wanted in zip(parts, results, outputs, strict=True):
            if isinstance(result, Exception):
                yield Completion(part.query_id, error=result)
            else:
                only_row = wanted == (None,)
                yield Completion(part.query_id, result.values[0] if only_row else result)

    def _reduce(self, part: GroupPart) -> None:
        work, done = self._work(part), 0
        if not part.names:
            return
        try:
            logits, rows = self.sampler.take(part.names)
            for values in _parts(logits, rows):
                places = np.array(part.places[done : done + len(values)])
                work.reduce(places, GroupValues(values, are_logits=True))
                done += len(values)
        except Exception as error:  # noqa: BLE001 - out of memory, for one; vLLM goes on
            work.errors.update(dict.fromkeys(part.places[done:], without_frames(error)))

    def _work(self, part: GroupPart) -> GroupWork:
        if part.row_of is not None:
            [reduction] = unpacked(part.outputs)
            wanted, nothing = np.arange(part.total), cast("Any", None)
            query = GroupQuery(
                part.query_id, nothing, wanted, part.row_of, cast("Any", reduction)
            )
            self._works[part.query_id] = GroupWork(query, self._vocabulary)
        return self._works[part.query_id]


def _parts(logits: torch.Tensor, rows: list[int]) -> Iterator[torch.Tensor]:
    """Yield some rows of logits: without a copy if they are consecutive, else in parts."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        yield logits[first : first + count]
        return
    size = max(1, _GATHERED // logits.shape[1])
    index = device_index(rows, logits.device)
    for begin in range(0, count, size):
        yield logits[index[begin : begin + size]]
