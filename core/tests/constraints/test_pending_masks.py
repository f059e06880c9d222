"""Masks that are computed while the model runs, and masks that several requests share."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from constrained_model import TOKENS, SmallEngine

import genlm
from genlm.core.rows.row_masks import RowMasks

MASKS = torch.zeros(3, len(TOKENS), dtype=torch.bool)
MASKS[0, [2, 3]] = True
MASKS[2, 4:] = True
INDEX = np.array([0, 0, 1, 2, 2])


class MaskingEngine(SmallEngine):
    """Computes the masks after its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: Future[torch.Tensor] = Future()

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        rows = super().evaluate(queries)
        if not self.masks.done():
            self.masks.set_result(MASKS)
        return rows


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_masks_are_waited_for_when_the_model_has_computed_the_rows(temperature):
    engines: list[MaskingEngine] = []
    with genlm.AsyncLM(lambda: engines.append(MaskingEngine()) or engines[0]) as llm:
        population = llm.population([(2,), (3,), (2,), (3,), (2, 4)])
        options = {"temperature": temperature, "seed": 3}
        masks = RowMasks.deferred(
            lambda: RowMasks(engines[0].masks.result(), 5, len(TOKENS), INDEX), 5
        )
        drawn = population.draw_sync(masks, **options)
        expected = population.draw_sync(MASKS, mask_index=INDEX, **options)
        assert expected.token_ids.tolist()[2] == -1
        for one, other in zip(drawn, expected, strict=True):
            torch.testing.assert_close(one, other)
        finished = population.finish([False, True, False, False, True])
        for one, other in zip(
            finished.draw_sync(masks, **options),
            finished.draw_sync(MASKS, mask_index=INDEX, **options),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


def test_the_index_may_be_computed_later_too():
    expected = RowMasks(MASKS, 5, len(TOKENS), INDEX)
    computed: list[RowMasks] = []
    both = RowMasks.deferred(lambda: (computed.append(expected), expected)[1], 5)
    rows = both.of(np.array([4, 0]))
    assert both.is_deferred
    assert rows.is_deferred
    assert not computed
    device = torch.device("cpu")
    assert torch.equal(rows.factors(0, 2, device), expected.factors(0, 5, device)[[4, 0]])
    with genlm.AsyncLM(SmallEngine) as llm:
        population = llm.population([(2,), (3,), (2,), (3,), (2, 4)])
        drawn = population.draw_sync(both, seed=3)
        for one, other in zip(
            drawn, population.draw_sync(MASKS, mask_index=INDEX, seed=3), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_a_future_is_refused():
    """The engine's thread would wait for it, and all other requests with it."""
    with genlm.AsyncLM(SmallEngine) as llm, pytest.raises(TypeError, match="found Future"):
        llm.population([2], 5).draw_sync(Future(), mask_index=INDEX)  # type: ignore[arg-type]


def test_they_are_computed_before_they_go_to_another_process():
    rows = RowMasks.deferred(lambda: RowMasks(MASKS, 5, len(TOKENS), INDEX), 5)
    assert rows.is_deferred
    again = pickle.loads(pickle.dumps(rows))
    assert not again.is_deferred
    expected = RowMasks(MASKS, 5, len(TOKENS), INDEX)
    device = torch.device("cpu")
    assert torch.equal(again.factors(0, 5, device), expected.factors(0, 5, device))


def test_masks_that_several_requests_share_are_copied_to_a_device_once():
    shared, device = RowMasks(MASKS, 3, len(TOKENS)), torch.device("cpu")
    first, second = shared.of(INDEX), shared.of(INDEX[::-1].copy())
    expected = RowMasks(MASKS, 5, len(TOKENS), INDEX).factors(0, 5, device)
    assert torch.equal(first.factors(0, 2, device), expected[:2])
    assert torch.equal(second.factors(0, 5, device), expected.flip(0))
    assert first._computed[0] is second._computed[0] is shared._computed[0]
    assert list(shared._computed[0]._copies) == [device]
    assert first.is_empty.tolist() == [False, False, True, False, False]
    with genlm.AsyncLM(SmallEngine) as llm:
        population = llm.population([2], 5)
        drawn = population.draw_sync(first, seed=1)
        for one, other in zip(
            drawn, population.draw_sync(MASKS, mask_index=INDEX, seed=1), strict=True
        ):
            assert torch.equal(one, other)


def test_other_processes_get_the_masks_that_rows_have():
    rows = RowMasks(MASKS, 3, len(TOKENS)).of(np.array([2, 2]))
    again = pickle.loads(pickle.dumps(rows))
    assert len(again._computed[0].rows) == 1
    device = torch.device("cpu")
    assert torch.equal(again.factors(0, 2, device)[0].bool(), MASKS[2])


@pytest.mark.parametrize("error", [KeyError("grammar"), SystemExit(3)])
def test_an_error_of_their_computation_is_the_request_s_error(error):
    def compute() -> RowMasks:
        raise error

    message = f"EvaluationError: the computation of masks raised {type(error).__name__}"
    with genlm.AsyncLM(SmallEngine) as llm:
        population = llm.population([2], 5)
        with pytest.raises(genlm.GenlmError, match=message):
            population.draw_sync(RowMasks.deferred(compute, 5))
        assert population.draw_sync(MASKS, mask_index=INDEX).token_ids[2] == -1
