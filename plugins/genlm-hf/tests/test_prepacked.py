"""Linear layers that read their weights in another layout, against those that do not."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import genlm
from genlm_hf import prepacked
from genlm_hf.engine import HFEngine

from .families import family
from .population import Oracle, particles, unique
from .test_adapters import make_adapter
from .tiny import answers, build_model, ids_of_lengths

# Wide enough for layers of more than 2**16 weights, and of fewer.
WIDE = {"hidden_size": 272, "intermediate_size": 304, "num_attention_heads": 4}
WIDE |= {"num_key_value_heads": 2, "head_dim": 68}
GPT2 = {"vocab_size": 320, "n_embd": 272, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
MODELS = {"llama": family("llama", **WIDE), "gpt2": ("gpt2", GPT2)}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """Of projections without biases, or of transformers' own with biases."""
    model_type, settings = MODELS[request.param]
    model = build_model(model_type, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    return model


def linear_layers(model: Any) -> list[Any]:
    kinds = {"Linear", "Conv1D"}
    return [module for module in model.modules() if type(module).__name__ in kinds]


@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
def test_rows_are_those_of_the_models_own_layers(model: Any, tokenizer: Any, path: str) -> None:
    engine = HFEngine.from_model(model, tokenizer, execution_path=path, prepack=True)
    wide = [m.weight for m in linear_layers(model) if m.weight.numel() >= 2**16]
    assert len(wide) > 0
    assert engine.statistics()["prepacked_bytes"] == sum(weight.nbytes for weight in wide)
    oracle, prompt = Oracle(model), ids_of_lengths(20)[0]
    if path != "padded":
        engine.cache_prefix(prompt, None)
    for step in particles(6, 8, prompt):
        sequences = unique(step)
        assert oracle.largest_error(sequences, answers(engine, sequences)) <= 2e-5


def test_the_copies_are_read_and_the_model_is_left_alone(model: Any, tokenizer: Any) -> None:
    engines = [HFEngine.from_model(model, tokenizer, prepack=p) for p in (True, False)]
    ids = ids_of_lengths(9)
    before = [answers(engine, ids)[0] for engine in engines]
    for run in (model, engines[0]._served.model):
        assert not [m for m in run.modules() if "forward" in vars(m)]
    linear_layers(model)[-2].weight.data.mul_(-20)  # not detected, so the copies stay
    for engine in engines:
        engine.clear_prefix_cache()
    after = [answers(engine, ids)[0] for engine in engines]
    changes = [float((x - y).abs().max()) for x, y in zip(before, after, strict=True)]
    assert changes[0] <= 1e-5
    assert changes[1] > 0.01


@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_tokens_gets_its_products_by_few_sizes(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = set()
    product = torch.ops.mkldnn._linear_pointwise.default

    def recorded(states: torch.Tensor, *arguments: Any) -> Any:
        sizes.add(states.numel() // 260)
        return product(states, *arguments)

    operator = SimpleNamespace(default=recorded)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operator)
    layer = torch.nn.Linear(260, 256, bias=bias)
    weights = prepacked.PrepackedWeights([layer])
    for shape in [(n,) for n in (*range(70), 255, 256, 257, 600)] + [(3, 5), (2, 300), (2, 0)]:
        states = torch.randn(*shape, 260)
        expected = layer(states)
        with weights.activate(), torch.no_grad():
            output = layer(states)
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    assert len(sizes) <= 24


def test_a_step_that_raises_leaves_the_modules_alone(model: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(model, tokenizer, prepack=True)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.register_forward_pre_hook(fail)
    (error,) = answers(engine, [[3, 4]])
    handle.remove()
    assert "on purpose" in str(error)
    assert not [m for m in linear_layers(engine._served.model) if "forward" in vars(m)]


def test_products_that_differ_or_do_not_exist_are_not_used_and_it_is_said(
    model: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "genlm_hf")
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def refused(*_: Any) -> None:
        raise RuntimeError("could not create a primitive descriptor")

    def wrong(weight: torch.Tensor, tokens: int) -> torch.Tensor:
        return reorder(weight * 1.001, tokens)

    sequences = ids_of_lengths(9, 1, 23)
    for product, why in ((refused, "refuses a weight"), (wrong, "products differ")):
        caplog.clear()
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", product)
        engine = HFEngine.from_model(model, tokenizer, prepack=True)
        assert engine.statistics()["prepacked_bytes"] == 0
        assert Oracle(model).largest_error(sequences, answers(engine, sequences)) <= 2e-5
        assert why in caplog.text
        (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "weights could be prepacked" in warning.getMessage()


def test_nothing_is_copied_where_memory_is_short(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFEngine.from_model(model, tokenizer, prepack=True)
    needed = int(engine.statistics()["prepacked_bytes"])
    for free, expected in ((4 * needed, needed), (4 * needed - 1, 0)):
        monkeypatch.setattr(prepacked, "free_memory_bytes", lambda free=free: free)
        engine = HFEngine.from_model(model, tokenizer, prepack=True)
        assert engine.statistics()["prepacked_bytes"] == expected


def test_layers_of_other_kinds_and_places_are_left_alone() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(states)

    hooked = torch.nn.Linear(256, 256)
    hooked.forward = torch.nn.Linear(256, 256).forward  # type: ignore[method-assign]
    computed = torch.nn.Linear(256, 256)  # as pruning does, anew before each pass
    weight = computed.weight.detach()
    del computed.weight
    computed.weight = weight  # type: ignore[assignment]
    modules = [
        computed,
        Doubled(256, 256),
        hooked,
        torch.nn.Linear(256, 256, device="meta"),
        torch.nn.Linear(256, 256, dtype=torch.float64),
        torch.nn.Linear(256, 255),
        torch.nn.Embedding(256, 256),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(256, 256)),
    ]
    weights = prepacked.PrepackedWeights(modules)
    assert weights.nbytes == 0
    with weights.activate():
        assert [m for m in modules if "forward" in vars(m)] == [hooked]
    assert "forward" in vars(hooked)


def test_bfloat16_rounds_as_before(tokenizer: Any) -> None:
    model = build_model("llama", **MODELS["llama"][1]).bfloat16()
    sequences = ids_of_lengths(9, 1, 23, 4)
    plain, prepack = (
        torch.stack(answers(HFEngine.from_model(model, tokenizer, prepack=p), sequences))
        for p in (False, True)
    )
    assert (plain - prepack).abs().max() <= 0.3


def test_adapters_work_on_top_of_the_copies(tokenizer: Any, tmp_path: Path) -> None:
    model = build_model("llama", **MODELS["llama"][1])
    adapted = make_adapter(model, tmp_path / "red", 1)
    engine = HFEngine.from_model(model, tokenizer, prepack=True)
    assert int(engine.statistics()["prepacked_bytes"]) > 0
    engine.add_adapter("red", str(tmp_path / "red"))
    sequences = ids_of_lengths(9, 1, 23)
    rows = answers(engine, [(ids, name) for ids in sequences for name in (None, "red")])
    assert Oracle(model).largest_error(sequences, rows[::2]) <= 1e-4
    assert Oracle(adapted).largest_error(sequences, rows[1::2]) <= 1e-4


def test_weights_of_loaded_adapters_are_not_copied(tokenizer: Any, tmp_path: Path) -> None:
    model = build_model("llama", **MODELS["llama"][1])
    make_adapter(model, tmp_path / "red", 1, r=512)
    engine = HFEngine.from_model(model, tokenizer, prepack=True)
    before = engine.statistics()["prepacked_bytes"]
    engine.add_adapter("red", str(tmp_path / "red"))
    engine.update_weights(None)
    assert engine.statistics()["prepacked_bytes"] == before


def test_models_that_the_engine_loads_are_prepacked_unless_told_otherwise(
    save_model: Any,
) -> None:
    folder = save_model(build_model("llama", **MODELS["llama"][1]))
    sizes = []
    for options in ({}, {"prepack": False}):
        with genlm.load_model(folder, backend="hf", **options) as llm:
            sizes.append(llm.statistics().engine["prepacked_bytes"])
    assert sizes[0] > 0
    assert sizes[1] == 0
