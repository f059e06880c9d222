"""LoRA adapters against peft's own model, one sequence at a time."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from genlm import (
    AdapterError,
    Capability,
    Query,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm_hf.engine import HFEngine

from .population import Oracle
from .tiny import VOCAB_SIZE, alone, answers, build_model, ids_of_lengths, llama_settings

SEQUENCES = ids_of_lengths(9, 1, 23, 4)


def make_adapter(base: Any, path: Path, seed: int, **settings: Any) -> Any:
    """Save an adapter with weights that matter; return peft's model of it."""
    options = {"r": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**(options | settings))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(base), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    spread = 0.3 if "lora_" in name else 0.15
                    parameter.normal_(0, spread)
    with warnings.catch_warnings():
        # peft announces that it saves a copy of embeddings that are adapted.
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        model.save_pretrained(path)
    return model


def oracles_of(base: Any, folder: Path) -> dict[str | None, Oracle]:
    """Oracles of a model, and of two adapters of it, which are saved by their names."""
    oracles: dict[str | None, Oracle] = {None: Oracle(base)}
    for seed, name in enumerate(("red", "blue"), start=1):
        oracles[name] = Oracle(make_adapter(base, folder / name, seed))
    return oracles


@pytest.fixture(scope="module")
def base() -> Any:
    return build_model("llama", **llama_settings())


@pytest.fixture(scope="module", autouse=True)
def saved(
    base: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, tuple[str, Any]]:
    """Three adapters, as (folder, peft's model), and a copy of the base model as None.

    The adapters adapt different modules. Made before any engine touches the base.
    """
    root = tmp_path_factory.mktemp("adapters")
    modules = {
        "red": ["q_proj", "down_proj"],
        "green": ["v_proj"],
        "blue": ["lm_head", "o_proj"],
    }
    paths_and_models: dict[str | None, tuple[str, Any]] = {None: ("", copy.deepcopy(base))}
    for seed, (name, targets) in enumerate(modules.items(), start=2):
        model = make_adapter(base, root / name, seed, target_modules=targets, r=seed)
        paths_and_models[name] = (str(root / name), model)
    return paths_and_models


@pytest.fixture
def engine(base: Any, tokenizer: Any) -> Iterator[HFEngine]:
    engine = HFEngine.from_model(base, tokenizer)
    yield engine
    engine.close()


def mixed_requests(*adapters: str | None) -> list[tuple[list[int], str | None]]:
    return [(ids, name) for ids in SEQUENCES for name in adapters]


def largest_error(engine: HFEngine, saved: Any, *adapters: str | None) -> float:
    requests = mixed_requests(*adapters)
    errors = []
    for (ids, name), row in zip(requests, answers(engine, requests), strict=True):
        expected = expected_row(saved[name][1], tuple(ids))
        errors.append((row - expected).abs().max())
    return float(torch.stack(errors).max())  # NaN if one is


@functools.cache
def expected_row(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    return alone(model, token_ids)


def test_one_step_mixes_the_base_model_and_adapters(engine: Any, base: Any, saved: Any) -> None:
    for name in ("red", "green", "blue"):
        engine.add_adapter(name, saved[name][0])
    assert largest_error(engine, saved, None, "red", "green", "blue") <= 1e-4


def test_the_time_to_switch_does_not_grow_with_the_parameters_of_other_adapters(
    engine: Any, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("red", "green", "blue"):
        engine.add_adapter(name, saved[name][0])
    visited: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch.Tensor, "requires_grad_", lambda tensor, _: visited.append(tensor)
    )
    answers(engine, mixed_requests("red", "green", "blue"))
    assert not visited


@pytest.mark.parametrize("order", list(itertools.permutations(["red", "green", "blue"])))
def test_the_order_of_loading_does_not_matter(
    engine: Any, base: Any, saved: Any, order: tuple[str, ...]
) -> None:
    for name in order:
        engine.add_adapter(name, saved[name][0])
        assert largest_error(engine, saved, None, name) <= 1e-4
    assert largest_error(engine, saved, *reversed(order), None) <= 1e-4


@pytest.mark.parametrize("order", list(itertools.permutations(["red", "green", "blue"])))
def test_removed_adapters_leave_the_others_and_can_be_loaded_again(
    engine: Any, base: Any, saved: Any, order: tuple[str, ...]
) -> None:
    for name in order:
        engine.add_adapter(name, saved[name][0])
    assert largest_error(engine, saved, None, *order) <= 1e-4
    for place, name in enumerate(order):
        engine.remove_adapter(name)
        assert largest_error(engine, saved, None, *order[place + 1 :]) <= 1e-4
        with pytest.raises(UnknownAdapterError):
            engine.submit(Query(0, (1, 2), name))
        with pytest.raises(UnknownAdapterError):
            engine.remove_adapter(name)
    assert engine.statistics()["adapters"] == 0
    assert not [name for name, _ in base.named_parameters() if "lora_" in name]
    engine.add_adapter("red", saved["red"][0])
    assert largest_error(engine, saved, None, "red") <= 1e-4


def test_an_adapter_is_replaced_again_and_again(engine: Any, base: Any, saved: Any) -> None:
    for version in range(4):
        kind = ("red", "green")[version % 2]
        engine.add_adapter(f"policy@{version}", saved[kind][0])
        if version:
            engine.remove_adapter(f"policy@{version - 1}")
        requests = [([1, 2, 3], f"policy@{version}"), ([1, 2, 3], None)]
        of_adapter, of_base = answers(engine, requests)
        assert (of_adapter - expected_row(saved[kind][1], (1, 2, 3))).abs().max() <= 1e-4
        assert (of_base - expected_row(saved[None][1], (1, 2, 3))).abs().max() <= 1e-4


def test_adapters_change_rows_by_far_more_than_rounding(base: Any, saved: Any) -> None:
    rows = torch.stack([alone(model, SEQUENCES[0]) for _, model in saved.values()])
    assert torch.pdist(rows).min() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 5}},
        {"lora_dropout": 0.5},
    ],
    ids=lambda s: next(iter(s)),
)
def test_variants_of_lora_beside_the_base_model_and_another_adapter(
    engine: Any, base: Any, saved: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    variants = {
        **saved,
        "variant": (str(tmp_path), make_adapter(base, tmp_path, 9, **settings)),
    }
    engine.add_adapter("red", saved["red"][0])
    engine.add_adapter("variant", str(tmp_path))
    assert largest_error(engine, variants, "variant", None, "red") <= 1e-4


def test_names_that_peft_forbids_work(engine: Any, base: Any, saved: Any) -> None:
    for name in ("v1.5", "org/lora", "lora", "default", "keys", ""):
        engine.add_adapter(name, saved["red"][0])
        [row] = answers(engine, [(SEQUENCES[0], name)])
        assert (row - alone(saved["red"][1], SEQUENCES[0])).abs().max() <= 1e-4
    assert engine.statistics()["adapters"] == 6


def test_an_unknown_adapter_fails_alone(engine: Any, base: Any, saved: Any) -> None:
    engine.add_adapter("red", saved["red"][0])
    with pytest.raises(UnknownAdapterError, match=r"no adapter named 'green'\. Loaded: red"):
        engine.submit(Query(7, (3, 4), "green"))
    assert largest_error(engine, saved, None, "red") <= 1e-4


def test_a_taken_name_is_refused_and_keeps_its_adapter(
    engine: Any, base: Any, saved: Any
) -> None:
    engine.add_adapter("red", saved["red"][0])
    with pytest.raises(AdapterError, match="'red' is loaded already"):
        engine.add_adapter("red", saved["green"][0])
    assert largest_error(engine, saved, None, "red") <= 1e-4


def other_base(**changes: Any) -> Any:
    return build_model("llama", **llama_settings(**changes))


def misfits(base: Any, path: Path) -> Iterator[str]:
    """Folders that hold no adapter for the base model."""
    yield str(path / "nowhere")
    (path / "empty").mkdir()
    yield str(path / "empty")
    make_adapter(other_base(hidden_size=16), path / "narrow", 1)
    yield str(path / "narrow")
    make_adapter(other_base(num_hidden_layers=3), path / "deep", 1)
    yield str(path / "deep")
    make_adapter(other_base(num_hidden_layers=1), path / "shallow", 1)
    yield str(path / "shallow")
    gpt2 = build_model("gpt2", vocab_size=320, n_embd=32, n_layer=2, n_head=4, bos_token_id=1)
    gpt2.config.eos_token_id = 2
    make_adapter(gpt2, path / "gpt2", 1, target_modules=["c_attn"], fan_in_fan_out=True)
    yield str(path / "gpt2")
    make_adapter(base, path / "biased", 1, bias="all")
    yield str(path / "biased")
    for name, change in {
        "garbage": None,
        "pissa": {"init_lora_weights": "pissa"},
        "rank": {"r": 5},
        "prompt": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
        "unknown": {"peft_type": "NOT_A_TYPE"},
        "replicated": {"layer_replication": [[0, 2], [0, 2]]},
    }.items():
        make_adapter(base, path / name, 1)
        file = path / name / "adapter_config.json"
        config = json.loads(file.read_text())
        file.write_text("{" if change is None else json.dumps(config | change))
        yield str(path / name)
    make_adapter(base, path / "rebased", 1, target_modules=["lm_head"])
    weights = path / "rebased" / "adapter_model.safetensors"
    tensors = load_file(weights)
    [key] = [key for key in tensors if "lora" not in key]
    save_file(tensors | {key: tensors[key] + 1}, weights)
    yield str(path / "rebased")
    make_adapter(base, path / "truncated", 1)
    weights = path / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    yield str(path / "truncated")


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
@pytest.mark.parametrize("loaded", [(), ("red",), ("red", "blue")])
def test_a_failed_load_leaves_everything_as_it_was(
    engine: Any, base: Any, saved: Any, tmp_path: Path, loaded: tuple[str, ...]
) -> None:
    for name in loaded:
        engine.add_adapter(name, saved[name][0])
    before = [name for name, _ in base.named_parameters()]
    for path in misfits(saved[None][1], tmp_path):
        with pytest.raises(AdapterError, match=r"bad.*"):
            engine.add_adapter("bad", path)
        with pytest.raises(UnknownAdapterError):
            engine.submit(Query(1, (3,), "bad"))
        assert [name for name, _ in base.named_parameters()] == before, path
        assert largest_error(engine, saved, None, *loaded) <= 1e-4
    engine.add_adapter("green", saved["green"][0])
    assert largest_error(engine, saved, None, "green", *loaded) <= 1e-4


def test_closing_gives_the_model_back_as_it_was(base: Any, saved: Any, tokenizer: Any) -> None:
    base.requires_grad_(True)
    before = {name: (p, p.requires_grad) for name, p in base.named_parameters()}
    weights = {name: p.detach().clone() for name, p in base.named_parameters()}
    modules = dict(base.named_modules())
    engine = HFEngine.from_model(base, tokenizer)
    engine.add_adapter("red", saved["red"][0])
    engine.add_adapter("blue", saved["blue"][0])
    answers(engine, mixed_requests("red", None, "blue"))
    engine.close()
    assert dict(base.named_modules()) == modules
    for name, parameter in base.named_parameters():
        assert parameter is before[name][0]
        assert parameter.requires_grad is before[name][1]
        assert torch.equal(parameter, weights[name])
    assert not hasattr(base, "peft_config")
    again = HFEngine.from_model(base, tokenizer)
    assert largest_error(again, saved, None) <= 1e-4


def test_a_forward_that_raises_leaves_the_adapters_switched_right(
    engine: Any, base: Any, saved: Any
) -> None:
    engine.add_adapter("red", saved["red"][0])

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for adapter in (None, "red"):
        handle = base.model.register_forward_pre_hook(broken)
        [error] = answers(engine, [(SEQUENCES[0], adapter)])
        handle.remove()
        assert isinstance(error, RuntimeError)
        assert largest_error(engine, saved, "red", None) <= 1e-4


def test_loading_uses_no_random_numbers(engine: Any, saved: Any) -> None:
    before = torch.get_rng_state()
    engine.add_adapter("red", saved["red"][0])
    engine.add_adapter("blue", saved["blue"][0])
    assert torch.equal(torch.get_rng_state(), before)


def test_without_peft_the_engine_declares_no_adapters(
    base: Any, saved: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    engine = HFEngine.from_model(base, tokenizer)
    assert Capability.LORA not in engine.capabilities
    with pytest.raises(UnsupportedCapabilityError, match=r"pip install 'genlm-hf\[lora\]'"):
        engine.add_adapter("red", saved["red"][0])


def test_rows_of_adapters_cover_the_vocabulary(engine: Any, saved: Any) -> None:
    engine.add_adapter("red", saved["red"][0])
    [row] = answers(engine, [(SEQUENCES[0], "red")])
    assert row.shape == (VOCAB_SIZE,)
