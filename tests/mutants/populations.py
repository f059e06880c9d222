"""Faults of populations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import genlm.core.model.draw_settings
import genlm.core.model.member_scores
import genlm.core.rows.group_reductions
from genlm import BatchEngine, Query
from genlm.core.model.draw_settings import DrawSettings
from genlm.core.model.members import Members
from genlm.core.model.population import Population
from genlm.core.queries.generations import Lineage
from genlm.core.queries.query import GroupValues
from genlm.core.rows.groups import Columns
from genlm.core.rows.row_weights import RowWeights

from .baselines import cached_target
from .cached_engine import CachedEngine
from .mutant import core_mutant, engine_mutant
from .prefixes import EvictedMemoryReused
from .resident_engine import ResidentEngine


@core_mutant(Lineage, "sequence", killed_by="populations-equal-lists")
def a_sequence_of_the_place_before(sequence):
    """Computes the sequence of another member."""
    return lambda self, place: sequence(self, max(0, place - 1))


@core_mutant(Lineage, "extended", killed_by="populations-equal-lists")
def copies_take_the_token_of_the_first(extended):
    """Extends all copies of a member by the token of the first of them."""

    def broken(self, places, token_ids):
        _, first, inverse = np.unique(places, return_index=True, return_inverse=True)
        return extended(self, places, token_ids[first][inverse])

    return broken


@core_mutant(Columns, "add", killed_by="populations-equal-lists")
def columns_in_the_order_of_the_rows(add):
    """Returns results in the order of the distinct rows, not of the members."""
    return lambda self, members, columns: add(self, np.sort(members)[::-1].copy(), columns)


@core_mutant(RowWeights, "of", killed_by="population-draws-are-those-of-the-seed")
def masks_by_place(of):
    """Draws under the masks of the first members, whichever members are drawn from."""
    return lambda self, members: of(self, np.arange(len(members)))


@core_mutant(
    genlm.core.model.population, "uniforms", killed_by="population-draws-are-those-of-the-seed"
)
def one_random_number_for_all(uniforms):
    """Draws with the random number of the first member for all."""
    return lambda seed, members, *more: uniforms(seed, members * 0, *more)


@core_mutant(
    genlm.core.model.member_scores,
    "_reduction",
    killed_by="population-draws-are-those-of-the-seed",
)
def scores_with_the_settings_of_the_first_member(reduction):
    """Scores the tokens of all members with the settings of the first one."""
    return lambda ids, weights, members: reduction(ids, weights, members * 0)


@core_mutant(Population, "finish", killed_by="population-draws-are-those-of-the-seed")
def finished_members_go_on(finish):
    """Draws from finished members."""
    return lambda self, members: finish(self, np.zeros_like(members))


@core_mutant(
    genlm.core.model.population, "uniforms", killed_by="population-draws-are-those-of-the-seed"
)
def random_numbers_by_place_among_the_active(uniforms):
    """Draws with the random numbers of the first members, whichever are drawn from."""
    return lambda seed, members, *more: uniforms(seed, np.arange(len(members)), *more)


@core_mutant(
    genlm.core.model.population, "uniforms", killed_by="population-draws-are-those-of-the-seed"
)
def step_of_a_population_forgotten(uniforms):
    """Draws with the random numbers of the first step at every step."""
    return lambda seed, members, step, *more: uniforms(seed, members, 0 * step, *more)


@core_mutant(
    genlm.core.model.draw_settings,
    "RowMasks",
    killed_by="population-draws-are-those-of-the-seed",
)
def mask_index_ignored(row_masks):
    """Gives members masks in turn, whatever `mask_index` says."""

    class Broken(row_masks):
        def __init__(self, masks, count, size, index=None):
            in_turn = None if index is None else np.arange(count) % len(masks)
            super().__init__(masks, count, size, in_turn)

    return Broken


@core_mutant(Members, "truncate", killed_by="random-populations-agree-with-the-oracle")
def truncated_members_stay_finished(truncate):
    """Keeps members finished whose last tokens are removed."""
    return lambda self, lengths: truncate(self, lengths).finish(self.finished)


@core_mutant(Members, "_parts", killed_by="random-populations-agree-with-the-oracle")
def concatenations_begin_with_the_first_step(parts):
    """Draws from a concatenation with the random numbers of the first step."""
    return property(lambda self: (*parts.fget(self)[:-1], 0))


@core_mutant(
    DrawSettings,
    "weights_unless_equal",
    killed_by="random-populations-agree-with-the-oracle",
)
def settings_ignored_by_log_probabilities(weights_unless_equal):
    """Returns the model's log-probabilities, whatever the settings of draws are."""
    return lambda self, size: None


@core_mutant(
    genlm.core.rows.group_reductions,
    "batch_draw_without_replacement",
    killed_by="random-populations-agree-with-the-oracle",
)
def draws_with_replacement(draw):
    """Draws the first token of a member again."""

    def broken(*arguments):
        drawn = draw(*arguments)
        ids = drawn.token_ids[:, :1].expand_as(drawn.token_ids)
        return drawn._replace(token_ids=ids.contiguous())

    return broken


@core_mutant(
    BatchEngine, "evaluate_groups", killed_by="populations-share-the-engine", on=cached_target
)
def sequences_of_the_other_population(evaluate_groups):
    """Computes the sequences of another population that is computed together with it."""

    def broken(self, parts):
        first, _ = parts[0]
        return evaluate_groups(
            self,
            [
                (first if len(first.wanted) > places.max() else group, places)
                for group, places in parts
            ],
        )

    return broken


@engine_mutant(killed_by="populations-equal-lists")
class StatesAdvancedInPlace(CachedEngine):
    """Changes the states of a population when each of its members is extended once."""

    def evaluate_groups(self, parts):
        states = []
        for group, places in parts:
            self.keep_states(group.generation)
            states += [group.generation.state[i] for i in group.wanted[places].tolist()]
        group, _ = parts[0]
        queries = [Query(i, state, group.adapter) for i, state in enumerate(states)]
        return GroupValues(self.evaluate(queries), are_logits=False)

    def keep_states(self, generation):
        """Keep the token ids of all sequences as their states."""
        lineage, base = generation.lineage, generation.base
        if generation.state is not None:
            return
        if (
            base is not None
            and base.state is not None
            and lineage.parent is base.lineage
            and np.array_equal(lineage.ancestors, np.arange(len(base.lineage)))
            and (lineage.token_ids >= 0).all()
        ):
            for state, token_id in zip(base.state, lineage.token_ids.tolist(), strict=True):
                state.append(token_id)
            generation.keep(base.state)
        else:
            generation.keep([list(lineage.sequence(i).token_ids) for i in range(len(lineage))])


@engine_mutant(killed_by="populations-equal-lists")
class EveryStateIsItsOwn(CachedEngine):
    """Takes the state of a generation that was computed as separate queries for its own."""

    def evaluate_groups(self, parts):
        values, are_logits = super().evaluate_groups(parts)
        for group, _ in parts:
            state = group.generation.root.state
            if state is not None and state != "computed":
                values = values.flip(0)
            group.generation.keep("computed")
        return GroupValues(values, are_logits)


@engine_mutant(killed_by="populations-equal-lists")
class LargePopulationsReversed(CachedEngine):
    """Returns the rows of populations, which are computed as arrays if large, in reverse."""

    smallest_group = 20

    def evaluate_groups(self, parts):
        values, are_logits = super().evaluate_groups(parts)
        return GroupValues(values.flip(0), are_logits)


@engine_mutant(killed_by="populations-equal-lists")
class MembersKeptWithoutTheirLastToken(ResidentEngine):
    """Keeps the state of members for single requests, without their last tokens."""

    def keep_sequences(self, generation):
        for place in range(len(generation.lineage)):
            sequence = generation.lineage.sequence(place)
            state, _ = self.computed(sequence.token_ids[:-1], None)
            self.residents[None, sequence.key] = state


@engine_mutant(killed_by="sampling-stops")
class SamplesKeptWithoutTheirLastToken(MembersKeptWithoutTheirLastToken):
    """Keeps the state of continuations for single requests, without their last tokens."""


@engine_mutant(killed_by="tight-budgets-change-nothing")
class MemoryOfPopulationsReused(EvictedMemoryReused):
    """Frees the memory of an evicted prefix although members still use it."""


@core_mutant(
    BatchEngine,
    "evaluate_groups",
    killed_by="random-populations-agree-with-the-oracle",
    on=cached_target,
)
def populations_of_the_base_model(evaluate_groups):
    """Computes populations without their adapter."""

    def broken(self, parts):
        without = [(replace(group, adapter=None), places) for group, places in parts]
        return evaluate_groups(self, without)

    return broken
