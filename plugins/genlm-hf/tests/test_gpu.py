"""What only a GPU can show: its kernels, its memory, its streams, several of them.

With `GENLM_TEST_DEVICE=cpu` those that do not need one run on the CPU, which tests the tests.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genlm import AsyncLM, GroupReduction, OutputCache, Population
from genlm_hf.engine import HFEngine

from .families import FAMILIES
from .population import Oracle, particles, unique, used
from .test_adapters import make_adapter, oracles_of
from .tiny import VOCAB_SIZE, answers, build_model, ids_of_lengths, llama_settings

DEVICE = os.environ.get("GENLM_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="needs a CUDA device"),
]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")

NAMES = ["llama", "mistral with a short window", "gpt_oss", "gptj", "bloom", "falcon", "mamba"]
CASES = [(name, torch.float32, 1e-4) for name in NAMES]
CASES += [
    (name, torch.float16, 3e-2) for name in ("llama", "gptj", "mistral with a short window")
]
CASES += [(name, torch.bfloat16, 0.3) for name in ("llama", "gptj")]


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    """Products and convolutions in float32, as the oracle's."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_cpu(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    assert all(row.device.type == DEVICE and row.dtype == torch.float32 for row in rows)
    return [row.cpu() for row in rows]


@pytest.mark.parametrize(("name", "dtype", "tolerance"), CASES)
def test_rows_of_a_population_are_those_of_the_cpu(
    name: str, dtype: torch.dtype, tolerance: float, tokenizer: Any
) -> None:
    random.seed(11)
    model = build_model(FAMILIES[name][0], **FAMILIES[name][1])
    oracle, prompt = Oracle(model), ids_of_lengths(20)[0]
    engine = HFEngine.from_model(model.to(DEVICE, dtype), tokenizer)
    for step in particles(5, 6, prompt):
        sequences = unique(step)
        assert oracle.largest_error(sequences, on_cpu(answers(engine, sequences))) <= tolerance


def test_evicted_tokens_are_computed_again(llama: Any, tokenizer: Any) -> None:
    random.seed(11)
    oracle, prompt = Oracle(llama), ids_of_lengths(20)[0]
    llama.to(DEVICE)
    size = HFEngine.from_model(llama, tokenizer)._choice.path.forward.storage.bytes_per_token
    engine = HFEngine.from_model(llama, tokenizer, kv_budget_bytes=130 * size)
    for step in particles(8, 6, prompt):
        sequences = unique(step)
        assert oracle.largest_error(sequences, on_cpu(answers(engine, sequences))) <= 1e-4
    assert used(engine, "tokens_evicted") > 0


def test_adapters_are_put_where_the_layers_are(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    base, red = Oracle(llama), Oracle(make_adapter(llama, tmp_path / "red", 1))
    engine = HFEngine.from_model(llama.to(DEVICE), tokenizer)
    engine.add_adapter("red", str(tmp_path / "red"))
    sequences = ids_of_lengths(9, 1, 23)
    rows = on_cpu(answers(engine, [(ids, name) for ids in sequences for name in (None, "red")]))
    assert base.largest_error(sequences, rows[::2]) <= 1e-4
    assert red.largest_error(sequences, rows[1::2]) <= 1e-4


def test_several_adapters_in_one_batch_give_each_its_rows_while_prefixes_fork(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    random.seed(5)
    oracles = oracles_of(llama, tmp_path)
    engine = HFEngine.from_model(llama.to(DEVICE), tokenizer)
    for name in ("red", "blue"):
        engine.add_adapter(name, str(tmp_path / name))
    for step in particles(4, 4, ids_of_lengths(9)[0]):
        sequences = unique(step)
        rows = on_cpu(answers(engine, [(ids, name) for name in oracles for ids in sequences]))
        for place, oracle in enumerate(oracles.values()):
            part = rows[place * len(sequences) : (place + 1) * len(sequences)]
            assert oracle.largest_error(sequences, part) <= 1e-4


def test_cancelled_requests_leave_the_rows_of_the_others_right(
    llama: Any, tokenizer: Any
) -> None:
    oracle = Oracle(llama)
    build = lambda: HFEngine.from_model(llama.to(DEVICE), tokenizer)  # noqa: E731
    contexts = ids_of_lengths(*[9, 23, 1, 30] * 4)

    async def run(lm: AsyncLM) -> None:
        for turn in range(4):
            sequences = [[*ids, 3 + turn] for ids in contexts]
            tasks = [asyncio.ensure_future(lm.next_token_logprobs(ids)) for ids in sequences]
            await asyncio.sleep(0)
            for task in tasks[turn % 2 :: 2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            completed = [i for i, row in enumerate(results) if isinstance(row, torch.Tensor)]
            assert len(completed) >= len(tasks) // 2
            rows = on_cpu([results[i] for i in completed])  # type: ignore[misc]
            assert oracle.largest_error([sequences[i] for i in completed], rows) <= 1e-4

    with AsyncLM(build, output_cache=OutputCache(0)) as lm:
        asyncio.run(run(lm))


class TwoLargest(GroupReduction):
    """The two largest log-probabilities of each member, computed where the rows are."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del members
        assert rows.device.type == DEVICE or rows.device.type == "cpu"
        return tuple(rows.topk(2).values[row_of.to(rows.device)].T)


async def answers_of(population: Population, device: str) -> dict[str, Any]:
    """What each method of a population returns, its arguments on a device."""
    count, size = len(population), VOCAB_SIZE
    numbers = torch.Generator().manual_seed(3)
    allowed = torch.rand(count, size, generator=numbers) < 0.5
    allowed[1] = False  # a member that may not go on
    bits = allowed.numpy()
    packed = np.zeros((count, -(-size // 32) * 4), np.uint8)
    packed[:, : -(-size // 8)] = np.packbits(bits, axis=1, bitorder="little")
    words = torch.from_numpy(packed).view(torch.int32).to(device)
    index = torch.tensor([0, 2, 2, 0, 4, 5], device=device)[:count]
    bias = torch.randn(count, size, generator=numbers).to(device)
    warm = (0.5 + torch.rand(count, generator=numbers)).to(device)
    ids = torch.randint(3, 9, (count, 3), generator=numbers)
    sampled = await population.sample(5, seed=5, stop=())
    return {
        "draw": await population.draw(seed=1),
        "draw booleans": await population.draw(allowed.to(device), seed=2),
        "draw packed": await population.draw(words, mask_index=index, seed=3),
        "draw a list": await population.draw([range(5), None] * (count // 2), seed=4),
        "draw limited": await population.draw(seed=5, top_k=7, top_p=0.8, temperature=warm),
        "draw biased": await population.draw(words, seed=6, bias=bias, temperature=0.7),
        "draw likeliest": await population.draw(temperature=0.0, bias=bias[0], seed=7),
        "several": await population.draw_without_replacement(4, words, seed=8, bias=bias),
        "mass": await population.log_mass(allowed.to(device), bias=bias[:, 0]),
        "tokens": await population.token_logprobs(ids.to(device)),
        "top": await population.top_tokens(4),
        "reduced": await population.reduce(TwoLargest()),
        "score": await population.score(ids),
        "sample": (sampled.token_ids, sampled.logprobs, sampled.population.tokens),
    }


def test_every_method_of_a_population_gives_what_it_gives_on_the_cpu(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFEngine, "smallest_group", 2)
    results = []
    for device in ("cpu", DEVICE):
        engine = HFEngine.from_model(copy.deepcopy(llama).to(device), tokenizer)
        with AsyncLM(lambda engine=engine: engine) as lm:
            population, answers_at = lm.population(ids_of_lengths(20)[0], 6), []
            for step in range(3):
                answers_at.append(asyncio.run(answers_of(population, device)))
                tokens = population.draw_sync(seed=9).token_ids.to(device)
                population = population.extend(tokens)
                population = population[torch.tensor([0, 0, 3, 2, 5, step], device=device)]
            results.append(answers_at)
    for on_host, there in zip(*results, strict=True):
        for name, expected in on_host.items():
            columns = (expected, there[name])
            if isinstance(expected, torch.Tensor):
                columns = ((expected,), (there[name],))
            for before, after in zip(*columns, strict=True):
                torch.testing.assert_close(after, before, rtol=0, atol=1e-4, msg=name)


def test_rows_of_a_population_stay_on_its_device(llama: Any, tokenizer: Any) -> None:
    oracle = Oracle(llama)
    with AsyncLM(lambda: HFEngine.from_model(llama.to(DEVICE), tokenizer)) as lm:
        for count in (1, 5, 80):
            population = lm.population(ids_of_lengths(20)[0], count)
            population = population.extend([3 + member % 7 for member in range(count)])
            rows = asyncio.run(population.next_token_logprobs())
            assert rows.device.type == DEVICE
            sequences = [context.token_ids for context in population]
            assert oracle.largest_error(sequences, list(rows.cpu())) <= 1e-4


@pytest.mark.parametrize("memory", [None, {0: 2**17, "cpu": 2**30}], ids=["fits", "offloaded"])
def test_an_automatic_device_map_changes_no_row(memory: Any, folder: Path, llama: Any) -> None:
    options: dict[str, Any] = {"device_map": "auto"}
    if memory is not None and HAS_GPU:
        options["max_memory"] = memory
    engine = HFEngine(folder, dtype="float32", hf_opts=options)
    sequences = ids_of_lengths(9, 1, 23)
    for step in (sequences, [[*ids, 5] for ids in sequences]):
        rows = [row.cpu() for row in answers(engine, step)]
        assert Oracle(llama).largest_error(step, rows) <= 1e-4


@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_quantised_models_give_the_rows_of_their_dequantised_weights(
    bits: str, save_model: Any
) -> None:
    pytest.importorskip("bitsandbytes")
    import transformers

    settings = llama_settings(hidden_size=64, intermediate_size=128)
    path = save_model(build_model("llama", **settings))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=transformers.BitsAndBytesConfig(**{bits: True}),
        dtype=torch.float32,
        device_map={"": DEVICE},
    )
    oracle = Oracle(loaded.requires_grad_(False).dequantize().float().cpu())
    engine = HFEngine(path, device=DEVICE, dtype="float32", bitsandbytes_opts={bits: True})
    for step in (ids_of_lengths(9, 1, 23), ids_of_lengths(9, 1, 23, 40)):
        assert oracle.largest_error(step, on_cpu(answers(engine, step))) <= 0.4


@needs_gpu
def test_rows_are_results_of_the_default_stream(llama: Any, tokenizer: Any) -> None:
    """Programs read them there, or on a stream that waits for it, as results of torch."""
    oracle, large = Oracle(llama), torch.randn(4096, 4096, device="cuda")
    build = lambda: HFEngine.from_model(llama.cuda(), tokenizer)  # noqa: E731
    sequences = ids_of_lengths(9, 1, 23)
    other = torch.cuda.Stream()

    async def run(lm: AsyncLM, extended: list[list[int]]) -> list[torch.Tensor]:
        return list(await asyncio.gather(*map(lm.next_token_logprobs, extended)))

    with AsyncLM(build, output_cache=OutputCache(100)) as lm:
        for turn in range(4):
            extended = [[*ids, 3 + turn] for ids in sequences]
            for _ in range(2):  # from the engine, then from the output cache
                for _ in range(20):
                    large = (large @ large).tanh()  # the default stream is busy
                rows = asyncio.run(run(lm, extended))
                other.wait_stream(torch.cuda.default_stream())
                with torch.cuda.stream(other):
                    copies = [row.to("cpu") for row in rows]
                assert oracle.largest_error(extended, copies) <= 1e-4
                assert oracle.largest_error(extended, [row.to("cpu") for row in rows]) <= 1e-4


@needs_gpu
def test_a_model_is_loaded_onto_the_gpu_and_its_memory_is_given_back(
    folder: Path, llama: Any
) -> None:
    gc.collect()  # else memory of earlier tests is given back meanwhile
    torch.cuda.empty_cache()
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
