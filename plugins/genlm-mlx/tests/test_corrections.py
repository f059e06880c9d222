"""What mlx-lm computes otherwise than transformers is corrected, or the model refused."""

from __future__ import annotations

import json
from typing import Any

import mlx_lm
import pytest

from genlm import ModelLoadError, UnverifiedModelWarning
from genlm.testing import TINY_LLAMA, TinyModel
from genlm_mlx.engine import MLXEngine

from .conftest import Make, since_mlx_lm_0_32
from .driving import Ids, largest_error, rows_of

ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": ROPE
    | {"rope_type": "longrope", "short_factor": [1, 1.2, 1.5, 2], "long_factor": [2, 3, 4, 6]},
}
GEMMA3 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
SLIDING, FULL = "sliding_attention", "full_attention"


def contexts(longest: int) -> list[Ids]:
    """Forks and lengths up to some."""
    text = tuple(3 + (i * 37) % 290 for i in range(longest))
    half = longest // 2
    return [text, text[:1], text[:half], (*text[:half], 5, 6)[:longest], text[:-1] or text]


def served(model: TinyModel, **options: Any) -> MLXEngine:
    """An engine that serves no family that was not verified."""
    return MLXEngine(model.path, dtype="float32", unverified="refuse", **options)


def error(engine: MLXEngine, model: TinyModel, longest: int) -> float:
    return largest_error(engine, contexts(longest), model.logprobs)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "truncate": False}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "attention_factor": 1.5}}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("gpt_neox", {"intermediate_size": 128, "hidden_act": "gelu_new"}),
        ("gpt_neox", {"intermediate_size": 128, "hidden_act": "gelu"}),
        ("starcoder2", {"hidden_act": "gelu", "sliding_window": 4}),
        (
            "gemma3_text",
            GEMMA3 | {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]},
        ),
    ],
)
def test_settings_of_a_config_are_those_of_transformers(
    model_type: str, changes: dict[str, Any], make: Make
) -> None:
    model = make(model_type, TINY_LLAMA | changes)
    assert error(served(model), model, 40) <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [pytest.param("llama", DYNAMIC, marks=since_mlx_lm_0_32), ("phi3", LONGROPE)],
)
def test_embeddings_that_depend_on_the_length_are_served_up_to_the_original_length(
    model_type: str, changes: dict[str, Any], make: Make
) -> None:
    model = make(model_type, TINY_LLAMA | changes)
    for too_long in ({}, {"max_context": 17}):
        with pytest.raises(
            ModelLoadError, match=r"beyond 16 tokens its rotary.*max_context=16"
        ):
            served(model, **too_long)
    engine = served(model, max_context=16)
    assert (engine.statistics()["execution_path"], engine.max_context) == ("slot_cache", 16)
    assert error(engine, model, 16) <= 1e-5


def test_a_window_as_long_as_the_context_changes_nothing(make: Make) -> None:
    model = make("mistral", TINY_LLAMA | {"sliding_window": 16})
    loaded, _ = mlx_lm.load(str(model.path))
    layer = type(loaded.layers[0])
    for max_context, corrected in ((16, False), (17, True), (None, True)):
        loaded, tokenizer, config = mlx_lm.load(str(model.path), return_config=True)
        MLXEngine.from_model(loaded, tokenizer, config, max_context=max_context)
        assert (type(loaded.layers[0]) is not layer) is corrected


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "does not read the setting hidden_act='gelu'"),
        (
            "gemma3_text",
            GEMMA3 | {"final_logit_softcapping": 2.0},
            "does not read the setting final_logit_softcapping=2.0",
        ),
        (
            "gemma3_text",
            GEMMA3
            | {
                "num_hidden_layers": 6,
                "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL, FULL],
            },
            r"layer 0 sees 4 tokens, that of the config all tokens, .* max_context=4",
        ),
    ],
)
def test_what_cannot_be_corrected_is_refused(
    model_type: str, changes: dict[str, Any], reason: str, make: Make
) -> None:
    model = make(model_type, TINY_LLAMA | changes)
    with pytest.raises(ModelLoadError, match=rf"mlx-lm \d+\.\S+ would compute .*{reason}"):
        MLXEngine(model.path)


def test_a_refused_model_is_served_up_to_the_length_that_the_error_states(make: Make) -> None:
    kinds = [FULL, SLIDING, SLIDING, SLIDING, SLIDING, SLIDING]
    model = make(
        "gemma3_text", TINY_LLAMA | GEMMA3 | {"num_hidden_layers": 6, "layer_types": kinds}
    )
    with pytest.raises(ModelLoadError, match="max_context=4"):
        MLXEngine(model.path)
    engine = MLXEngine(model.path, dtype="float32", max_context=4)
    assert error(engine, model, 4) <= 1e-5


def test_dense_jamba_is_served_as_its_weights_of_experts_are_not_in_question(
    make: Make,
) -> None:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    model = make("jamba", TINY_LLAMA | layers | {"mamba_d_state": 8, "mamba_dt_rank": 4})
    with pytest.warns(UnverifiedModelWarning, match="JambaForCausalLM"):
        engine = MLXEngine(model.path, dtype="float32")
    assert error(engine, model, 30) <= 1e-4


def test_a_model_whose_code_exits_is_refused(make: Make) -> None:
    with pytest.raises(ModelLoadError, match=r"mlx-lm could not load .*SystemExit"):
        MLXEngine(make("olmo").path)


def test_a_model_that_was_loaded_by_the_caller_is_corrected_if_its_config_is_known(
    make: Make,
) -> None:
    model = make("mistral", TINY_LLAMA | {"sliding_window": 4})
    loaded, tokenizer, config = mlx_lm.load(str(model.path), return_config=True)
    with pytest.warns(UnverifiedModelWarning, match="mistral were not verified"):
        engine = MLXEngine.from_model(loaded, tokenizer)
    assert error(engine, model, 30) > 0.1  # mlx-lm ignores the window
    engine = MLXEngine.from_model(loaded, tokenizer, config, unverified="refuse")
    assert error(engine, model, 30) <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "longest"),
    [("llama", DYNAMIC, 16), ("gemma3_text", GEMMA3 | {"num_hidden_layers": 6}, 40)],
)
def test_a_model_is_corrected_once_if_two_engines_serve_it(
    model_type: str, changes: dict[str, Any], longest: int, make: Make
) -> None:
    model = make(model_type, TINY_LLAMA | changes)
    loaded = mlx_lm.load(str(model.path), return_config=True)
    for _ in range(2):
        engine = MLXEngine.from_model(*loaded, max_context=longest)
        assert error(engine, model, longest) <= 1e-5


def test_a_family_that_was_not_verified_is_refused_on_request(make: Make) -> None:
    model = make("llama", TINY_LLAMA | {"attention_bias": True})
    config = json.loads((model.path / "config.json").read_text())
    (model.path / "config.json").write_text(
        json.dumps(config | {"architectures": ["OtherForCausalLM"]})
    )
    with pytest.raises(ModelLoadError, match="OtherForCausalLM were not verified"):
        MLXEngine(model.path, unverified="refuse")
    with pytest.warns(UnverifiedModelWarning, match="OtherForCausalLM were not verified"):
        assert rows_of(MLXEngine(model.path), [(5, 6)]).shape == (1, 300)
    with pytest.raises(ValueError, match="unverified='perhaps'"):  # before it loads a model
        MLXEngine("no folder", unverified="perhaps")


def test_a_limit_of_the_context_is_a_whole_number_and_never_extends_it(
    llama: TinyModel,
) -> None:
    for requested, expected in ((None, 64), (10, 10), (100, 64)):
        assert MLXEngine(llama.path, max_context=requested).max_context == expected
    with pytest.raises(TypeError, match=r"max_context=1\.5; expected an integer"):
        MLXEngine(llama.path, max_context=1.5)  # type: ignore[arg-type]
