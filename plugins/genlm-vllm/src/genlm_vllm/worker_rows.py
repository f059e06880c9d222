"""`WorkerRows`: computes the results of queries in a worker.

A query arrives before its first step. After a step, its computed sequences are reduced, until
all of them are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from genlm.plugin import (
    Completion,
    GroupQuery,
    GroupValues,
    GroupWork,
    JoinedGroups,
    Reduced,
    device_index,
    divide_groups,
    reduce_logits,
)
from genlm_vllm.messages import ComputedPart, NewQuery, Outputs, StepInputs
from genlm_vllm.processes import without_frames
from genlm_vllm.row_sampler import RowSampler
from genlm_vllm.scores import ScoreStore

_MAX_GATHERED_LOGITS = 2**22
"""Maximum number of logits that are copied at once from a batch with other rows."""


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
        self._works: dict[int, Outputs | GroupWork] = {}

    def prepare(self, inputs: StepInputs) -> None:
        """Accept the inputs of a step."""
        for query_id in inputs.dropped:
            self._works.pop(query_id, None)
            self._scores.texts.pop(query_id, None)
        for query in inputs.queries.values():
            if query.targets:
                self._scores.begin(query)
            elif self._scores.is_active:
                self._works[query.query_id] = self._work(query)
        if inputs.tokens:
            self.sampler.feed(inputs.tokens)

    def _work(self, query: NewQuery) -> Outputs | GroupWork:
        if query.row_of is None:
            return query.outputs
        [reduction] = query.outputs
        group = GroupQuery(
            query.query_id,
            cast("Any", None),  # the generation stays in the engine's process
            np.arange(query.total),
            query.row_of,
            cast("Any", reduction),
        )
        return GroupWork(group, self._vocabulary)

    def collect(self, parts: Sequence[ComputedPart]) -> list[Completion]:
        """Return the results of complete queries.

        The completion of missing scores has neither a result nor an error.
        """
        texts = [part.query_id for part in parts if part.query_id in self._scores.texts]
        completions = [self._complete_scores(query_id) for query_id in texts]
        if self._scores.is_active:
            rows: list[tuple[ComputedPart, Outputs]] = []
            groups: dict[GroupWork, ComputedPart] = {}
            for part in parts:
                work = self._works.get(part.query_id)
                if isinstance(work, GroupWork):
                    groups[work] = part
                elif work is not None:
                    rows.append((part, work))
                if part.is_last:
                    self._works.pop(part.query_id, None)
            completions += self._complete_groups(groups)
            completions += self._complete_rows(rows)
        self.sampler.forget()
        return completions if self._scores.is_active else []

    def _complete_scores(self, query_id: int) -> Completion:
        scores: Any = self._scores.take(query_id)
        is_error = isinstance(scores, Exception)
        return Completion(query_id, error=scores) if is_error else Completion(query_id, scores)

    def _complete_rows(
        self, parts: Sequence[tuple[ComputedPart, Outputs]]
    ) -> Iterator[Completion]:
        if not parts:
            return
        results: Sequence[Reduced | Exception]
        outputs = [outputs for _, outputs in parts]
        try:
            logits, rows = self.sampler.take([part.names[0] for part, _ in parts])
            if rows != list(range(len(logits))):
                logits = logits[device_index(rows, logits.device)]
            results = reduce_logits(logits, self._vocabulary, outputs)
        except Exception as error:  # noqa: BLE001 - such as out of memory; vLLM continues
            results = [without_frames(error)] * len(parts)
        for (part, requested), result in zip(parts, results, strict=True):
            if isinstance(result, Exception):
                yield Completion(part.query_id, error=result)
            elif requested == (None,):
                yield Completion(part.query_id, result.values[0], is_checked=True)
            else:
                yield Completion(part.query_id, result)

    def _complete_groups(self, parts: dict[GroupWork, ComputedPart]) -> list[Completion]:
        """Reduce the computed sequences of groups; return the results of complete groups."""
        remaining = dict(parts)
        is_whole = (len(part.names) == len(work.query.wanted) for work, part in parts.items())
        for works in divide_groups(list(itertools.compress(parts, is_whole))):
            if len(works) > 1 and self._reduce_together({work: parts[work] for work in works}):
                for work in works:
                    del remaining[work]
        for work, part in remaining.items():
            self._reduce_part(work, part.names, part.places)
        return [
            Completion(part.query_id, work.result())
            for work, part in parts.items()
            if part.is_last
        ]

    def _reduce_together(self, parts: dict[GroupWork, ComputedPart]) -> bool:
        """Reduce all sequences of several groups; return whether that succeeded."""
        try:
            joined = JoinedGroups(list(parts), self._vocabulary)
        except Exception:  # noqa: BLE001 - raised again by the group that causes it
            return False
        names = [name for part in parts.values() for name in part.names]
        places = [
            begin + place
            for part, begin in zip(parts.values(), joined.begins, strict=True)
            for place in part.places
        ]
        if not self._reduce_part(joined.work, names, places):
            return False
        joined.divide()
        return True

    def _reduce_part(
        self, work: GroupWork, names: Sequence[str], places: Sequence[int]
    ) -> bool:
        """Reduce some sequences of a group; if that raises, set their errors, return False."""
        if not names:
            return True
        remaining = np.array(places)
        try:
            logits, rows = self.sampler.take(names)
            order = np.argsort(rows)
            remaining = remaining[order]
            for values in _gather_parts(logits, np.array(rows)[order].tolist()):
                count = len(values)
                work.reduce(remaining[:count], GroupValues(values, are_logits=True))
                remaining = remaining[count:]
        except Exception as error:  # noqa: BLE001 - such as out of memory; vLLM continues
            work.errors.update(dict.fromkeys(remaining.tolist(), without_frames(error)))
            return False
        return True


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
