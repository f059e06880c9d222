"""Which execution path is chosen, why, and what is refused."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch

from genlm import AsyncLM, Capability, ModelLoadError, UnsupportedCapabilityError
from genlm.prefix import PrefixRows
from genlm_hf.engine import HFEngine
from genlm_hf.execution_paths import known_paths
from genlm_hf.packed import layout
from genlm_hf.packed.layout import UnsupportedMaskError, window_of

from .families import FAMILIES
from .tiny import alone, answers, build_model, ids_of_lengths, llama_settings

SEQUENCES = ids_of_lengths(9, 1, 23, 4)


@pytest.fixture(scope="module")
def mamba() -> Any:
    model_type, settings = FAMILIES["mamba"]
    return build_model(model_type, **settings)


def test_the_choice_and_its_reason_are_figures_and_logged(
    llama: Any, mamba: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "genlm_hf")
    figures = HFEngine.from_model(llama, tokenizer).statistics()
    assert (figures["execution_path"], figures["execution_path_reason"]) == (
        "packed",
        "the fastest",
    )
    assert 0 < float(figures["self_test_error"]) <= 1e-5
    assert "'packed' (the fastest; self-test error" in caplog.text
    figures = HFEngine.from_model(mamba, tokenizer).statistics()
    assert figures["execution_path"] == "padded"
    assert "not packed: its forward takes no position_ids" in str(
        figures["execution_path_reason"]
    )


def test_limits_that_make_no_sense_are_refused(llama: Any, tokenizer: Any) -> None:
    for name, wrong in {
        "max_tokens_per_batch": (0, "many", 2.5),
        "kv_budget_bytes": (-1, "1GB", float("nan")),
    }.items():
        for value in wrong:
            error = ValueError if isinstance(value, int) else TypeError
            with pytest.raises(error, match=f"^{name}={value!r}; "):
                HFEngine.from_model(llama, tokenizer, **{name: value})


@pytest.mark.parametrize("path", [None, "packed", "slot_cache", "padded"])
@pytest.mark.parametrize("positions", [1, 2])
def test_models_of_few_positions_are_served_by_every_path(
    positions: int, path: str | None, tokenizer: Any
) -> None:
    model_type, settings = FAMILIES["gpt2"]
    model = build_model(model_type, **settings | {"max_position_embeddings": positions})
    engine = HFEngine.from_model(model, tokenizer, execution_path=path)
    assert engine.max_context == positions
    assert engine.statistics()["execution_path"] == (path or "packed")
    sequences = ids_of_lengths(*range(1, positions + 1))
    for ids, row in zip(sequences, answers(engine, sequences), strict=True):
        assert (row - alone(model, ids)).abs().max() <= 1e-5


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name == "genlm_hf"]
    return [r.getMessage() for r in records if r.levelno >= logging.WARNING]


def test_a_lost_private_name_is_a_warning_that_says_what_to_do(
    llama: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    monkeypatch.setattr(layout, "_ATTRIBUTE", "_attn_implementation_of_next_year")
    engine = HFEngine.from_model(llama, tokenizer)
    assert engine.statistics()["execution_path"] == "slot_cache"
    (warning,) = warnings_in(caplog)
    assert (
        "LlamaForCausalLM is served by the execution path 'slot_cache', which is much slower"
        in warning
    )
    version = known_paths()["versions"]["transformers"]
    assert f"this model family with transformers {version} (installed:" in warning
    assert "none of its configs has the attribute _attn_implementation_of_next" in warning
    assert "Install these versions" in warning
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    caplog.clear()
    HFEngine.from_model(llama, tokenizer, execution_path="slot_cache")
    assert not warnings_in(caplog)


def test_models_that_no_version_served_faster_are_no_warning(
    llama: Any, mamba: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic = build_model("llama", **llama_settings(rope_parameters=rope))
    paths = [
        HFEngine.from_model(m, tokenizer).statistics()["execution_path"]
        for m in (mamba, dynamic)
    ]
    assert paths == ["padded", "padded"]
    assert not warnings_in(caplog)


def test_a_family_that_fails_its_self_test_is_a_warning_too(
    llama: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = PrefixRows.rows
    monkeypatch.setattr(PrefixRows, "rows", lambda *args: rows(*args) + 2e-4)
    HFEngine.from_model(llama, tokenizer)
    (warning,) = warnings_in(caplog)
    assert "the execution path 'padded'" in warning
    assert "in the self-test" in warning


def test_an_execution_path_can_be_requested(llama: Any, mamba: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path="padded")
    assert (
        engine.statistics()["execution_path"],
        engine.statistics()["execution_path_reason"],
    ) == (
        "padded",
        "requested",
    )
    with pytest.raises(
        ModelLoadError, match="execution_path='packed' cannot serve MambaForCausalLM"
    ):
        HFEngine.from_model(mamba, tokenizer, execution_path="packed")
    with pytest.raises(
        ValueError,
        match="no execution path 'fast'; choose one of 'packed', 'slot_cache', 'padded'",
    ):
        HFEngine.from_model(llama, tokenizer, execution_path="fast")


def test_the_self_test_can_be_turned_off(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    rows = PrefixRows.rows
    monkeypatch.setattr(PrefixRows, "rows", lambda *args: calls.append(1) or rows(*args))
    engine = HFEngine.from_model(llama, tokenizer, self_test=False)
    assert not calls
    assert engine.statistics()["execution_path"] == "packed"
    assert "self_test_error" not in engine.statistics()
    HFEngine.from_model(llama, tokenizer)
    assert len(calls) == 3


def test_an_execution_path_that_is_slightly_wrong_is_refused(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PrefixRows.rows
    monkeypatch.setattr(PrefixRows, "rows", lambda *args: rows(*args) + 2e-4)
    figures = HFEngine.from_model(llama, tokenizer).statistics()
    assert figures["execution_path"] == "padded"
    assert "off by 2.0e-04, more than 1.0e-04" in str(figures["execution_path_reason"])


def test_what_the_self_test_computed_is_forgotten(llama: Any, tokenizer: Any) -> None:
    assert HFEngine.from_model(llama, tokenizer).statistics()["kv_tokens"] == 0


def test_an_engine_without_a_cache_keeps_no_prefixes(mamba: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(mamba, tokenizer)
    assert Capability.PREFIX_CACHE not in engine.capabilities
    with pytest.raises(UnsupportedCapabilityError):
        engine.cache_prefix([3, 4], None)
    with pytest.raises(UnsupportedCapabilityError):
        engine.clear_prefix_cache()


def test_what_a_model_cannot_do_is_an_error_that_says_why(
    mamba: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with AsyncLM(lambda: HFEngine.from_model(mamba, tokenizer), name="hf") as llm:
        with pytest.raises(
            UnsupportedCapabilityError, match=r"no cache .*takes no position_ids"
        ):
            llm.pin_prefix([3, 4])
        with pytest.raises(UnsupportedCapabilityError, match=r"pip install 'genlm-hf\[lora\]'"):
            llm.load_lora("folder", "red")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_longest_sequence_are_not_packed(
    rope_type: str, tokenizer: Any
) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope |= {"original_max_position_embeddings": 16}
    model = build_model("llama", **llama_settings(rope_parameters=rope))
    figures = HFEngine.from_model(model, tokenizer).statistics()
    assert "depends on the longest sequence" in str(figures["execution_path_reason"])


def attention_functions(model: Any) -> set[str]:
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {config._attn_implementation for config in configs}


def test_the_model_is_left_with_its_own_attention(llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer)
    answers(engine, ids_of_lengths(5, 3))
    assert attention_functions(llama) == {"sdpa"}
    engine.close()
    assert attention_functions(llama) == {"sdpa"}
    assert not any(module._forward_pre_hooks for module in llama.modules())


@pytest.mark.parametrize("window", [0, 1, 4, 4096, 131_072, None])
def test_windows_are_read_from_masks_without_filling_them(window: int | None) -> None:
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    if window is not None:
        sliding = masking_utils.sliding_window_overlay(window)
        causal = masking_utils.and_masks(causal, sliding)
    assert window_of(causal) == window


def test_chunks_blocks_and_later_tokens_are_no_windows() -> None:
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    chunks = masking_utils.chunked_overlay(8192, torch.zeros(1, dtype=torch.long))
    for mask in (
        masking_utils.and_masks(causal, chunks),
        masking_utils.bidirectional_mask_function,
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
        # As many tokens as in a window of 8, but one of them is the first of the sequence.
        lambda batch, head, query, key: (key <= query) & ((query - key < 7) | (key == 0)),
        lambda batch, head, query, key: torch.zeros(3)[key],
    ):
        with pytest.raises(UnsupportedMaskError):
            window_of(mask)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", "its kernels need a CUDA device, and it is on cpu"),
        ("mamba", "it is served by the execution path 'padded'"),
    ],
)
def test_graphs_that_cannot_be_are_refused_when_the_model_is_loaded(
    name: str, reason: str, tokenizer: Any
) -> None:
    model = build_model(FAMILIES[name][0], **FAMILIES[name][1])
    with pytest.raises(ModelLoadError, match=reason) as caught:
        HFEngine.from_model(model, tokenizer, cuda_graphs=True)
    assert "Load the model without cuda_graphs" in str(caught.value)
