"""Models that come with peft adapters, against peft's own forward, one sequence at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version

import genlm
from genlm import AdapterError, EvaluationError, ModelLoadError, UnknownAdapterError
from genlm_hf.engine import HFEngine
from genlm_hf.peft_layers import adapter_layers

from .tiny import alone, answers, build_model, ids_of_lengths, llama_settings

SEQUENCES = ids_of_lengths(9, 1, 23, 4)

NEEDS_LATER_PEFT = Version(transformers.__version__) >= Version("5.24") and Version(
    peft.__version__
) < Version("0.22")


def lora(**settings: Any) -> peft.LoraConfig:
    options = {"r": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(options | settings))


def spread_adapters(model: Any, seed: int) -> Any:
    """Give adapters weights that matter; they are made to have no effect."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for layer in model.modules():
            for name, part in layer.named_children():
                if name.startswith(("lora_", "ia3_", "hada_", "lokr_", "modules_to_save")):
                    for parameter in part.parameters():
                        parameter.normal_(0, 0.3)
            for name, parameter in layer.named_parameters(recurse=False):
                if name.startswith(("lora_", "ia3_", "hada_", "lokr_")):
                    parameter.normal_(0, 0.3)
    return model.eval()


def peft_model(config: Any = None, **further: Any) -> Any:
    """A `PeftModel` with adapter "red" switched on, and further ones."""
    base = build_model("llama", **llama_settings())
    model = peft.get_peft_model(base, config or lora(), adapter_name="red")
    for name, other in further.items():
        model.add_adapter(name, other)
    return spread_adapters(model, 2)


def two_adapters() -> Any:
    return peft_model(blue=lora(target_modules=["v_proj"]))


def with_loaded_adapter(path: Path) -> Any:
    """A transformers model into which adapters were loaded by its own method."""
    if NEEDS_LATER_PEFT:
        pytest.skip("transformers' load_adapter needs peft 0.22 from transformers 5.24 on")
    model = two_adapters()
    model.save_pretrained(path, save_embedding_layers=False)
    loaded = build_model("llama", **llama_settings())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("red", "blue"):
            loaded.load_adapter(str(path / name), name)
    loaded.set_adapter("red")
    return loaded.eval()


def oracles(adapted_model: Any) -> dict[str | None, Any]:
    """A copy of a model as it was handed over, and peft's own with one adapter at work."""
    models = {None: copy.deepcopy(adapted_model)}
    for name in ("red", "blue"):
        models[name] = two_adapters()
        models[name].set_adapter(name)
    return models


def check_rows(engine: HFEngine, models: dict[str | None, Any]) -> None:
    """Ask for all sequences with all adapters in one step, twice: the second is cached."""
    requests = [(ids, name) for ids in SEQUENCES for name in models]
    expected = [alone(models[name], ids) for ids, name in requests]
    for _ in range(2):
        torch.testing.assert_close(answers(engine, requests), expected, atol=1e-4, rtol=0)
    longer = [([*ids, 7], name) for ids, name in requests]
    expected = [alone(models[name], ids) for ids, name in longer]
    torch.testing.assert_close(answers(engine, longer), expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def green(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """An adapter in a folder, of modules that others adapt and that they do not."""
    path = tmp_path_factory.mktemp("green")
    base = build_model("llama", **llama_settings())
    config = lora(target_modules=["q_proj", "o_proj", "lm_head"])
    model = spread_adapters(peft.get_peft_model(base, config), 5)
    model.save_pretrained(path, save_embedding_layers=False)
    return str(path), model


@pytest.fixture(params=["wrapped", "inside", "loaded"])
def adapted_model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "loaded":
        return with_loaded_adapter(tmp_path)
    return two_adapters() if request.param == "wrapped" else two_adapters().get_base_model()


@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
def test_the_model_is_served_as_it_was_handed_over_and_by_adapter(
    adapted_model: Any, tokenizer: Any, green: tuple[str, Any], path: str
) -> None:
    models = oracles(adapted_model)
    bare = build_model("llama", **llama_settings())
    rows = [alone(model, SEQUENCES[0]) for model in (bare, models["red"], models["blue"])]
    assert torch.pdist(torch.stack(rows)).min() > 0.1
    engine = HFEngine.from_model(adapted_model, tokenizer, execution_path=path)
    assert engine.statistics()["execution_path"] == path
    assert engine.adapters == ("red", "blue")
    check_rows(engine, models)
    engine.add_adapter("green", green[0])
    check_rows(engine, {**models, "green": green[1]})
    engine.close()
    check_rows(HFEngine.from_model(adapted_model, tokenizer), models)


def states(model: Any) -> list[Any]:
    kinds = (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.ModulesToSaveWrapper)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)]
    return [(n, m.active_adapters, m.disable_adapters) for n, m in layers]


def test_closing_gives_the_model_back_as_it_was(
    adapted_model: Any, tokenizer: Any, green: tuple[str, Any]
) -> None:
    modules, switches = dict(adapted_model.named_modules()), states(adapted_model)
    parameters = {name: (p, p.requires_grad) for name, p in adapted_model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in adapted_model.named_parameters()}
    config, names = adapted_model.peft_config, list(adapted_model.peft_config)
    engine = HFEngine.from_model(adapted_model, tokenizer)
    engine.add_adapter("green", green[0])
    answers(engine, [(ids, name) for ids in SEQUENCES for name in (None, "blue", "green")])
    engine.close()
    assert dict(adapted_model.named_modules()) == modules
    assert states(adapted_model) == switches
    assert adapted_model.peft_config is config
    assert list(config) == names
    for name, parameter in adapted_model.named_parameters():
        assert parameter is parameters[name][0]
        assert parameter.requires_grad is parameters[name][1]
        assert torch.equal(parameter, weights[name])


@pytest.mark.parametrize("unloads", [False, True])
def test_what_the_caller_has_replaced_meanwhile_is_kept(
    adapted_model: Any, tokenizer: Any, green: tuple[str, Any], unloads: bool
) -> None:
    engine = HFEngine.from_model(adapted_model, tokenizer)
    engine.add_adapter("green", green[0])
    base = engine._served.model
    base.model.norm.weight = norm = torch.nn.Parameter(2 * base.model.norm.weight)
    base.model.layers[0].mlp.act_fn = activation = torch.nn.Tanh()
    frozen = base.model.layers[0].input_layernorm.weight.requires_grad_(False)
    expected = [alone(adapted_model, ids) for ids in SEQUENCES]
    if unloads:
        engine.remove_adapter("green")
        torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    engine.close()
    assert base.model.norm.weight is norm
    assert base.model.layers[0].mlp.act_fn is activation
    assert not frozen.requires_grad
    rows = [alone(adapted_model, ids) for ids in SEQUENCES]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_adapters_may_have_any_names(tokenizer: Any, green: tuple[str, Any]) -> None:
    model = peft.get_peft_model(
        build_model("llama", **llama_settings()), lora(), adapter_name="genlm_0"
    )
    spread_adapters(model, 2)
    engine = HFEngine.from_model(model, tokenizer)
    expected = alone(model, SEQUENCES[0])
    engine.add_adapter("genlm_1", green[0])
    requests = [(SEQUENCES[0], name) for name in ("genlm_0", "genlm_1")]
    rows = [expected, alone(green[1], SEQUENCES[0])]
    torch.testing.assert_close(answers(engine, requests), rows, atol=1e-4, rtol=0)
    with pytest.raises(UnknownAdapterError, match="Loaded: genlm_1"):
        engine.remove_adapter("genlm_0")
    engine.remove_adapter("genlm_1")
    assert engine.adapters == ("genlm_0",)
    torch.testing.assert_close(answers(engine, requests[:1]), [expected], atol=1e-4, rtol=0)


def test_between_steps_the_model_is_as_it_was_handed_over(
    adapted_model: Any, tokenizer: Any, green: tuple[str, Any]
) -> None:
    expected = alone(adapted_model, SEQUENCES[0])
    engine = HFEngine.from_model(adapted_model, tokenizer)
    engine.add_adapter("green", green[0])
    answers(engine, [(SEQUENCES[0], "green"), (SEQUENCES[1], "blue")])
    assert torch.equal(alone(adapted_model, SEQUENCES[0]), expected)


def test_several_adapters_may_be_switched_on_or_none(tokenizer: Any) -> None:
    model = two_adapters()
    model.base_model.set_adapter(["red", "blue"])
    both = HFEngine.from_model(model, tokenizer)
    check_rows(both, oracles(model))
    both.close()
    model.base_model.disable_adapter_layers()
    base = build_model("llama", **llama_settings())
    check_rows(HFEngine.from_model(model, tokenizer), {**oracles(model), None: base})


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        peft.LoHaConfig(target_modules=["q_proj"], r=3),
        peft.LoKrConfig(target_modules=["q_proj"], r=3),
        peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
        lora(use_dora=True, use_rslora=True),
        lora(modules_to_save=["lm_head"]),
        lora(target_modules=["embed_tokens", "q_proj"]),
        lora(bias="all"),
    ],
    ids=["ia3", "loha", "lokr", "adalora", "dora", "head", "embedding", "bias"],
)
def test_other_adapters_in_layers_are_served_too(tokenizer: Any, config: Any) -> None:
    model = peft_model(config)
    base = alone(build_model("llama", **llama_settings()), SEQUENCES[0])
    assert (alone(model, SEQUENCES[0]) - base).abs().max() > 0.1
    engine = HFEngine.from_model(model, tokenizer)
    check_rows(engine, {None: copy.deepcopy(model), "red": copy.deepcopy(model)})


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        lora(alora_invocation_tokens=[5, 6]),
    ],
    ids=["prompt", "prefix", "alora"],
)
def test_adapters_beyond_the_layers_are_refused(tokenizer: Any, config: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter 'red' of type [A-Z_]+ needs.*merge_and"):
        HFEngine.from_model(peft_model(config), tokenizer)


def test_merged_adapters_are_refused(tokenizer: Any) -> None:
    model = two_adapters()
    model.merge_adapter(["red"])
    with pytest.raises(ModelLoadError, match="call unmerge_adapter"):
        HFEngine.from_model(model, tokenizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already unmerged")  # the other adapter's
        model.unmerge_adapter()
    check_rows(HFEngine.from_model(model, tokenizer), {None: copy.deepcopy(model)})


def test_a_failed_load_leaves_the_model_as_it_was(
    adapted_model: Any, tokenizer: Any, green: tuple[str, Any], tmp_path: Path
) -> None:
    models = oracles(adapted_model)
    narrow = build_model("llama", **llama_settings(hidden_size=16))
    misfit = peft.get_peft_model(narrow, lora())
    misfit.save_pretrained(tmp_path / "narrow", save_embedding_layers=False)
    engine = HFEngine.from_model(adapted_model, tokenizer)
    before = [name for name, _ in adapted_model.named_parameters()]
    for loaded in ({}, {"green": green[1]}):
        with pytest.raises(AdapterError, match="does not fit"):
            engine.add_adapter("bad", str(tmp_path / "narrow"))
        with pytest.raises(AdapterError, match="'red' is loaded already"):
            engine.add_adapter("red", green[0])
        check_rows(engine, {**models, **loaded})
        if not loaded:
            assert [name for name, _ in adapted_model.named_parameters()] == before
            engine.add_adapter("green", green[0])
    with pytest.raises(UnknownAdapterError, match="Loaded: blue, green, red"):
        answers(engine, [(SEQUENCES[0], "bad")])


def test_an_adapter_of_the_model_can_be_trained_beside_loaded_ones(
    tokenizer: Any, tmp_path: Path
) -> None:
    peft_model(blue=lora(target_modules=["v_proj"])).save_pretrained(tmp_path)
    model = peft_model()
    engine = HFEngine.from_model(model, tokenizer)
    engine.add_adapter("loaded", str(tmp_path / "blue"))
    answers(engine, [(ids, adapter) for ids in SEQUENCES for adapter in (None, "loaded")])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1.0)
    before = alone(model, SEQUENCES[0])
    model(torch.tensor([SEQUENCES[0]])).logits.sum().backward()
    optimizer.step()
    expected = [alone(model, ids) for ids in SEQUENCES]
    assert (expected[0] - before).abs().max() > 1e-3
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)


def scale(model: Any) -> None:
    for layer in adapter_layers(model):
        layer.set_scale("red", 3.0)


def unmerge(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already unmerged")  # of layers without both
        model.unmerge_adapter()


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "another adapter": lambda model: model.set_adapter("blue"),
    "both adapters": lambda model: model.base_model.set_adapter(["red", "blue"]),
    "no adapter": lambda model: model.base_model.disable_adapter_layers(),
    "an adapter again": lambda model: model.base_model.enable_adapter_layers(),
    "another scale": scale,
    "merged": lambda model: model.merge_adapter(),
    "merged no more": unmerge,
}


@pytest.mark.parametrize("has_loaded", [False, True])
def test_requests_follow_what_the_caller_switches(
    tokenizer: Any, green: tuple[str, Any], has_loaded: bool
) -> None:
    model, (ids, other, *_) = two_adapters(), SEQUENCES
    model.set_adapter("red")
    with genlm.load_model(model, "hf", tokenizer=tokenizer) as llm:
        population = llm.population([ids, other])
        if has_loaded:
            llm.load_lora(green[0], "green")
            llm.next_token_logprobs_sync(ids, lora_name="green")
            llm.next_token_logprobs_sync(ids, lora_name="blue")

        def assert_current() -> torch.Tensor:
            size = llm.vocab_size
            expected = [alone(model, ids, size), alone(model, other, size)]
            rows = llm.batch_next_token_logprobs_sync([ids, other])
            torch.testing.assert_close(list(rows), expected, atol=1e-4, rtol=0)
            rows = population.next_token_logprobs_sync()
            torch.testing.assert_close(list(rows), expected, atol=1e-4, rtol=0)
            return expected[0]

        before = assert_current()
        for name, switch in SWITCHES.items():
            trainable = {p: p.requires_grad for p in model.parameters()}
            switch(model)
            row = assert_current()
            assert name.startswith("merged") or (row - before).abs().max() > 1e-2, name
            before = row
            if has_loaded and name != "merged":
                trainable = {p: p.requires_grad for p in model.parameters()}
                state = [layer.active_adapters for layer in adapter_layers(model)]
                llm.next_token_logprobs_sync([*ids, 3], lora_name="green")
                llm.next_token_logprobs_sync([*ids, 3], lora_name="red")
                llm.load_lora(green[0], "green again")
                llm.next_token_logprobs_sync([*ids, 3], lora_name="green again")
                llm.unload_lora("green again")
                assert_current()
                assert trainable == {p: p.requires_grad for p in trainable}
                assert state == [layer.active_adapters for layer in adapter_layers(model)]


def test_another_scale_of_an_adapter_that_is_not_switched_on_is_used(tokenizer: Any) -> None:
    model = two_adapters()
    model.set_adapter("red")
    with genlm.load_model(model, "hf", tokenizer=tokenizer) as llm:
        before = llm.next_token_logprobs_sync(SEQUENCES[0], lora_name="red")
        model.base_model.disable_adapter_layers()
        llm.next_token_logprobs_sync(SEQUENCES[0], lora_name="red")
        scale(model)
        row = llm.next_token_logprobs_sync(SEQUENCES[0], lora_name="red")
        model.base_model.enable_adapter_layers()
        expected = alone(model, SEQUENCES[0], llm.vocab_size)
        assert (expected - before).abs().max() > 1e-2
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_an_adapter_cannot_be_used_while_others_are_merged(
    tokenizer: Any, green: tuple[str, Any]
) -> None:
    model = two_adapters()
    with genlm.load_model(model, "hf", tokenizer=tokenizer) as llm:
        llm.load_lora(green[0], "green")
        model.merge_adapter()
        for name in ("green", "blue"):
            with pytest.raises(EvaluationError, match=r"are merged .* call unmerge_adapter"):
                llm.next_token_logprobs_sync(SEQUENCES[0], lora_name=name)
        unmerge(model)
        row = llm.next_token_logprobs_sync(SEQUENCES[0], lora_name="green")
        expected = alone(green[1], SEQUENCES[0], len(row))
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_loading_and_unloading_do_not_change_the_version_meanwhile(
    tokenizer: Any, green: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of another thread would drop all cached results."""
    engine = HFEngine.from_model(two_adapters(), tokenizer)
    version, found = engine.weights_version(), []

    def watch(name: str) -> None:
        method = getattr(engine._adapters, name)

        def watched(*arguments: Any) -> Any:
            result = method(*arguments)
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(engine.weights_version).result())
            return result

        monkeypatch.setattr(engine._adapters, name, watched)

    watch("_inject")
    watch("_delete")
    engine.add_adapter("green", green[0])
    engine.remove_adapter("green")
    assert found == [version, version]
    assert engine.weights_version() == version


def test_steps_of_adapters_keep_cached_results(tokenizer: Any, green: tuple[str, Any]) -> None:
    with genlm.load_model(two_adapters(), "hf", tokenizer=tokenizer) as llm:
        llm.next_token_logprobs_sync(SEQUENCES[0])
        before = llm.statistics()
        llm.load_lora(green[0], "green")
        for name in ("green", "blue", None):
            llm.next_token_logprobs_sync(SEQUENCES[0], lora_name=name)
        llm.unload_lora("green")
        llm.next_token_logprobs_sync(SEQUENCES[0])
        assert (llm.statistics() - before).cache_hits == 2
