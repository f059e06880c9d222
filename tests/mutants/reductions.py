"""Faults of reductions, draws and scores."""

from __future__ import annotations

import numpy as np
import torch

import genlm.core.model.reduction_methods
import genlm.core.rows.draws
import genlm.core.rows.outputs
from genlm import TokenScores
from genlm.core.engine.group_engine import GroupEngine
from genlm.core.model.cached_results import CachedResults
from genlm.core.rows.group_reductions import ScoreColumns
from genlm.core.rows.reductions import TokenLogprobs
from genlm.core.rows.row_masks import RowMasks
from genlm.core.scheduler.request_table import Evaluation

from .cached_engine import CachedEngine, PlainEngine
from .mutant import core_fault, core_mutant, engine_mutant


@core_mutant(RowMasks, "factors", killed_by="reductions-are-of-the-row")
def bits_in_the_other_order(factors):
    """Reads the bits of each byte of a mask from the highest to the lowest."""

    def broken(self, *part):
        bits = factors(self, *part)
        whole = bits[:, : bits.shape[1] // 8 * 8].unflatten(1, (-1, 8)).flip(-1).flatten(1)
        return torch.cat([whole, bits[:, whole.shape[1] :]], 1)

    return broken


@core_mutant(TokenLogprobs, "compute", killed_by="reductions-are-of-the-row")
def tokens_in_ascending_order(compute):
    """Returns the log-probabilities of tokens in the order of their ids."""

    def broken(rows, requests):
        ordered = [TokenLogprobs(tuple(sorted(request.token_ids))) for request in requests]
        return compute(rows, ordered)

    return broken


@core_mutant(
    genlm.core.model.reduction_methods,
    "stream_uniform",
    killed_by="draws-are-those-of-the-seed",
)
def position_forgotten(stream_uniform):
    """Draws from the first number of the seed's stream at every step of a sequence."""
    return lambda seed, _position: stream_uniform(seed, 0)


@core_mutant(genlm.core.rows.draws, "truncate", killed_by="draws-are-those-of-the-seed")
def one_token_too_many(truncate):
    """Lets top-k have one token more."""
    return lambda weights, truncation: truncate(
        weights, truncation._replace(top_k=np.minimum(truncation.top_k, 2**40) + 1)
    )


@core_mutant(
    genlm.core.rows.outputs._PartOutputs, "_select", killed_by="draws-are-those-of-the-seed"
)
def rows_by_place_in_the_group(_select):
    """Reduces the first rows of a batch in place of those that ask for it."""
    return lambda _self, rows, indices: rows[torch.arange(len(indices)) % len(rows)]


@core_mutant(Evaluation, "add", killed_by="draws-are-those-of-the-seed")
def joined_callers_get_the_first_output(add):
    """Gives a caller that joins a request what the first caller asked for."""

    def broken(self, request, place, output):
        add(self, request, place, output)
        if None not in (output, *self.outputs):
            self.consumers[-1] = (request, place, 0)

    return broken


@core_mutant(ScoreColumns, "compute", killed_by="scores-equal-the-loop-over-rows")
def scores_of_the_next_position(compute):
    """Scores each target in the row of the position before."""
    return lambda self, rows, row_of, members: compute(self, rows.roll(1, 0), row_of, members)


@engine_mutant(killed_by="scores-equal-the-loop-over-rows")
class TargetsShifted(CachedEngine):
    """Scores every target one position too early."""

    def scores(self, query):
        earlier = query.replace(token_ids=query.token_ids[:-1] or query.token_ids)
        shown = min(len(earlier), len(query.targets))
        scores = super().scores(earlier.replace(targets=query.targets[-shown:]))
        missing = len(query.targets) - shown
        return TokenScores(*(torch.cat([each[:missing], each]) for each in scores))


@engine_mutant(killed_by="scores-equal-the-loop-over-rows")
class EveryTokenIsTop(CachedEngine):
    """Says of every token that it was the most likely one."""

    def scores(self, query):
        return super().scores(query)._replace(is_top=torch.ones(len(query.targets)).bool())


@engine_mutant(killed_by="scores-equal-the-loop-over-rows")
class NoTokenIsTop(CachedEngine):
    """Says of every token that another one was more likely."""

    def scores(self, query):
        return super().scores(query)._replace(is_top=torch.zeros(len(query.targets)).bool())


def scored_by(engine_scores):
    """Send texts to the engine, or compute them as groups, whatever the engine declares."""

    def mutate(submit):
        def broken(self, query):
            self._scores_texts = engine_scores
            submit(self, query)

        return broken

    return mutate


@core_fault(
    GroupEngine,
    "submit",
    found_by="model/test_lm_reductions.py::test_scores_are_shared_cached_and_of_their_adapter",
)
def never_scored_natively(submit):
    """Asks for every position of a text although the engine scores texts itself."""
    return scored_by(False)(submit)


@core_fault(
    GroupEngine,
    "submit",
    found_by="model/test_lm_reductions.py::test_scores_are_those_of_the_rows",
)
def always_scored_natively(submit):
    """Sends texts to an engine that never said that it scores them."""
    return scored_by(True)(submit)


@core_mutant(genlm.core.rows.outputs, "_compute", killed_by="a-failing-reduction-fails-alone")
def all_reductions_fail_together(computed):
    """Fails all requests of a class of reductions for the one that raises."""

    def broken(compute, rows, requests):
        values = computed(compute, rows, requests)
        errors = [value for value in values if isinstance(value, Exception)]
        return [errors[0]] * len(values) if errors else values

    return broken


@core_fault(
    CachedResults,
    "_find",
    found_by="model/test_lm_reductions.py::test_reductions_are_cached_and_cached_rows_answer_them",
)
def output_cache_unread(cached):
    """Asks the engine for every reduction, whatever the output cache has."""
    return lambda self, key, wanted: None if wanted else cached(self, key, wanted)


@engine_mutant(killed_by="reductions-use-the-adapter")
class ScoresOfTheBaseModel(CachedEngine):
    """Scores texts without the adapter that the query names."""

    def scores(self, query):
        return super().scores(query.replace(adapter=None))


@core_fault(
    genlm.core.model.reduction_methods,
    "checked_number",
    found_by="model/test_lm_reductions.py::test_wrong_arguments_are_refused_before_anything_is_asked",
)
def numbers_unchecked(_checked_number):
    """Takes any number for a temperature and a share."""
    return lambda _name, value: min(max(float(value), 1e-9), 1.0)


@engine_mutant(killed_by="draws-are-those-of-the-seed")
class SeedsTheProcess(PlainEngine):
    """Seeds the global generator of torch at every step."""

    def evaluate(self, queries):
        torch.manual_seed(0)
        return super().evaluate(queries)
