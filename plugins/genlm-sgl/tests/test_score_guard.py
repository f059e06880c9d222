"""The engine decodes scored texts if SGLang computes scores differently."""

from __future__ import annotations

import contextlib
import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genlm import AsyncLM

from .driving import prompts_of


def change_names(patch: pytest.MonkeyPatch) -> str:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor.forward

    def renamed(self: Any, *arguments: Any) -> Any:
        return original(self, *arguments)

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


@pytest.mark.parametrize("change", [change_names, change_order])
def test_changed_code_is_noticed_and_texts_are_decoded(
    build: Any, tiny: Any, change: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().close()  # imports SGLang
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "genlm_sgl"):
        problem = change(patch)
        engine = build()
    assert problem in engine.statistics()["scores"]
    [record] = [record for record in caplog.records if record.name == "genlm_sgl"]
    assert "tokens of scored texts are decoded" in record.getMessage()
    check_scores(engine, tiny)


def test_where_states_cannot_be_read_texts_are_decoded(
    build: Any, tiny: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from genlm_sgl.served_model import ServedModel

    monkeypatch.setattr(ServedModel, "why_not_scored", "a reason")
    engine = build()
    assert engine.statistics()["scores"] == "decoded: a reason"
    assert not [record for record in caplog.records if record.name == "genlm_sgl"]


def graphs_of_prefills(patch: pytest.MonkeyPatch, backend: str) -> list[int]:
    """Make SGLang run prompts as with CUDA graphs; return a list that receives pass sizes.

    SGLang's runner calls the model. Instead of replaying a graph, it computes the tokens of the
    pass and padding.
    """
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as module

    sizes: list[int] = []

    class Padded(module.PrefillCudaGraphRunner):  # type: ignore[misc, name-defined]
        def __init__(self, model_runner: Any) -> None:
            self.model_runner = model_runner
            self.layer_model = module._resolve_transformer_layer_model(model_runner.model)
            self.prefill_backend_name = backend
            self._is_full_backend = self._use_draft_input_embeds = False
            self._qwen_bcg_hc_sidechannel = self.is_dsv41_model = False
            self._input_embeds_arg_idx = None  # the place of embeddings, which have no slot
            self.buffer_registry = SimpleNamespace(has_slot=lambda _: False)
            self.backend = SimpleNamespace(replay=self.replay)
            self._prefill_forward_context = lambda *_, **__: contextlib.nullcontext()

        def can_run_graph(self, forward_batch: Any) -> bool:
            return not forward_batch.forward_mode.is_mixed()

        def replay(self, _key: Any, batch: Any, **_: Any) -> Any:
            layers = type(self.layer_model).forward
            return layers(self.layer_model, batch.input_ids, batch.positions, batch)

        def execute(self, forward_batch: Any, **options: Any) -> Any:
            padded = copy.copy(forward_batch)
            size, self.raw_bs = len(forward_batch.input_ids), forward_batch.batch_size
            self.raw_num_tokens, padding = size, -size % 16 or 16
            for name in ("input_ids", "positions", "out_cache_loc"):
                values = torch.nn.functional.pad(getattr(forward_batch, name), (0, padding))
                setattr(padded, name, values)
            sizes.append(size + padding)
            self.model_runner.attn_backend.init_forward_metadata(padded)
            output = self._execute_body_capture(
                forward_batch, padded, size + padding, size, None, **options
            )
            return self._finalize_execute_output(output)

    def capture(*, model_runner: Any, **_: Any) -> Any:
        return cuda_graph_setup.GraphCapture(
            runner=Padded(model_runner),
            memory_phase="prefill",
            memory_usage_gb=0,
            capture_time=0,
        )

    patch.setattr(cuda_graph_setup, "capture_prefill_graph", capture)
    return sizes


def test_texts_are_scored_beside_graphs_of_prefills(
    build: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().close()  # imports SGLang
    sizes = graphs_of_prefills(monkeypatch, "breakable")  # SGLang's default on CUDA
    engine = build(chunked_prefill_size=32)
    assert engine.statistics()["scores"] == "in one pass"
    check_scores(engine, tiny, 70)
    assert sizes[-2:] == [48, 48]  # 32 and 32 tokens; the last 5 are decoded


def test_texts_are_not_scored_where_graphs_compute_the_logits(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().close()
    graphs_of_prefills(monkeypatch, "tc_piecewise")
    assert build().statistics()["scores"] == "decoded: graphs of prefills"


def check_scores(engine: Any, tiny: Any, length: int = 12) -> None:
    [text] = prompts_of(length)
    llm = AsyncLM(lambda: engine, name="sgl")
    try:
        scores = llm.score_sync(text)
    finally:
        llm.close()
    expected = tiny.all_logprobs(text[:-1]).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert float((scores - expected).abs().max()) <= 1e-4
