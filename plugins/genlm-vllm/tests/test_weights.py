"""New weights on vLLM: adapters stay, names are compared, and a failed update ends the engine.

The conformance suite tests rows after an update.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import genlm
from genlm import AsyncLM, EngineDiedError
from genlm.testing import TinyModel, families
from genlm_vllm.conformance import TinyLlama

IDS = [5, 9, 250, 17, 80]
OPTIONS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**24}


@pytest.fixture
def llm(tiny: TinyLlama) -> Iterator[AsyncLM]:
    with AsyncLM(lambda: tiny.engine(max_num_seqs=4), name="vllm") as llm:
        yield llm


def tensors(tiny: TinyLlama, number: int) -> dict[str, torch.Tensor]:
    return dict(tiny.weights[number][0]())


def test_adapters_are_not_read_again(llm: AsyncLM, tiny: TinyLlama, tmp_path: Path) -> None:
    if not tiny.adapters:  # on a GPU
        return
    folder = shutil.copytree(tiny.adapters["red"], tmp_path / "red")
    llm.load_lora(folder, "red")
    llm.next_token_logprobs_sync(IDS, lora_name="red")
    shutil.rmtree(folder)
    llm.update_weights(tensors(tiny, 1))
    row = llm.next_token_logprobs_sync(IDS, lora_name="red")
    torch.testing.assert_close(
        row.double(), tiny.weights[1][1](tuple(IDS), "red"), atol=1e-4, rtol=0
    )


def test_vllm_can_be_used_on_the_thread_of_the_engine(llm: AsyncLM, tiny: TinyLlama) -> None:
    population = llm.population(IDS, 3)
    population.next_token_logprobs_sync()
    assert llm.statistics().engine["members_living"]

    folder = str(tiny._changed.path)

    def reload(engine: Any) -> None:
        engine.llm_engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    llm.update_weights(reload)
    assert not llm.statistics().engine["members_living"]
    expected = tiny.weights[1][1](tuple(IDS), None)
    for row in population.next_token_logprobs_sync():
        torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", ["llama with tied embeddings", "gemma2 with capped scores", "mixtral"]
)
def test_tied_embeddings_and_experts_are_replaced(name: str, tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, families(32)[name])
    read, expected = model.weights[1]
    with genlm.load_model(model.path, "vllm", engine_opts=OPTIONS) as llm:

        def check(expected: Any) -> None:
            row = llm.next_token_logprobs_sync(IDS).double()
            torch.testing.assert_close(row, expected(tuple(IDS), None), atol=1e-4, rtol=0)

        def reload(**options: Any) -> None:
            llm.update_weights(
                lambda engine: engine.llm_engine.collective_rpc(
                    "reload_weights", kwargs=options
                )
            )

        weights = dict(read())
        llm.update_weights(weights)  # a checkpoint, which has tied weights once
        check(expected)
        reload(weights_path=str(model.path))
        check(model.weights[0][1])
        reload(weights_iterator=[], is_checkpoint_format=False)  # processes no weights
        check(model.weights[0][1])
        if name != "mixtral":  # a state_dict has them twice
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
            llm.update_weights(weights)
            check(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: {f"module.{name}": value for name, value in weights.items()},
            "no module or parameter named 'module'",
        ),
        (
            lambda weights: {name: weights[name] for name in list(weights)[:-2]},
            "parameters of vLLM's model received no weights, such as",
        ),
    ],
)
def test_weights_that_do_not_fit_end_the_engine(
    llm: AsyncLM, tiny: TinyLlama, change: Any, message: str
) -> None:
    with pytest.raises(EngineDiedError, match=message):
        llm.update_weights(change(tensors(tiny, 1)))
    with pytest.raises(EngineDiedError, match=message):
        llm.next_token_logprobs_sync(IDS)


def test_weights_of_quantised_models_are_refused(tmp_path: Path) -> None:
    settings = families(head_dim=32)["llama"].settings
    model = TinyModel(
        tmp_path, {**settings, "hidden_size": 64, "head_dim": 32}, model_type="llama"
    )
    weights = load_file(model.path / "model.safetensors")
    quantise_to_int8(model.path, weights)
    options = {**OPTIONS, "dtype": "bfloat16"}  # vLLM's kernel for CPUs with AMX needs it
    with genlm.load_model(model.path, "vllm", engine_opts=options) as llm:
        row = llm.next_token_logprobs_sync(IDS)
        with pytest.raises(ValueError, match="weights of a quantised model"):
            llm.update_weights(weights)
        llm.clear_kv_cache()
        torch.testing.assert_close(llm.next_token_logprobs_sync(IDS), row, atol=1e-5, rtol=0)


def quantise_to_int8(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace a checkpoint by one with linear layers in the format of compressed-tensors."""
    tensors = {}
    for name, weight in weights.items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
