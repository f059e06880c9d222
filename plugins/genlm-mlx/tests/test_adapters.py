"""Adapters that mlx-lm and peft have written, against weights merged by hand."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import torch
import transformers
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from genlm import AdapterError, Query, UnknownAdapterError
from genlm.testing import TINY_VOCABULARY, TinyModel
from genlm_mlx.engine import MLXEngine

from .driving import largest_error, population, rows_of

LORA = {"rank": 3, "scale": 2.0, "dropout": 0.5, "keys": ["self_attn.q_proj", "mlp.down_proj"]}


@pytest.fixture
def engine(llama: TinyModel) -> MLXEngine:
    return MLXEngine(llama.path, dtype="float32")


@pytest.fixture
def write(llama: TinyModel, tmp_path: Path) -> Callable[..., Path]:
    """Write an adapter in mlx-lm's format, with random weights."""

    def adapter(name: str, *, layers: int = 2, kind: str = "lora", **changed: Any) -> Path:
        parameters = LORA | changed
        model, _ = mlx_lm.load(str(llama.path))
        linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
        mx.random.seed(len(name))
        weights = {
            path: mx.random.normal(array.shape) * 0.3 if "lora_" in path else array
            for path, array in tree_flatten(model.parameters())
            if path.rpartition(".")[2] in {"lora_a", "lora_b", "m"}
        }
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
        settings = {
            "fine_tune_type": kind,
            "num_layers": layers,
            "lora_parameters": parameters,
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return folder

    return adapter


def merged(llama: TinyModel, folder: Path) -> Callable[[Any], torch.Tensor]:
    """transformers' rows with the adapter's products added to its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.path, dtype=torch.float32)
    weights = loaded(folder / "adapters.safetensors")
    scale = json.loads((folder / "adapter_config.json").read_text())["lora_parameters"]["scale"]
    with torch.no_grad():
        for path in {key.rpartition(".")[0] for key in weights}:
            down, up = (np.array(weights[f"{path}.lora_{matrix}"]) for matrix in "ab")
            change = scale * torch.from_numpy(down @ up).T
            model.get_submodule(path).weight += change

    def logprobs(token_ids: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits
        return logits[0, -1, :TINY_VOCABULARY].double().log_softmax(-1)

    return logprobs


def test_adapters_of_different_layouts_mix_in_a_batch(
    engine: MLXEngine, llama: TinyModel, write: Callable[..., Path]
) -> None:
    folders = {
        "both": write("both"),
        "last": write("last", layers=1, rank=5, keys=["self_attn.v_proj"]),
    }
    oracles = {name: merged(llama, folder) for name, folder in folders.items()}
    for name, folder in folders.items():
        engine.add_adapter(name, str(folder))
    engine.add_adapter("red", llama.adapters["red"])  # peft's
    assert engine.adapters == ("both", "last", "red")
    oracles |= {"red": lambda ids: llama.logprobs(ids, "red"), "base": llama.logprobs}
    names = [*oracles]
    for step in population(8, 6):
        requests = [(ids, names[i % 4]) for i, ids in enumerate(step)]
        for i, (ids, name) in enumerate(requests):
            engine.submit(Query(i, ids, None if name == "base" else name))
        answers: list[Any] = []
        while len(answers) < len(requests):
            answers += engine.step()
        for answer in answers:
            ids, name = requests[answer.query_id]
            row = answer.result.double()
            torch.testing.assert_close(row, oracles[name](ids), rtol=0, atol=1e-4)


def test_a_removed_adapter_leaves_the_base_model_and_can_be_loaded_again(
    engine: MLXEngine, llama: TinyModel
) -> None:
    for folder in (llama.adapters["red"], llama.adapters["blue"]):
        engine.add_adapter("one", folder)
        engine.remove_adapter("one")
        with pytest.raises(UnknownAdapterError):
            engine.remove_adapter("one")
        assert engine.adapters == ()
        engine.submit(Query(0, (3, 1, 4)))
        [answer] = engine.step()
        expected = llama.logprobs((3, 1, 4))
        torch.testing.assert_close(answer.result.double(), expected, rtol=0, atol=1e-4)


def test_loading_an_adapter_leaves_no_random_keys_to_compute(
    engine: MLXEngine, llama: TinyModel, write: Callable[..., Path]
) -> None:
    mx.eval(mx.random.state)
    for name, folder in (("red", llama.adapters["red"]), ("both", write("both"))):
        engine.add_adapter(name, str(folder))
        graph = io.StringIO()
        mx.export_to_dot(graph, *mx.random.state)
        assert "Random" not in graph.getvalue()


def test_weights_of_dora_are_served_as_mlx_lm_does(
    engine: MLXEngine, llama: TinyModel, write: Callable[..., Path]
) -> None:
    folder = write("dora", kind="dora", scale=1.0)
    engine.add_adapter("dora", str(folder))
    loaded = mlx_lm.load(str(llama.path), adapter_path=str(folder), return_config=True)
    alone = MLXEngine.from_model(*loaded, execution_path="uncached")
    step = [(5, 6, 7), (8, 9)]
    expected = rows_of(alone, step)
    torch.testing.assert_close(rows_of(engine, step, "dora"), expected, rtol=0, atol=1e-4)
    assert largest_error(engine, step, llama.logprobs) <= 1e-5


def change_settings(folder: Path, **changed: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def loaded(file: Path) -> dict[str, mx.array]:
    """Arrays of a file, read at once, so that the file can be replaced."""
    weights = mx.load(str(file))
    mx.eval(weights)
    return weights


def test_what_does_not_fit_leaves_the_engine_as_it_was(
    engine: MLXEngine, llama: TinyModel, write: Callable[..., Path], tmp_path: Path
) -> None:
    wide = write("wide")
    weights = loaded(wide / "adapters.safetensors")
    weights = {path: mx.concatenate([array, array]) for path, array in weights.items()}
    mx.save_safetensors(str(wide / "adapters.safetensors"), weights)
    deeper = write("deeper")
    weights = loaded(deeper / "adapters.safetensors")
    weights = {path.replace("layers.1", "layers.7"): weight for path, weight in weights.items()}
    mx.save_safetensors(str(deeper / "adapters.safetensors"), weights)
    partial = write("partial")
    weights = loaded(partial / "adapters.safetensors")
    weights.pop("model.layers.1.mlp.down_proj.lora_a")
    mx.save_safetensors(str(partial / "adapters.safetensors"), weights)
    full, broken, unset = write("full"), write("broken"), write("unset")
    (unset / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    change_settings(full, fine_tune_type="full")
    (broken / "adapter_config.json").write_text("{")
    dora, other, elsewhere = tmp_path / "peft", tmp_path / "other", tmp_path / "elsewhere"
    cut = tmp_path / "cut"
    ranks = tmp_path / "ranks"
    for copy in (dora, other, elsewhere, cut, ranks):
        shutil.copytree(llama.adapters["red"], copy)
    (cut / "adapter_model.safetensors").write_bytes(b"x" * 20)
    change_settings(dora, use_dora=True)
    change_settings(other, peft_type="IA3")
    change_settings(ranks, r=6)
    peft_weights = loaded(elsewhere / "adapter_model.safetensors")
    moved = {key.replace("layers.1", "layers.7"): array for key, array in peft_weights.items()}
    mx.save_safetensors(str(elsewhere / "adapter_model.safetensors"), moved)
    for folder, message in (
        (wide, "does not fit the model"),
        (deeper, "no such adapter layer"),
        (partial, "it has no weights 'model.layers.1.mlp.down_proj.lora_a'"),
        (unset, "has no setting 'num_layers'"),
        (full, "fine_tune_type 'full'"),
        (broken, "cannot be read"),
        (dora, "use_dora=True"),
        (other, "of type IA3"),
        (elsewhere, "has no such layer"),
        (cut, "MLX cannot read"),
        (ranks, "which do not fit r=6"),
        (tmp_path, "not a folder with adapter_config.json"),
    ):
        with pytest.raises(AdapterError, match=message):
            engine.add_adapter("new", str(folder))
        assert engine.adapters == ()
        assert largest_error(engine, [(5, 6, 7)], llama.logprobs) <= 1e-5
    engine.add_adapter("new", llama.adapters["red"])
    with pytest.raises(AdapterError, match="loaded already"):
        engine.add_adapter("new", llama.adapters["blue"])
