"""`WorkerRows`: reduces rows in a worker; messages between the engine and its workers.

Before a step, the workers receive the new tokens of requests (`StepInputs`). After it, they
reduce the rows that the step computed (`StepResults`). Messages to other processes are pickled.
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
from genlm_vllm.processes import Outputs, without_frames
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

_MAX_GATHERED_LOGITS = 2**22
"""Maximum number of logits that are copied at once from a batch with other rows."""


@dataclass(slots=True)
class StepInputs:
    """Inputs of the workers for a step.

    Attributes:
        tokens: The new token of requests, by the request's id.
        texts: New queries for scores and their requests.
        dropped: Ids of cancelled queries.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    texts: list[TextPart] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.texts or self.dropped)


@dataclass(frozen=True)
class VocabularyIds:
    """The ids of a vocabulary, which rows need; a worker has no tokenizer.

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
        outputs: The requested outputs.
    """

    query_id: int
    name: str
    outputs: Outputs


class GroupPart(NamedTuple):
    """Sequences of a group query whose rows were computed by the last step.

    Attributes:
        query_id: Id of the query.
        row_of: `GroupQuery.row_of`; None after the query's first part.
        outputs: The query's reduction; empty after the query's first part.
        total: Number of sequences of the query.
        names: The requests that computed the sequences.
        places: Places of the sequences in the query.
        is_last: Whether this part completes the query.
    """

    query_id: int
    row_of: np.ndarray[Any, np.dtype[np.int64]] | None
    outputs: Outputs
    total: int
    names: list[str]
    places: list[int]
    is_last: bool


@dataclass(slots=True)
class StepResults:
    """The queries that a step computed.

    Attributes:
        groups: Sequences of group queries.
        rows: Queries for a row.
        score_ids: Ids of queries for scores.
    """

    groups: list[GroupPart] = field(default_factory=list)
    rows: list[RowPart] = field(default_factory=list)
    score_ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.groups or self.rows or self.score_ids)


class WorkerRows:
    """Reduces rows and collects scores in a worker.

    Args:
        sampler: Stores the logits.
        scores: Stores the scores.

    Attributes:
        vocab_size: Number of ids of a row.
    """

    def __init__(self, sampler: RowSampler, scores: ScoreStore) -> None:
        self.sampler = sampler
        self._scores = scores
        self._vocabulary = scores.vocabulary
        self.vocab_size = scores.vocabulary.size
        self._group_works: dict[int, GroupWork] = {}

    def prepare(self, inputs: StepInputs) -> None:
        """Accept the inputs of a step."""
        for text in inputs.texts:
            self._scores.begin(text)
        for query_id in inputs.dropped:
            self._group_works.pop(query_id, None)
            self._scores.take(query_id)
        if inputs.tokens:
            self.sampler.feed(inputs.tokens)

    def collect(self, wanted: StepResults) -> list[Completion]:
        """Return the results of complete queries.

        The completion of missing scores has neither a result nor an error.
        """
        completions = [self._complete_scores(query_id) for query_id in wanted.score_ids]
        if self._scores.is_active:
            # vLLM computes in inference mode, whose tensors cannot be changed outside.
            with torch.inference_mode(False), torch.no_grad():
                completions += self._complete_rows(wanted.rows)
                for part in wanted.groups:
                    self._reduce_part(part)
                    if part.is_last:
                        result = self._group_works.pop(part.query_id).result()
                        completions.append(Completion(part.query_id, result))
        self.sampler.forget()
        return completions if self._scores.is_active else []

    def _complete_scores(self, query_id: int) -> Completion:
        scores: Any = self._scores.take(query_id)
        is_error = isinstance(scores, Exception)
        return Completion(query_id, error=scores) if is_error else Completion(query_id, scores)

    def _complete_rows(self, parts: Sequence[RowPart]) -> Iterator[Completion]:
        if not parts:
            return
        results: Sequence[Reduced | Exception]
        try:
            logits, rows = self.sampler.take([part.name for part in parts])
            if rows != list(range(len(logits))):
                logits = logits[device_index(rows, logits.device)]
            outputs = [part.outputs for part in parts]
            results = reduce_logits(logits, self._vocabulary, outputs)
        except Exception as error:  # noqa: BLE001 - such as out of memory; vLLM continues
            results = [without_frames(error)] * len(parts)
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, Exception):
                yield Completion(part.query_id, error=result)
            else:
                only_row = part.outputs == (None,)
                yield Completion(part.query_id, result.values[0] if only_row else result)

    def _reduce_part(self, part: GroupPart) -> None:
        work, done = self._group_work(part), 0
        if not part.names:
            return
        try:
            logits, rows = self.sampler.take(part.names)
            for values in _gather_parts(logits, rows):
                places = np.array(part.places[done : done + len(values)])
                work.reduce(places, GroupValues(values, are_logits=True))
                done += len(values)
        except Exception as error:  # noqa: BLE001 - such as out of memory; vLLM continues
            work.errors.update(dict.fromkeys(part.places[done:], without_frames(error)))

    def _group_work(self, part: GroupPart) -> GroupWork:
        if part.row_of is not None:
            [reduction] = part.outputs
            query = GroupQuery(
                part.query_id,
                cast("Any", None),  # the generation stays in the engine's process
                np.arange(part.total),
                part.row_of,
                cast("Any", reduction),
            )
            self._group_works[part.query_id] = GroupWork(query, self._vocabulary)
        return self._group_works[part.query_id]


def _gather_parts(logits: torch.Tensor, rows: list[int]) -> Iterator[torch.Tensor]:
    """Yield some rows of logits: as a view if they are consecutive, else as copies in parts."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        yield logits[first : first + count]
        return
    size = max(1, _MAX_GATHERED_LOGITS // logits.shape[1])
    index = device_index(rows, logits.device)
    for begin in range(0, count, size):
        yield logits[index[begin : begin + size]]
