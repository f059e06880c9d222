"""What only a GPU can show: its kernels, its memory, several of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm import AsyncLM
from genlm_hf.engine import HFEngine

from .families import FAMILIES
from .population import Oracle, particles, unique, used
from .test_adapters import make_adapter
from .tiny import answers, build_model, ids_of_lengths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ["llama", "mistral with a short window", "gpt_oss", "gptj", "bloom", "falcon", "mamba"]
CASES = [(name, torch.float32, 1e-4) for name in NAMES]
CASES += [(name, torch.float16, 3e-2) for name in ("llama", "gptj")]
CASES += [(name, torch.bfloat16, 0.3) for name in ("llama", "gptj")]


def on_cpu(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    assert all(row.is_cuda and row.dtype == torch.float32 for row in rows)
    return [row.cpu() for row in rows]


@pytest.mark.parametrize(("name", "dtype", "tolerance"), CASES)
def test_rows_of_a_population_are_those_of_the_cpu(
    name: str, dtype: torch.dtype, tolerance: float, tokenizer: Any
) -> None:
    random.seed(11)
    model = build_model(FAMILIES[name][0], **FAMILIES[name][1])
    oracle, prompt = Oracle(model), ids_of_lengths(20)[0]
    engine = HFEngine.from_model(model.to("cuda", dtype), tokenizer)
    for step in particles(5, 6, prompt):
        asked = unique(step)
        assert oracle.largest_error(asked, on_cpu(answers(engine, asked))) <= tolerance


def test_evicted_tokens_are_computed_again(llama: Any, tokenizer: Any) -> None:
    random.seed(11)
    oracle, prompt = Oracle(llama), ids_of_lengths(20)[0]
    llama.to("cuda")
    size = HFEngine.from_model(llama, tokenizer)._choice.path.forward.storage.bytes_per_token
    engine = HFEngine.from_model(llama, tokenizer, kv_budget_bytes=130 * size)
    for step in particles(8, 6, prompt):
        asked = unique(step)
        assert oracle.largest_error(asked, on_cpu(answers(engine, asked))) <= 1e-4
    assert used(engine, "tokens_evicted") > 0


def test_adapters_are_put_where_the_layers_are(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    base, red = Oracle(llama), Oracle(make_adapter(llama, tmp_path / "red", 1))
    engine = HFEngine.from_model(llama.to("cuda"), tokenizer)
    engine.add_adapter("red", str(tmp_path / "red"))
    sequences = ids_of_lengths(9, 1, 23)
    rows = on_cpu(answers(engine, [(ids, name) for ids in sequences for name in (None, "red")]))
    assert base.largest_error(sequences, rows[::2]) <= 1e-4
    assert red.largest_error(sequences, rows[1::2]) <= 1e-4


def test_a_model_is_loaded_onto_the_gpu_and_its_memory_is_given_back(
    folder: Path, llama: Any
) -> None:
    before = torch.cuda.memory_reserved()
    with AsyncLM(lambda: HFEngine(folder, dtype="float32", kv_budget_bytes=2**26)) as lm:
        assert lm.statistics().engine["device"] == "cuda:0"
        sequences = ids_of_lengths(9, 1, 23)
        rows = list(lm.batch_next_token_logprobs_sync(sequences))
        assert Oracle(llama).largest_error(sequences, on_cpu(rows)) <= 1e-4
        assert torch.cuda.memory_reserved() >= before + 2**26
        del rows
    assert torch.cuda.memory_reserved() <= before + 2**22


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_layers_on_two_gpus_give_the_rows_of_one(
    name: str, save_model: Any, tokenizer: Any
) -> None:
    model = build_model(FAMILIES[name][0], **FAMILIES[name][1])
    options = {"device_map": "balanced", "max_memory": {0: 2**20, 1: 2**30}}
    engine = HFEngine(save_model(model), dtype="float32", hf_opts=options)
    sequences = ids_of_lengths(9, 1, 23)
    for _ in range(2):
        assert (
            Oracle(model).largest_error(sequences, on_cpu(answers(engine, sequences))) <= 1e-4
        )
