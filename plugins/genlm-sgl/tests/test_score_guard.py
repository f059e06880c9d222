"""What the engine does where SGLang does not score as the versions that are known."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from genlm import AsyncLM, Capability

from .driving import prompts_of


def change_names(patch: pytest.MonkeyPatch) -> str:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor.forward

    def renamed(self: Any, *all_of_them: Any) -> Any:
        return original(self, *all_of_them)

    patch.setattr(LogitsProcessor, "forward", renamed)
    return "KeyError"


def change_order(patch: pytest.MonkeyPatch) -> str:
    original = torch.nn.Module.register_forward_pre_hook

    def reversed_states(self: Any, hook: Any, **options: Any) -> Any:
        def changed(module: Any, arguments: tuple[Any, ...], named: Any) -> Any:
            return hook(module, (arguments[0], -arguments[1], *arguments[2:]), named)

        return original(self, changed, **options)

    patch.setattr(torch.nn.Module, "register_forward_pre_hook", reversed_states)
    return "a score is"


def change_cache(patch: pytest.MonkeyPatch) -> str:
    from sglang.srt.managers.schedule_batch import Req

    patch.delattr(Req, "_compute_max_prefix_len")
    return "AttributeError"


@pytest.mark.parametrize("change", [change_names, change_order, change_cache])
def test_changed_code_is_noticed_and_rows_score(
    build: Any, tiny: Any, change: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().close()  # imports SGLang
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "genlm_sgl"):
        problem = change(patch)
        engine = build()
    assert problem in engine.statistics()["scores"]
    assert Capability.SCORE not in engine.capabilities
    [record] = [each for each in caplog.records if each.name == "genlm_sgl"]
    assert "scored by a row of each position" in record.getMessage()
    if change is change_names:
        check_scores(engine, tiny)


def test_what_cannot_be_scored_is_not_declared(
    build: Any, tiny: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm_sgl.scheduler_api.obstacle_to_score", lambda _: "a reason")
    engine = build()
    assert engine.statistics()["scores"] == "by rows: a reason"
    assert Capability.SCORE not in engine.capabilities
    assert not [each for each in caplog.records if each.name == "genlm_sgl"]


def check_scores(engine: Any, tiny: Any) -> None:
    [text] = prompts_of(12)
    llm = AsyncLM(lambda: engine, name="sgl")
    try:
        found = llm.score_sync(text)
    finally:
        llm.close()
    expected = tiny.all_logprobs(text[:-1]).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert float((found - expected).abs().max()) <= 1e-4
