"""`Populations`: the queries of populations, computed from block tables.

The prompts of a population are requests that stay in SGLang (see `residents`). What its members
add has slots of SGLang's KV cache but no requests: the slots of each sequence are a row of an
array, which extensions and copies continue. Sequences that have no slots, or find none, are
queries of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm import prefix
from genlm.plugin import (
    Completion,
    Generation,
    GroupQuery,
    GroupValues,
    GroupWork,
    Query,
    TokenSequence,
    UnknownAdapterError,
    Vocabulary,
)
from genlm.prefix import SCRATCH_SLOT, Node, OutOfSlotsError, Slots, TableBatch
from genlm_sgl.adapters import Adapters
from genlm_sgl.population_api import PopulationApi
from genlm_sgl.residents import Residents

__all__ = ["Populations"]

Places = npt.NDArray[np.int64]

_FIRST_QUERY_ID = 2**40
"""Ids of the queries for single sequences, distinct from those of the scheduler."""

_MOST_TOKENS = 32
"""Maximum number of tokens of a sequence that are decoded, one after the other."""


class _Group:
    """A query and the sequences of it that are computed now.

    Attributes:
        work: Reduces the rows.
        part: Places in `query.wanted` that are computed; None between two parts.
        places: The place, or None for a prompt, of each single query without result.
        prompts: The prompts that single queries compute; None if these compute the part.
        has_begun: Whether its prompts were computed.
    """

    __slots__ = ("has_begun", "part", "places", "prompts", "query", "work")

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        self.query = query
        self.work = GroupWork(query, vocabulary)
        self.part: Places | None = None
        self.places: dict[int, int | None] = {}
        self.prompts: GroupQuery | None = None
        self.has_begun = False


class _Contexts(NamedTuple):
    """State of a generation without a block table."""

    lease: object


class _Tree:
    """SGLang's slots and residents as a `genlm.prefix.SlotTree`."""

    def __init__(self, api: PopulationApi, residents: Residents) -> None:
        self._api, self._residents = api, residents
        self.capacity = api.capacity
        self.evict_others: Callable[[], bool] = lambda: False

    def missing(self, adapter: str | None, tokens: TokenSequence) -> int:
        req = self._residents.request_of((adapter, tokens.key))
        return len(tokens) if req is None else 0

    def find(self, adapter: str | None, tokens: TokenSequence) -> Node:
        req = self._residents.request_of((adapter, tokens.key))
        return Node([], self._api.slots_of(req, len(tokens)), 0, None)

    def pin(self, adapter: str | None, tokens: TokenSequence) -> None:
        self._residents.pin((adapter, tokens.key))

    def unpin(self, adapter: str | None, tokens: TokenSequence) -> None:
        self._residents.unpin((adapter, tokens.key))

    def allocate(self, count: int) -> Slots:
        while (found := self._api.take_slots(count)) is None:
            if not (self._residents.end_oldest() or self.evict_others()):
                raise OutOfSlotsError(f"{count} slots requested")
        return found

    def free(self, slots: Slots) -> None:
        self._api.free_slots(slots)


class Populations:
    """Computes group queries, a part of one of them in each step.

    Args:
        api: SGLang's slots and passes.
        residents: The requests that stay.
        adapters: The loaded adapters.
        vocabulary: Vocabulary of the rows.
        submit: Submits a query for a row, whose request stays.
        abort: Aborts it.

    Attributes:
        decoded: Number of sequences that were computed from block tables.
        single: Number of sequences that were queries of their own, prompts included.
    """

    def __init__(
        self,
        api: PopulationApi,
        residents: Residents,
        adapters: Adapters,
        *,
        vocabulary: Vocabulary,
        submit: Callable[[Query], None],
        abort: Callable[[int], None],
    ) -> None:
        self._api, self._residents, self._adapters = api, residents, adapters
        self._vocabulary = vocabulary
        self._submit, self._abort = submit, abort
        self._tables = prefix.Populations(
            _Tree(api, residents),
            max_tokens=_MOST_TOKENS * api.most_rows,
            max_rows=api.most_rows,
        )
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, _Group] = {}  # by the ids of single queries
        self._query_ids = itertools.count(_FIRST_QUERY_ID)
        self.decoded = self.single = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def slots_used(self) -> int:
        """Number of slots in block tables."""
        return self._api.slots_used

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: GroupQuery) -> None:
        """Accept the query of a population.

        Raises:
            UnknownAdapterError: The adapter is not loaded.
        """
        if query.adapter is not None and query.adapter not in self._adapters.names:
            raise UnknownAdapterError(query.adapter, self._adapters.names)
        self._groups[query.query_id] = _Group(query, self._vocabulary)

    def abort(self, query_id: int) -> bool:
        """Drop a query and its single queries; return False for an unknown query."""
        group = self._groups.pop(query_id, None)
        if group is None:
            return False
        for single in group.places:
            del self._group_of[single]
        for single in group.places:
            self._abort(single)
        return True

    # -- steps ------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """Compute a part of the oldest query that waits for no single query."""
        self._tables.collect()
        group = next((each for each in self._groups.values() if not each.places), None)
        if group is None:
            return []
        query = group.query
        self._groups[query.query_id] = self._groups.pop(query.query_id)  # take turns
        if group.part is None:
            group.part = group.work.next_part(self._api.most_rows)
        try:
            with torch.no_grad():
                logits = self._tables.logits(query, group.part, self._run)
                if logits is not None:
                    group.work.reduce(group.part, GroupValues(logits, are_logits=True))
        except Exception as error:  # noqa: BLE001 - it fails these sequences alone
            group.work.errors.update(dict.fromkeys(group.part.tolist(), error))
        else:
            if logits is None:
                return self._begin(group)
            self.decoded += len(group.part)
        return self._end_part(group)

    def _end_part(self, group: _Group) -> list[Completion]:
        group.part = None
        if not group.work.is_complete:
            return []
        query, generation = group.query, group.query.generation
        if generation.state is None:
            query.keep_contexts()
            generation.keep(_Contexts(generation.state))
        del self._groups[query.query_id]
        return [Completion(query.query_id, group.work.result())]

    def _run(self, added: TableBatch, adapter: str | None) -> torch.Tensor:
        """Decode the tokens in passes after those that they follow.

        Raises:
            OutOfSlotsError: A prompt has no resident, or all rows have requests that run.
        """
        if ((added.positions == 0) & (added.writes != SCRATCH_SLOT)).any():
            raise OutOfSlotsError("the first token of a prompt is not decoded")
        req = self._residents.pinned_request(adapter)
        levels = list(_levels(added))
        if len(levels) == 1:  # each token belongs to a result
            levels = [added.results]
        is_result = np.zeros(len(added.tokens), bool)
        is_result[added.results] = True
        found, order = [], []
        for part in (level[piece] for level in levels for piece in self._pieces(len(level))):
            logits = self._api.decode(added, part, req)
            wanted = is_result[part]
            found.append(logits if wanted.all() else logits[torch.from_numpy(wanted)])
            order.append(part[wanted])
        logits = found[0] if len(found) == 1 else torch.cat(found)
        if len(levels) == 1:
            return logits
        places = np.empty(len(added.tokens), np.int64)
        places[np.concatenate(order)] = np.arange(len(logits))
        return logits[torch.from_numpy(places[added.results])]

    def _pieces(self, count: int) -> Iterator[slice]:
        """Divide a number of tokens into passes, as many in each as rows can be borrowed."""
        rows = self._api.borrow(count)
        while rows < count and self._residents.end_oldest():
            rows = self._api.borrow(count)
        if not rows:
            raise OutOfSlotsError("all rows of SGLang's table of slots have requests")
        for begin in range(0, count, rows):
            yield slice(begin, begin + rows)

    # -- single queries ---------------------------------------------------------------

    def _begin(self, group: _Group) -> list[Completion]:
        """Compute the prompts of a query, or the sequences of its part, as single queries."""
        query, lineage, part = group.query, group.query.generation.lineage, group.part
        assert part is not None  # noqa: S101 - our own mistake
        firsts, tokens = lineage.suffixes(query.wanted)
        longest = int((tokens >= 0).sum(axis=1).max())
        kept = query.generation.with_state()
        has_contexts = kept is not None and isinstance(kept.state, _Contexts)
        has_prompts = group.has_begun or has_contexts or self._tables.has_table(query)
        if 0 < longest <= _MOST_TOKENS and not has_prompts:
            base = _first_generation(query.generation)
            wanted = np.unique(firsts)
            prompts = dataclasses.replace(query, generation=base, wanted=wanted, row_of=wanted)
            group.prompts = prompts
            for place in wanted.tolist():
                sequence = base.lineage.sequence(place)
                if self._residents.request_of((query.adapter, sequence.key)) is None:
                    self._submit_single(group, sequence, None)
        else:
            for place in part.tolist():
                sequence = lineage.sequence(int(query.wanted[place]))
                self._submit_single(group, sequence, place)
        group.has_begun = True
        return [] if group.places else self._adopt(group)

    def _submit_single(self, group: _Group, sequence: TokenSequence, place: int | None) -> None:
        query_id = next(self._query_ids)
        self.single += 1
        try:
            self._submit(Query(query_id, sequence, group.query.adapter))
        except Exception as error:  # noqa: BLE001 - it fails this sequence alone
            if place is not None:
                group.work.errors[place] = error
        else:
            group.places[query_id] = place
            self._group_of[query_id] = group

    def receive(self, completions: list[Completion]) -> list[Completion]:
        """Take the results of single queries; return the other completions."""
        if not self._group_of:
            return completions
        others: list[Completion] = []
        found: dict[_Group, list[tuple[int, Any]]] = {}
        for each in completions:
            group = self._group_of.pop(each.query_id, None)
            if group is None:
                others.append(each)
                continue
            place = group.places.pop(each.query_id)
            rows = found.setdefault(group, [])
            if place is None:
                continue
            if each.error is not None:
                group.work.errors[place] = each.error
            else:
                rows.append((place, each.result))
        for group, rows in found.items():
            if rows:
                self._reduce_rows(group, rows)
            if not group.places:
                others += self._adopt(group)
        return others

    def _reduce_rows(self, group: _Group, found: list[tuple[int, Any]]) -> None:
        places, rows = zip(*found, strict=True)
        try:
            with torch.no_grad():
                values = GroupValues(torch.stack(rows), are_logits=False)
                group.work.reduce(np.array(places), values)
        except Exception as error:  # noqa: BLE001 - it fails these sequences alone
            group.work.errors.update(dict.fromkeys(places, error))

    def _adopt(self, group: _Group) -> list[Completion]:
        """Make block tables of computed sequences, whose requests are then pinned."""
        assert group.part is not None  # noqa: S101 - our own mistake
        prompts, group.prompts = group.prompts, None
        if prompts is None:
            self._tables.adopt(group.query, group.part)
            return self._end_part(group)
        self._tables.adopt(prompts, np.arange(len(prompts.wanted)))
        generation = group.query.generation
        generation.state, generation.base = None, prompts.generation
        return []

    # -- memory -----------------------------------------------------------------------

    def give_back(self) -> None:
        """Return borrowed rows and unused slots to SGLang, before its loop runs."""
        self._tables.collect()
        self._api.give_back()

    def evict(self) -> bool:
        """Free the block table that was used least recently; return False if there is none."""
        found = self._tables.evict_oldest()
        self._api.give_back()
        return found

    def clear(self) -> None:
        """Forget all block tables, after SGLang's tables were emptied."""
        self._tables.clear()
        self._api.forget()


def _levels(added: TableBatch) -> Iterator[Places]:
    """Yield the tokens that follow no other one, then those that follow these ..."""
    column = added.positions - len(added.trunk) - 1
    before = np.where(column < 0, SCRATCH_SLOT, added.slots[added.rows, column])
    left = np.arange(len(added.tokens))
    while len(left):
        new = added.writes[left]
        follows = np.isin(before[left], new[new != SCRATCH_SLOT])
        yield left[~follows]
        left = left[follows]


def _first_generation(generation: Generation) -> Generation:
    """Return the generation of the first sequences that a generation descends from."""
    lineage = generation.lineage
    while generation.base is not None:
        generation = generation.base
    return generation if generation.lineage.parent is None else Generation(lineage.first)
