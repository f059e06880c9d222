"""Models whose config SGLang ignores in part have correct rows or are refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import genlm
from genlm import ModelLoadError, UnverifiedModelWarning
from genlm.testing import Family, TinyModel, families
from genlm_sgl import corrections
from genlm_sgl.checkpoint import CheckpointBiases
from genlm_sgl.engine import SGLEngine

from .driving import answers, prompts_of

# Many variants of these tests are not in the table of families.
pytestmark = pytest.mark.filterwarnings("ignore::genlm.UnverifiedModelWarning")

BOUND = 1e-5

WINDOW = "mistral with a window of 16"
EXPERTS = "mixtral with a window of 16"

Serve = Callable[..., tuple[Any, TinyModel]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Function that loads a family with changed settings; engines are closed at the end."""
    engines: list[Any] = []

    def served(
        name: str,
        options: dict[str, Any] | None = None,
        unverified: str = "warn",
        **changes: Any,
    ) -> tuple[Any, TinyModel]:
        base = families()[name]
        settings = {**base.settings, **changes}
        family = Family(name, base.model_type, settings, base.hidden_size, False)
        model = TinyModel.of(tmp_path / f"{len(list(tmp_path.iterdir()))}", family)
        opts = {"device": "cpu", "max_total_tokens": 2048, **(options or {})}
        engines.append(SGLEngine(model.path, engine_opts=opts, unverified=unverified))
        return engines[-1], model

    yield served
    for engine in engines:
        engine.close()


@pytest.fixture
def uncorrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable corrections, as on a device where attributes cannot be corrected."""
    monkeypatch.setattr(corrections, "correct_model", lambda *_: [])


def error_of(engine: Any, model: TinyModel, *lengths: int) -> float:
    """Return the largest error of rows of prompts of these lengths."""
    prompts = prompts_of(*lengths)
    rows = answers(engine, prompts)
    return max(
        float((row - model.logprobs(prompt)).abs().max())
        for prompt, row in zip(prompts, rows, strict=True)
    )


# -- windows --------------------------------------------------------------------------


@pytest.mark.usefixtures("uncorrected")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (WINDOW, "ignores the sliding window in layer 0 of MistralForCausalLM"),
        (EXPERTS, "ignores the sliding window in layer 0 of MixtralForCausalLM"),
        ("phi3 with a window of 16", "ignores the sliding window in layer 0 of Phi3"),
        ("cohere2", "attends to 5 tokens in layer 0 of Cohere2ForCausalLM"),
    ],
)
def test_a_window_that_is_left_out_is_refused_with_the_reason(
    serve: Serve, name: str, words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        serve(name)
    message = str(refused.value)
    window = 4 if name == "cohere2" else 16
    assert message.startswith("SGLang 0.5.")
    assert f"rows beyond {window} tokens would be wrong" in message
    assert f"engine_opts={{'context_length': {window}}}" in message


@pytest.mark.usefixtures("uncorrected")
def test_a_context_within_the_window_is_served_after_a_refusal(serve: Serve) -> None:
    with pytest.raises(ModelLoadError, match="ignores the sliding window"):
        serve(WINDOW)
    engine, model = serve(WINDOW, {"context_length": 16})
    assert error_of(engine, model, 1, 5, engine.max_context) <= BOUND


@pytest.mark.usefixtures("uncorrected")
@pytest.mark.parametrize("window", [64, 80, None])
def test_a_window_as_long_as_the_longest_context_changes_nothing(
    serve: Serve, window: int | None
) -> None:
    engine, model = serve(WINDOW, sliding_window=window)
    assert engine.max_context == 64
    assert error_of(engine, model, 64, 30) <= BOUND


def test_a_window_is_set_in_the_layers_that_have_one(serve: Serve) -> None:
    engine, model = serve("qwen2 with a window of 16")
    assert error_of(engine, model, 9, 17, 40, 57) <= BOUND
    sizes = [layer.self_attn.attn.sliding_window_size for layer in engine.model.model.layers]
    assert sizes == [-1, 15]


def test_a_window_that_torch_would_mask_otherwise_is_not_set(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.attention import torch_native_backend

    backend = torch_native_backend.TorchNativeAttnBackend
    monkeypatch.delattr(backend, "_make_sliding_window_mask")
    with pytest.raises(ModelLoadError, match="ignores the sliding window"):
        serve(WINDOW)


@pytest.mark.parametrize("option", ["attention_backend", "prefill_attention_backend"])
def test_a_window_that_a_backend_ignores_is_refused(serve: Serve, option: str) -> None:
    name = "gemma3_text with a window of 16"
    with pytest.raises(ModelLoadError, match=r"ignores the sliding window .* flex_attention"):
        serve(name, {option: "flex_attention"})


# -- rotary embeddings ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama with dynamic rope", "dynamic"), ("phi3 with longrope", "longrope")],
)
def test_rope_by_length_is_served_up_to_its_original_positions(
    serve: Serve, name: str, kind: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"scales the {kind} rotary") as refused:
        serve(name)
    assert "engine_opts={'context_length': 16}" in str(refused.value)
    engine, model = serve(name, {"context_length": 16})
    assert error_of(engine, model, 1, 5, engine.max_context) <= BOUND


def test_settings_of_the_user_stay_beside_those_that_make_a_model_right(serve: Serve) -> None:
    overrides = json.dumps({"rms_norm_eps": 0.5})
    name = "llama with dynamic rope"
    engine, model = serve(name, {"context_length": 16, "json_model_override_args": overrides})
    assert error_of(engine, model, 1, 5) > 1e-2


def test_a_scaling_that_a_model_class_does_not_know_is_refused(serve: Serve) -> None:
    rope = families()["llama with linear rope"].settings["rope_parameters"]
    with pytest.raises(ModelLoadError, match="ignores the linear scaling"):
        serve("stablelm", rope_parameters={**rope, "partial_rotary_factor": 0.25})


@pytest.mark.parametrize("again", [False, True])
def test_another_base_of_rotary_embeddings_is_refused(serve: Serve, again: bool) -> None:
    """The second time, SGLang is imported and has registered its own classes."""
    if again:
        with pytest.raises(ModelLoadError):
            serve("olmo3")
    with pytest.raises(ModelLoadError, match=r"with base 10000\.0, where the config has 5"):
        serve("olmo3")


# -- scores, activations, biases ------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch_native", "flex_attention"])
def test_capped_scores_are_refused_where_attention_is_torchs(
    serve: Serve, backend: str
) -> None:
    # SGLang reads a setting of Gemma 2 that has another name in transformers.
    overrides = json.dumps({"hidden_act": "gelu_pytorch_tanh"})
    options = {"json_model_override_args": overrides, "attention_backend": backend}
    with pytest.raises(ModelLoadError, match="does not cap the attention scores of Gemma2"):
        serve("gemma2 with capped scores", options)


@pytest.mark.usefixtures("uncorrected")
def test_another_gelu_is_refused_where_it_is_not_set(serve: Serve) -> None:
    with pytest.raises(ModelLoadError, match=r"another GELU .*'gelu_pytorch_tanh'"):
        serve("gemma")


def test_biases_that_the_model_has_no_place_for_are_refused(serve: Serve) -> None:
    words = r"drops 6 biases .* model\.layers\.0\.mlp\.down_proj\.bias, .*Rows would be wrong"
    with pytest.raises(ModelLoadError, match=words):
        serve("llama with biases")


@pytest.mark.parametrize(
    ("name", "changes"), [("gptj", {}), ("phi", {"num_key_value_heads": 4})]
)
def test_the_bias_of_the_logits_is_added(
    serve: Serve, name: str, changes: dict[str, Any]
) -> None:
    engine, model = serve(name, **changes)
    assert error_of(engine, model, 1, 9, 40) <= BOUND


@pytest.mark.usefixtures("uncorrected")
def test_parameters_that_the_model_rounds_are_refused_where_they_are_not_set(
    serve: Serve,
) -> None:
    with pytest.raises(ModelLoadError, match="rounds the parameters of xIELU in Apertus"):
        serve("apertus")


def test_a_bias_of_logits_that_are_scaled_afterwards_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections, "_POST_BIAS_SETTINGS", ("rotary_dim",))
    with pytest.raises(ModelLoadError, match=r"drops 1 biases .* lm_head\.bias"):
        serve("gptj")


def test_what_a_checkpoint_brings_is_looked_for_in_its_layer_in_any_order() -> None:
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 6)] * 2)})
    del module["layers"][1]
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0, 4.0, 6.0])
    module["layers"][0].bias.data = whole
    weights = {
        "layers.0.q.bias": whole[[4, 0]],
        "layers.0.twice.bias": torch.tensor([4.0, 4.0]),
        "layers.0.zero.bias": torch.zeros(2),
        "layers.0.thrice.bias": torch.tensor([4.0, 4.0, 4.0]),
        "layers.0.other.bias": torch.tensor([1.0, 2.5]),
        "layers.0.weight": torch.randn(2, 2),
        "layers.1.draft.bias": torch.tensor([9.0]),
        "layers.0.mask.bias": torch.ones(1, 1, 2, 2),
    }
    biases = CheckpointBiases()
    assert dict(biases.record(weights.items())) == weights
    missing = biases.missing(module.named_parameters(), layers=1, dtype=torch.float32)
    assert missing == ["layers.0.thrice.bias", "layers.0.other.bias"]


# -- models that SGLang runs with transformers' code ----------------------------------


def test_a_model_of_transformers_warns_and_is_right(serve: Serve) -> None:
    with pytest.warns(UnverifiedModelWarning, match=r"GPTNeoX.* by SGLang's Transformers"):
        engine, model = serve("gpt_neox")
    assert error_of(engine, model, 1, 9, 40) <= BOUND


def test_an_unverified_model_is_refused_if_asked_and_the_next_is_served(serve: Serve) -> None:
    with pytest.raises(ModelLoadError, match=r"GPTNeoX.* were not verified"):
        serve("gpt_neox", unverified="refuse")
    engine, model = serve("llama", unverified="refuse")
    assert error_of(engine, model, 9) <= BOUND


def test_a_recurrent_model_of_transformers_is_refused(serve: Serve) -> None:
    with pytest.raises(ModelLoadError, match=r"RecurrentGemma.* without its recurrent state"):
        serve("recurrent_gemma")


def test_other_words_for_unverified_models_are_refused(serve: Serve) -> None:
    with pytest.raises(ValueError, match="unverified='never'"):  # before it loads a model
        SGLEngine("no folder", unverified="never")
    engine, model = serve("llama")
    assert error_of(engine, model, 9) <= BOUND


# -- models that load and fail --------------------------------------------------------


def test_a_model_that_fails_its_first_prompt_is_closed_and_the_next_is_served(
    serve: Serve, tmp_path: Path
) -> None:
    model = TinyModel.of(tmp_path / "phi", families()["phi"])
    options = {"device": "cpu", "max_total_tokens": 2048}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedModelWarning)
        with pytest.raises(ModelLoadError, match=r"cannot compute a prompt .*shape mismatch"):
            genlm.load_model(model.path, "sgl", engine_opts=options)
    engine, model = serve("llama")
    assert error_of(engine, model, 9) <= BOUND


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_a_separate_output_embedding_that_sglang_ignores_is_refused(
    serve: Serve, name: str
) -> None:
    with pytest.raises(
        ModelLoadError, match=r"uses the input embedding of GPT.* rows would be"
    ):
        serve(name, tie_word_embeddings=False)
