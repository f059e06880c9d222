"""Faults of the continuations that the core draws."""

from __future__ import annotations

import numpy as np

import genlm.core.engine.group_sampling
import genlm.core.model.sample_methods
import genlm.core.rows.reductions
from genlm import AsyncLM
from genlm.core.engine import group_engine
from genlm.core.engine.group_engine import GroupEngine
from genlm.core.engine.group_sampling import MemberRuns, SamplingRun
from genlm.core.engine.joined_sampling import JoinedRun
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.truncation import Truncation

from .baselines import cached_target
from .mutant import core_fault, core_mutant


@core_mutant(RowWeights, "temperatures", killed_by="samples-are-those-of-the-seed")
def temperature_ignored(temperatures):
    """Draws at temperature 1 for every temperature except 0."""
    return property(lambda self: np.sign(temperatures.fget(self)))


@core_mutant(
    genlm.core.rows.reductions, "RowWeights", killed_by="samples-are-those-of-the-seed"
)
def temperature_multiplies(weights):
    """The core's sampler multiplies by the temperature instead of dividing."""

    def broken(shape, masks=None, temperature=1.0, **limits):
        divisors = np.array(temperature, float)
        inverse = np.divide(1, divisors, out=np.zeros_like(divisors), where=divisors > 0)
        return weights(shape, masks, temperature=inverse, **limits)

    return broken


@core_mutant(
    genlm.core.rows.reductions, "RowWeights", killed_by="samples-are-those-of-the-seed"
)
def top_tokens_only(weights):
    """Draws among the three most likely tokens."""
    return lambda *arguments, **options: weights(
        *arguments, **(options | {"truncation": Truncation(3)})
    )


@core_mutant(MemberRuns, "add", killed_by="samples-are-those-of-the-seed")
def prompt_not_extended(add):
    """Draws every token from the distribution after the prompt."""

    def broken(self, member, answer):
        following = add(self, member, answer)
        if following is None:
            return None
        place = int(self.query.sampling.places[member])
        return member, self.query.generation.lineage.sequence(place), following[2]

    return broken


@core_mutant(
    genlm.core.engine.group_sampling,
    "stream_uniform",
    killed_by="samples-are-those-of-the-seed",
)
def seed_ignored(_stream_uniform):
    """Draws from fresh entropy although a seed was given."""
    generator = np.random.default_rng()
    return lambda _seed, _position: generator.random()


@core_mutant(
    genlm.core.model.sample_methods, "batch_seeds", killed_by="samples-are-those-of-the-seed"
)
def seeds_of_the_batch(batch_seeds):
    """Derives the seeds of continuations from their number as well."""
    return lambda seed, count: batch_seeds(None if seed is None else seed + count, count)


@core_mutant(GroupEngine, "abort", killed_by="a-cancelled-continuation-changes-no-other")
def abort_shifts_the_streams(abort):
    """Changes the randomness of others when a continuation is aborted."""

    def broken(self, query_id):
        abort(self, query_id)
        for group in self._divided.values():
            group._seeds = [seed + 1 for seed in group._seeds]

    return broken


@core_mutant(
    genlm.core.engine.group_sampling,
    "stream_uniform",
    killed_by="samples-are-those-of-the-seed",
)
def stream_of_its_own(_stream_uniform):
    """Draws reproducibly from the seed, by other random numbers than documented."""
    return lambda seed, position: np.random.default_rng((seed, position)).random()


@core_mutant(
    genlm.core.model.sample_methods,
    "batch_seeds",
    killed_by="samples-are-those-of-the-seed",
    on=cached_target,
)
def one_seed_for_all(batch_seeds):
    """Gives every continuation of a batch the same seed."""
    return lambda seed, count: batch_seeds(seed, 1) * count


@core_mutant(AsyncLM, "_sample", killed_by="sampling-stops")
def stop_token_included(sampled):
    """Leaves the id that ended a continuation in it."""

    async def broken(self, queries, options, *arguments, **more):
        free = options._replace(stop_ids=frozenset())
        found = await sampled(self, queries, free, *arguments, **more)
        ends = [
            next((i for i, each in enumerate(ids) if each in options.stop_ids), len(ids))
            for ids in found
        ]
        return [ids[: end + 1] for ids, end in zip(found, ends, strict=True)]

    return broken


@core_mutant(AsyncLM, "_sample", killed_by="sampling-stops")
def first_stop_id_only(sampled):
    """Stops at one of the given ids only."""

    async def broken(self, queries, options, *arguments, **more):
        first = frozenset(sorted(options.stop_ids)[:1])
        return await sampled(
            self, queries, options._replace(stop_ids=first), *arguments, **more
        )

    return broken


@core_mutant(SamplingRun, "_unfinished", killed_by="sampling-stops")
def stopped_members_go_on(_unfinished):
    """Draws tokens for members of a group that a stop id has ended."""
    return lambda self: np.flatnonzero(self._sampling.max_tokens > len(self._columns))


@core_mutant(AsyncLM, "_limits", killed_by="sampling-stops")
def one_token_more(limits):
    """Draws `max_tokens + 1` tokens."""
    return lambda self, queries, max_tokens: limits(self, queries, max_tokens + 1)


@core_mutant(AsyncLM, "_limits", killed_by="sampling-stops")
def one_short_of_the_context(limits):
    """Stops one token before the context is full."""

    def broken(self, queries, max_tokens):
        room = [self.max_context - len(query) for query in queries]
        return np.minimum(limits(self, queries, max_tokens), room)

    return broken


@core_mutant(RowWeights, "temperatures", killed_by="samples-are-those-of-the-seed")
def zero_means_default(temperatures):
    """Takes temperature 0 for "not given" and draws at 1."""

    def broken(self):
        given = temperatures.fget(self)
        return np.where(given == 0, 1.0, given)

    return property(broken)


@core_fault(
    AsyncLM,
    "_sample_options",
    found_by="model/test_lm_sampling.py::test_options_out_of_range_are_refused",
)
def negative_temperature_is_one(sample_options):
    """Takes temperatures below 0 for 0."""

    def broken(self, max_tokens, stop, temperature, *others):
        return sample_options(self, max_tokens, stop, max(0.0, temperature), *others)

    return broken


@core_fault(
    group_engine,
    "joining_key",
    found_by="model/test_lm_sampling.py::test_different_settings_and_few_continuations_are_not_joined",
)
def all_continuations_are_joined(_key):
    """Draws continuations with different settings together, with those of the first."""
    return lambda _query: 0


@core_fault(
    JoinedRun,
    "completed",
    found_by="model/test_lm_sampling.py"
    "::test_continuations_that_are_pending_together_are_drawn_as_one_group",
)
def results_of_the_first_members(completed):
    """Gives each joined query the tokens of the first members."""

    def broken(self):
        self._members = {
            query_id: slice(0, members.stop - members.start)
            for query_id, members in self._members.items()
        }
        return completed(self)

    return broken


@core_fault(
    JoinedRun,
    "drop",
    found_by="model/test_lm_sampling.py"
    "::test_cancelled_continuations_leave_those_that_are_drawn_with_them",
)
def cancelled_continuations_are_drawn(drop):
    """Continues to draw tokens for cancelled callers."""

    def broken(self, query_id):
        drop(self, query_id)
        self._dropped = []

    return broken


@core_fault(
    GroupEngine,
    "_separate_joined",
    found_by="model/test_lm_sampling.py"
    "::test_continuations_that_are_drawn_together_share_later_passes_with_other_requests",
)
def joined_continuations_stay_together(_separate):
    """Computes joined continuations and other requests in separate passes."""
    return lambda _self: None


@core_fault(
    JoinedRun,
    "separated",
    found_by="model/test_lm_sampling.py"
    "::test_continuations_that_are_drawn_together_share_later_passes_with_other_requests",
)
def separated_continuations_begin_again(separated):
    """Draws all tokens of joined continuations again when they are separated."""

    def broken(self):
        self._columns = []
        return separated(self)

    return broken
