"""`JoinedRun`: continuations of several group queries, drawn together as one group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from genlm.core.engine.group_sampling import MemberRuns, SampledGroup, SamplingRun, sampling_of
from genlm.core.queries.generations import first_generation
from genlm.core.queries.query import Completion, GroupQuery, GroupResult
from genlm.core.rows.reductions import DrawnToken
from genlm.core.rows.row_weights import RowWeights
from genlm.core.vocab import Vocabulary


class JoinedRun(SamplingRun):
    """The continuations of several group queries with equal `joining_key`, drawn together.

    The tokens of a query, which has `returns_generation` False, are those that it gets alone.
    The group queries for tokens have the id `query_id`.

    Attributes:
        unfinished_queries: Queries whose continuations are not complete, by id.
    """

    def __init__(
        self,
        query_id: int,
        queries: Sequence[GroupQuery],
        vocabulary: Vocabulary,
    ) -> None:
        counts = [len(sampling_of(query).places) for query in queries]
        self._begins = np.cumsum([0, *counts[:-1]])
        self._members = {
            query.query_id: slice(begin, begin + count)
            for query, begin, count in zip(queries, self._begins.tolist(), counts, strict=True)
        }
        self.unfinished_queries = {query.query_id: query for query in queries}
        self._dropped: list[slice] = []
        super().__init__(_joined(query_id, queries), vocabulary)

    def add(self, result: GroupResult) -> None:
        """Add the tokens that the last query drew; see `SamplingRun.add`."""
        super().add(result)
        if self._dropped:
            for members in self._dropped:
                self._finished[members] = True
            self._dropped = []
            self._active = self._unfinished()

    def drop(self, query_id: int) -> None:
        """Draw no further tokens for a query."""
        del self.unfinished_queries[query_id]
        self._dropped.append(self._members[query_id])

    def separated(self) -> list[MemberRuns]:
        """Return the unfinished queries as separate runs, which continue after their tokens."""
        drawn: list[list[DrawnToken]] = [[] for _ in self._places]
        if self._columns:
            columns = [column.tolist() for column in self.result()[:3]]
            drawn = [
                [DrawnToken(i, p, 0.0, q) for i, p, q in zip(*member, strict=True) if i >= 0]
                for member in zip(*columns, strict=True)
            ]
        runs = []
        for query_id, query in self.unfinished_queries.items():
            run = MemberRuns(query, self._vocabulary)
            for member, tokens in enumerate(drawn[self._members[query_id]]):
                for token in tokens:
                    run.add(member, token)
            runs.append(run)
        return runs

    def completed(self) -> list[Completion]:
        """Return the completions of queries whose continuations have become complete."""
        is_active = np.zeros(len(self._places), np.int64)
        is_active[self._active] = 1
        has_ended = np.add.reduceat(is_active, self._begins) == 0
        ended = [
            query_id
            for query_id, ends in zip(self._members, has_ended.tolist(), strict=True)
            if ends and query_id in self.unfinished_queries
        ]
        if not ended:
            return []
        all_members = self.result()
        lengths = (all_members.token_ids >= 0).sum(1).numpy()
        completions = []
        for query_id in ended:
            query, members = self.unfinished_queries.pop(query_id), self._members[query_id]
            longest = int(lengths[members].max())
            sampled = SampledGroup(
                all_members.token_ids[members, :longest],
                all_members.logprobs[members, :longest],
                all_members.draw_logprob[members, :longest],
                query.generation,
                sampling_of(query).places,
                all_members.finished[members],
            )
            completions.append(Completion(query_id, sampled))
        return completions


def joining_key(query: GroupQuery) -> tuple[object, ...]:
    """Return the settings that queries for continuations share if they are drawn together."""
    sampling = sampling_of(query)
    truncation, ends = sampling.weights.truncation, (sampling.stop_ids, sampling.stop_texts)
    return query.adapter, truncation, sampling.step, *ends


def _joined(query_id: int, queries: Sequence[GroupQuery]) -> GroupQuery:
    """Return one query for the continuations of several with equal `joining_key`."""
    samplings = list(map(sampling_of, queries))
    generation, places = first_generation(
        [
            sequence
            for query, sampling in zip(queries, samplings, strict=True)
            for sequence in query.generation.lineage.sequences(sampling.places)
        ]
    )
    sampling = dataclasses.replace(
        samplings[0],
        places=places,
        finished=np.concatenate([sampling.finished for sampling in samplings]),
        max_tokens=np.concatenate([sampling.max_tokens for sampling in samplings]),
        weights=RowWeights.joined([sampling.weights for sampling in samplings]),
        seeds=np.concatenate([sampling.seeds for sampling in samplings]),
    )
    return dataclasses.replace(
        queries[0], query_id=query_id, generation=generation, sampling=sampling
    )
