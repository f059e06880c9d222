"""Padded passes over segments: a model that reads only what the layouts of its passes name."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from genlm.prefix import (
    SCRATCH_SLOT,
    ForwardResult,
    Integers64,
    PassLayout,
    PrefixRows,
    SegmentForward,
    SegmentLimits,
    TokenBatch,
)

from .test_rows import SIZE, TOKEN_BYTES, Alone, assert_right, next_state, row_after
from .test_scoring import assert_right as assert_scores_right
from .test_scoring import scored, text


class Passes(SegmentForward):
    """Keeps in each slot the state after its token, and checks what a pass reads."""

    def __init__(self, capacity: int, limits: SegmentLimits, *, shares_pasts: bool) -> None:
        super().__init__(limits)
        self.limits, self.shares_pasts = limits, shares_pasts
        self.states = [0] * (capacity + 1)
        self.shared: list[int] = []
        self.tokens: list[int] = []

    def run_pass(
        self, layout: PassLayout, rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        size, width = layout.tokens.shape
        assert len(layout) == size <= self.limits.max_rows
        if size > 1:
            assert size * width <= self.limits.max_tokens
            assert layout.shared + layout.past + width <= (self.limits.max_context or 1000)
        states = np.zeros(layout.tokens.shape, np.int64)
        for place in range(width):  # a token may follow another of its pass
            for row in range(size):
                position, count = layout.positions[row, place], layout.is_token[row].sum()
                if position >= layout.shared + count:
                    assert layout.writes[row, place] == SCRATCH_SLOT
                    continue
                reads = layout.reads[row][layout.is_token[row]].tolist()
                path = [*layout.shared_slots[0].tolist(), *reads]
                assert layout.writes[row, place] in {SCRATCH_SLOT, path[position]}
                state = 0 if position == 0 else self.states[path[position - 1]]
                states[row, place] = next_state(state, int(layout.tokens[row, place]))
                self.states[path[position]] = int(states[row, place])
        self.shared.append(layout.shared)
        self.tokens.append(size * width)
        logits = [row_after(state) for state in states[rows, places].tolist()]
        return torch.stack(logits) if logits else torch.empty(0, SIZE)


class WithTrunks(Passes):
    """Has the slots that precede all tokens of a batch and are common in its trunk."""

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        differs = (batch.slots != batch.slots[0]).any(axis=0)
        common = int(differs.argmax()) if differs.any() else len(differs)
        count = min(common, int(batch.positions.min()))
        trunk, slots = batch.slots[0, :count].astype(np.int64), batch.slots[:, count:]
        return super().__call__(dataclasses.replace(batch, trunk=trunk, slots=slots))


def serve(
    limits: SegmentLimits, *, shares_pasts: bool = False, kind: type[Passes] = Passes
) -> tuple[PrefixRows, Passes]:
    capacity, uncached = 20_000, Alone()
    model = kind(capacity, limits, shares_pasts=shares_pasts)
    rows = PrefixRows(
        model,
        uncached=uncached,
        vocabulary=uncached.vocabulary,
        budget_bytes=(capacity + 1) * TOKEN_BYTES,
        bytes_per_token=TOKEN_BYTES,
        max_tokens=1000,
        max_rows=1000,
    )
    return rows, model


@pytest.mark.parametrize("kind", [Passes, WithTrunks])
@pytest.mark.parametrize("shares_pasts", [False, True])
@pytest.mark.parametrize(
    "limits", [SegmentLimits(1000, None), SegmentLimits(12, None, 5), SegmentLimits(64, 60, 3)]
)
def test_rows_and_scores_do_not_depend_on_the_passes(
    limits: SegmentLimits, shares_pasts: bool, kind: type[Passes]
) -> None:
    program = random.Random(0)
    rows, model = serve(limits, shares_pasts=shares_pasts, kind=kind)
    population = [text(length, seed) for seed, length in enumerate((1, 3, 30))]
    for _ in range(8):
        step = [
            program.choice(population)
            + text(program.choice([1, 1, 4, 20]), program.randrange(4))
            for _ in range(6)
        ]
        step = [ids[:59] for ids in step]
        assert_right(rows, None, list(dict.fromkeys(step)))
        assert_scores_right(rows, [scored(ids, program.randrange(1, len(ids))) for ids in step])
        population = [*step, (1,)]
    assert rows.statistics()["forwards"] == len(model.tokens)


def test_short_segments_that_depend_on_each_other_are_one_pass_of_single_tokens() -> None:
    rows, model = serve(SegmentLimits(1000, None))
    stages = [(1,), (1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5)]
    assert_right(rows, None, stages)
    assert model.tokens == [5]
    branches = [text(8, 0), (*text(8, 0), *text(8, 1)), (*text(8, 0), *text(8, 2))]
    assert_right(rows, None, branches)
    assert model.tokens == [5, 3 * 8]
    rows, model = serve(SegmentLimits(1000, None))
    longer = [text(9, 3), (*text(9, 3), *text(9, 4)), (*text(9, 3), *text(9, 5))]
    assert_right(rows, None, longer)
    assert model.tokens == [9, 2 * 9]  # in stages


@pytest.mark.parametrize("kind", [Passes, WithTrunks])
def test_slots_that_pasts_have_in_common_are_read_once(kind: type[Passes]) -> None:
    prompt = text(900, 0)
    for shares_pasts, shared in ((False, 0), (True, 900)):
        limits = SegmentLimits(1000, None)
        rows, model = serve(limits, shares_pasts=shares_pasts, kind=kind)
        assert_right(rows, None, [prompt])
        assert_right(rows, None, [(*prompt, i) for i in range(7)])
        assert model.shared == [0, shared]
