"""`run_burst` hands a control the rows of the sequences that it has added, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import genlm
from genlm.backend.llm import AsyncMlxLM, AsyncSGLTransformer, AsyncTransformer, AsyncVirtualLM
from genlm.backend.llm.base import AsyncLM

from .test_adapters import save_adapter
from .tiny import SIZE, alone


class Control:
    """Draws the most likely tokens and keeps what it is told, in order."""

    def __init__(self, *adds: tuple[int, list[int], str | None], length: int = 3) -> None:
        self.adds = list(adds)
        self.texts: dict[int, list[int]] = {}
        self.adapters: dict[int, str | None] = {}
        self.lengths: dict[int, int] = {}
        self.rows: list[tuple[list[int], str | None, torch.Tensor]] = []
        self.aborts: list[int] = []
        self.length = length
        self.ended = 0

    def drain_adds(self) -> list[tuple[int, list[int], str | None]]:
        adds, self.adds = self.adds, []
        for handle, token_ids, lora_name in adds:
            self.texts[handle] = list(token_ids)
            self.adapters[handle] = lora_name
            self.lengths[handle] = len(token_ids)
        return adds

    def drain_aborts(self) -> list[int]:
        aborts, self.aborts = self.aborts, []
        return aborts

    def draw(self, logits: torch.Tensor, handles: Sequence[int]) -> torch.Tensor:
        assert logits.shape == (len(handles), SIZE)
        assert logits.dtype == torch.float32
        drawn = logits.argmax(1)
        for handle, row, token_id in zip(handles, logits, drawn.tolist(), strict=True):
            text = self.texts[handle]
            self.rows.append((list(text), self.adapters[handle], row))
            text.append(token_id)
            if len(text) == self.lengths[handle] + self.length:
                self.aborts.append(handle)
        return drawn

    def on_burst_end(self) -> None:
        self.ended += 1


class Resampling(Control):
    """After the second step, handle 0 continues as a copy of handle 1 under a new handle."""

    def draw(self, logits, handles):
        drawn = super().draw(logits, handles)
        if len(self.rows) == 4:
            self.aborts.append(0)
            self.adds.append((2, list(self.texts[1]), None))
        return drawn


def assert_rows(control: Control, model: torch.nn.Module) -> None:
    for text, _, row in control.rows:
        torch.testing.assert_close(row, alone(model, text), atol=1e-4, rtol=0)


def test_sequences_are_extended_by_the_drawn_tokens(llm, model):
    control = Control((0, [5, 6], None), (7, [9], None))
    llm.run_burst(control, max_steps=10)
    assert {handle: len(text) for handle, text in control.texts.items()} == {0: 5, 7: 4}
    assert len(control.rows) == 6
    assert_rows(control, model)
    assert control.ended == 1


def test_sequences_are_dropped_and_added_between_steps(llm, model):
    control = Resampling((0, [5, 6], None), (1, [9], None))
    llm.run_burst(control, max_steps=10)
    assert [len(control.texts[handle]) for handle in range(3)] == [4, 4, 6]
    assert_rows(control, model)


def test_each_sequence_has_its_adapter(llm, model, tmp_path):
    save_adapter(tmp_path, 0)
    llm.add_new_lora(tmp_path, "red")
    control = Control((0, [5, 6], None), (1, [5, 6], "red"), length=1)
    llm.run_burst(control, max_steps=1)
    rows = {adapter: row for _, adapter, row in control.rows}
    torch.testing.assert_close(rows[None], llm.next_token_logprobs_sync([5, 6]))
    torch.testing.assert_close(rows["red"], llm.next_token_logprobs_sync([5, 6], "red"))
    assert not torch.allclose(rows[None], rows["red"], atol=1e-3)


def test_a_sequence_ends_after_the_given_number_of_steps(llm):
    control = Control((0, [5], None), length=100)
    llm.run_burst(control, max_steps=4)
    assert len(control.texts[0]) == 5
    assert control.ended == 1


def test_a_burst_without_sequences_ends(llm):
    control = Control()
    llm.run_burst(control, max_steps=4)
    assert control.ended == 1


def test_errors_end_the_burst_and_leave_the_model_usable(llm, model):
    with pytest.raises(genlm.TokenIdError):
        llm.run_burst(Control((0, [SIZE], None)), max_steps=4)
    control = Control((0, [5], None))
    control.draw = lambda logits, handles: [1, 2]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="zip"):
        llm.run_burst(control, max_steps=4)
    torch.testing.assert_close(
        llm.next_token_logprobs_sync([5]), alone(model, [5]), atol=1e-4, rtol=0
    )


def test_engines_can_be_driven_and_others_say_that_they_cannot():
    for served in (AsyncTransformer, AsyncVirtualLM, AsyncSGLTransformer, AsyncMlxLM):
        assert served.supports_burst
    assert not AsyncLM.supports_burst
