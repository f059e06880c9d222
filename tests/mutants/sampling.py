"""Faults of samplers, native and in the core."""

from __future__ import annotations

import dataclasses

import numpy as np

import genlm.core.model.sample_methods
import genlm.core.rows.reductions
from genlm import AsyncLM

from .baselines import cached_target
from .cached_engine import CachedEngine
from .mutant import core_mutant, engine_mutant


def without(params, **changes):
    return dataclasses.replace(params, **changes)


@engine_mutant(killed_by="equal-seeds-draw-equal-tokens")
class TemperatureIgnored(CachedEngine):
    """Draws at temperature 1 for every temperature except 0."""

    def drawn(self, row, params, uniform):
        temperature = min(params.temperature, 1.0) and 1.0
        return super().drawn(row, without(params, temperature=temperature), uniform)


@engine_mutant(killed_by="equal-seeds-draw-equal-tokens")
class TopTokensOnly(CachedEngine):
    """Draws among the three most likely tokens, by a default of the model's configuration."""

    def drawn(self, row, params, uniform):
        least = np.sort(row)[-3]
        return super().drawn(np.where(row >= least, row, -np.inf), params, uniform)


@engine_mutant(killed_by="equal-seeds-draw-equal-tokens")
class PromptNotExtended(CachedEngine):
    """Draws every token from the distribution after the prompt."""

    prompt = None

    def draw(self, continuation):
        self.prompt = continuation.query.token_ids
        ended = super().draw(continuation)
        self.prompt = None
        return ended

    def logits(self, token_ids, adapter):
        return super().logits(self.prompt or token_ids, adapter)


@engine_mutant(killed_by="sampling-is-reproducible")
class SeedIgnored(CachedEngine):
    """Draws from fresh entropy although a seed was given."""

    def stream(self, params):
        return iter(np.random.default_rng().random, None)


@engine_mutant(killed_by="sampling-is-reproducible")
class OneGeneratorForAll(CachedEngine):
    """Continues all sequences from one generator, so that a draw depends on its neighbours."""

    def stream(self, params):
        if not self.continuations:
            self.shared = super().stream(params)
        return self.shared


@engine_mutant(killed_by="a-cancelled-continuation-changes-no-other")
class AbortShiftsTheStreams(CachedEngine):
    """Gives the randomness of an aborted continuation to the one that moves up."""

    def abort(self, query_id):
        waiting = list(self.continuations)
        for place in range(len(waiting) - 1) if query_id in waiting else ():
            if place >= waiting.index(query_id):
                above = self.continuations[waiting[place]].uniforms
                self.continuations[waiting[place + 1]].uniforms = above
        super().abort(query_id)


@engine_mutant(killed_by="equal-seeds-draw-equal-tokens")
class StreamOfItsOwn(CachedEngine):
    """Draws reproducibly from the seed, by other random numbers than every other engine."""

    def stream(self, params):
        return iter(np.random.default_rng(params.seed).random, None)


@core_mutant(
    genlm.core.model.sample_methods,
    "stream_seeds",
    killed_by="streams-are-distinct",
    on=cached_target,
)
def one_seed_for_all(stream_seeds):
    """Gives every continuation of a batch the same seed."""
    return lambda seed, count: stream_seeds(seed, 1) * count


@engine_mutant(killed_by="sampling-stops")
class StopTokenIncluded(CachedEngine):
    """Leaves the end-of-sequence id in the continuation."""

    def draw(self, continuation):
        before = len(continuation.drawn)
        stop = continuation.params.stop_token_ids
        continuation.params = without(continuation.params, stop_token_ids=frozenset())
        ended = super().draw(continuation)
        continuation.params = without(continuation.params, stop_token_ids=stop)
        return ended or continuation.drawn[before] in stop


@engine_mutant(killed_by="sampling-stops")
class OneTokenMore(CachedEngine):
    """Draws `max_tokens + 1` tokens."""

    def stream(self, params):
        return super().stream(params)

    def submit(self, query):
        if query.sampling is not None:
            longer = without(query.sampling, max_tokens=query.sampling.max_tokens + 1)
            query = query.replace(sampling=longer)
        super().submit(query)


@engine_mutant(killed_by="sampling-stops")
class FirstStopIdOnly(CachedEngine):
    """Stops at one of the end-of-sequence ids only."""

    def draw(self, continuation):
        stop = sorted(continuation.params.stop_token_ids)[:1]
        continuation.params = without(continuation.params, stop_token_ids=frozenset(stop))
        return super().draw(continuation)


@engine_mutant(killed_by="sampling-stops")
class ContinuationOneShort(CachedEngine):
    """Stops one token before the context is full."""

    def draw(self, continuation):
        return super().draw(continuation) or len(continuation.token_ids) == self.max_context


@engine_mutant(killed_by="temperature-zero-is-greedy")
class ZeroMeansDefault(CachedEngine):
    """Takes temperature 0 for "not given" and draws at 1."""

    def drawn(self, row, params, uniform):
        return super().drawn(
            row, without(params, temperature=params.temperature or 1.0), uniform
        )


@core_mutant(
    genlm.core.rows.reductions, "RowWeights", killed_by="equal-seeds-draw-equal-tokens"
)
def temperature_multiplies(weights):
    """The core's sampler multiplies by the temperature instead of dividing."""

    def broken(shape, masks=None, temperature=()):
        inverse = [1 / t if t else 0 for t in temperature]
        return weights(shape, masks, temperature=inverse or 1.0)

    return broken


@core_mutant(AsyncLM, "_sample_options", killed_by="wrong-sampling-requests-are-refused")
def negative_temperature_is_one(sample_options):
    """Takes temperatures below 0 for 0."""

    def broken(self, max_tokens, stop, temperature, *others):
        return sample_options(self, max_tokens, stop, max(0.0, temperature), *others)

    return broken
