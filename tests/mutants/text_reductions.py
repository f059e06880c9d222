"""Faults of reductions of all positions of a text."""

from __future__ import annotations

import dataclasses

import numpy as np

from genlm.core.engine import group_engine
from genlm.core.rows.text_scores import PieceScores

from .baselines import cached_target
from .mutant import core_mutant


@core_mutant(group_engine, "text_group", killed_by="scores-equal-the-loop-over-rows")
def rows_after_the_token(text_group):
    """Reduces the row after each token, not the one that predicts it."""

    def broken(text):
        group = text_group(text)
        row_of = np.minimum(group.row_of + 1, len(group.wanted) - 1)
        return dataclasses.replace(group, row_of=row_of)

    return broken


@core_mutant(
    PieceScores, "_reduce", killed_by="scores-equal-the-loop-over-rows", on=cached_target
)
def rows_in_the_opposite_order(reduce):
    """Reduces the rows of a piece in the opposite order."""
    return lambda self, logits, rows, members: reduce(self, logits, rows[::-1].copy(), members)


@core_mutant(
    PieceScores, "results", killed_by="a-failing-reduction-fails-alone", on=cached_target
)
def texts_fail_together(results):
    """Fails all texts of a batch for the one whose reduction raises."""

    def broken(self):
        found = results(self)
        errors = [each for each in found if isinstance(each, Exception)]
        return [errors[0]] * len(found) if errors else found

    return broken


@core_mutant(PieceScores, "add", killed_by="scores-equal-the-loop-over-rows", on=cached_target)
def a_position_too_early(add):
    """Computes what is wanted of each row from the row before it."""
    return lambda self, keys, logits: add(self, keys, logits.roll(1, 0))
