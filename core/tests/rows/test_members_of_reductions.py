"""`GroupReduction.of`: the reduction of some members has the columns of these members."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import genlm
from genlm.core.engine.group_sampling import GroupSampling
from genlm.core.rows.group_reductions import (
    DrawColumns,
    DrawLogprobColumns,
    MassColumns,
    Rows,
    ScoreColumns,
    TokenColumns,
    TopColumns,
)
from genlm.core.rows.groups import compute_columns
from genlm.core.rows.reductions import TopK
from genlm.core.rows.row_functions import ColumnsOfFunction
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.shared_reduction import SharedReduction

COUNT, SIZE = 12, 50
MEMBERS = np.array([1, 4, 5, 9, 11])
GENERATOR = np.random.default_rng(0)


class Numbered(genlm.GroupReduction):
    """A user-defined reduction with a column."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def compute(self, rows, row_of, members):
        return (rows.amax(1)[row_of] + self.values[members],)

    def compute_from_logits(self, logits, row_of, members):
        return (logits.amin(1)[row_of] + self.values[members],)


class Failing(genlm.GroupReduction):
    def compute(self, rows, row_of, members):
        raise ValueError("no result")


def _weights(*, is_deferred: bool = False) -> RowWeights:
    masks = RowMasks(GENERATOR.random((3, SIZE)) < 0.5, COUNT, SIZE, np.arange(COUNT) % 3)
    return RowWeights(
        (COUNT, SIZE),
        RowMasks.deferred(lambda: masks, COUNT) if is_deferred else masks,
        temperature=np.linspace(0.5, 2, COUNT),
        bias=GENERATOR.normal(size=(COUNT, SIZE)),
    )


IDS = torch.from_numpy(GENERATOR.integers(0, SIZE, (COUNT, 2)))
REDUCTIONS = {
    "rows": Rows(),
    "scores": ScoreColumns(IDS[:, 0]),
    "tokens": TokenColumns(IDS),
    "top": TopColumns(3, COUNT),
    "mass": MassColumns(_weights()),
    "deferred": MassColumns(_weights(is_deferred=True)),
    "draw_logprob": DrawLogprobColumns(_weights(), IDS),
    "draw": DrawColumns(_weights(), GENERATOR.random(COUNT)),
    "draws": DrawColumns(_weights(), lambda: GENERATOR.random((COUNT, 2))),
    "function": ColumnsOfFunction(lambda rows: rows.amin(1)),
    "shared": SharedReduction(TopK(2)),
    "user": Numbered(torch.arange(COUNT, dtype=torch.float32)),
}


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_the_reduction_of_some_members_has_their_columns(reduction: genlm.GroupReduction):
    rows = torch.from_numpy(GENERATOR.normal(size=(4, SIZE))).float().log_softmax(1)
    row_of = torch.arange(COUNT) // 3
    expected = reduction.compute(rows, row_of, torch.arange(COUNT))
    chosen = reduction.of(MEMBERS)
    columns = chosen.compute(rows, row_of[MEMBERS], torch.arange(len(MEMBERS)))
    for column, whole in zip(columns, expected, strict=True):
        torch.testing.assert_close(column, whole[MEMBERS], rtol=0, atol=1e-6)
    places = torch.tensor([2, 0])  # a part of these members
    columns = chosen.compute(rows, row_of[MEMBERS[places]], places)
    for column, whole in zip(columns, expected, strict=True):
        torch.testing.assert_close(column, whole[MEMBERS[places]], rtol=0, atol=1e-6)


def test_a_user_defined_reduction_of_some_members_is_pickled_and_keeps_its_name():
    values = torch.arange(COUNT, dtype=torch.float32)
    chosen = pickle.loads(pickle.dumps(Numbered(values).of(MEMBERS)))
    logits, row_of = torch.zeros(1, SIZE), np.zeros(len(MEMBERS), np.int64)
    members = np.arange(len(MEMBERS))
    columns = compute_columns(chosen, logits, row_of, members, are_logits=True)
    assert columns is not None
    assert columns[0].tolist() == MEMBERS.tolist()
    with pytest.raises(genlm.EvaluationError, match=r"Failing\.compute raised.*no result"):
        compute_columns(Failing().of(MEMBERS), logits, row_of, members)


def test_the_sampling_parameters_of_some_members():
    sampling = GroupSampling(
        np.arange(COUNT) * 2,
        np.arange(COUNT) % 2 == 0,
        np.arange(COUNT) + 1,
        _weights(),
        np.arange(COUNT) + 100,
        7,
        frozenset({3}),
        (b"x",),
    )
    places = np.array([8, 0, 3, 3, 1])
    chosen = sampling.of(MEMBERS, places)
    assert chosen.places is places
    assert chosen.finished.tolist() == [False, True, False, False, False]
    assert chosen.max_tokens.tolist() == (MEMBERS + 1).tolist()
    assert chosen.seeds.tolist() == (MEMBERS + 100).tolist()
    assert (
        chosen.weights.temperatures.tolist() == sampling.weights.temperatures[MEMBERS].tolist()
    )
    assert (chosen.step, chosen.stop_ids, chosen.stop_texts) == (7, {3}, (b"x",))
    some = np.array([4, 1])
    drawn, expected = chosen.draws(some, 2), sampling.draws(MEMBERS[some], 2)
    assert drawn.uniforms.tolist() == expected.uniforms.tolist()
