"""Populations on block tables against unbatched forward passes without a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from population_programs import run_population_programs

import genlm
from genlm import AsyncLM
from genlm.core.model.population import Population
from genlm_hf.engine import HFEngine
from genlm_hf.packed import plan

from .families import FAMILIES
from .population import Oracle, bytes_per_token, used
from .test_adapters import make_adapter
from .test_cached import MODELS
from .tiny import build_model, ids_of_lengths, llama_settings

CASES = {**MODELS} | {name: FAMILIES[name] for name in ("gpt_oss", "gemma2 with capped scores")}
OWN_ATTENTION = ("gptj", "bloom", "falcon with grouped heads", "gpt_neo")


@pytest.fixture(autouse=True)
def small_populations_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFEngine, "smallest_group", 2)


def serve(
    model: Any, tokenizer: Any, slots: int | None = None, path: str = "packed"
) -> HFEngine:
    budget = None if slots is None else slots * bytes_per_token(model, tokenizer, path)
    options: Any = {"execution_path": path, "self_test": False, "kv_budget_bytes": budget}
    return HFEngine.from_model(model, tokenizer, **options)


@pytest.mark.parametrize("slots", [None, 130, 40])
@pytest.mark.parametrize("name", [*CASES, *OWN_ATTENTION])
def test_members_have_the_rows_of_their_sequences(
    name: str, slots: int | None, tokenizer: Any
) -> None:
    torch.manual_seed(5)
    model_type, settings = CASES.get(name) or FAMILIES[name]
    model = build_model(model_type, **settings)
    path = "slot_cache" if name in OWN_ATTENTION else "packed"
    engine = serve(model, tokenizer, slots, path)
    with AsyncLM(lambda: engine) as lm:
        run_population_programs(lm, Oracle(model).row)
        assert used(engine, "kv_bytes_used") <= used(engine, "kv_budget_bytes")


@pytest.mark.parametrize("name", ["grouped heads", "a window of 4 tokens", "gpt_oss"])
def test_members_that_are_divided_into_small_clusters_have_the_same_rows(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_GROUP_COST", 0)
    torch.manual_seed(6)
    model = build_model(CASES[name][0], **CASES[name][1])
    with AsyncLM(lambda: serve(model, tokenizer)) as lm:
        run_population_programs(lm, Oracle(model).row)


def test_members_have_the_rows_of_their_adapter(
    llama: Any, tokenizer: Any, tmp_path: Any
) -> None:
    make_adapter(llama, tmp_path, 1)
    with AsyncLM(lambda: HFEngine.from_model(llama, tokenizer)) as lm:
        lm.load_lora(str(tmp_path), "one")
        prompt = ids_of_lengths(12)[0]
        pairs = [lm.population(prompt, 3), lm.population(prompt, 3, lora_name="one")]
        for step in range(3):
            pairs = [population.extend([3, 4, 5 + step]) for population in pairs]
            for population in pairs:
                rows = asyncio.run(population.next_token_logprobs())
                listed = lm.batch_next_token_logprobs_sync(list(population))
                torch.testing.assert_close(rows, listed, rtol=0, atol=1e-4)


def test_concurrent_populations_share_passes(llama: Any, tokenizer: Any) -> None:
    oracle, engine = Oracle(llama), serve(llama, tokenizer)
    with AsyncLM(lambda: engine) as llm:

        async def step(populations: list[Population]) -> None:
            before = llm.statistics().engine["forwards"]
            requests = [population.next_token_logprobs() for population in populations]
            results = await asyncio.gather(*requests)
            assert llm.statistics().engine["forwards"] == before + 1
            for population, rows in zip(populations, results, strict=True):
                sequences = [context.token_ids for context in population]
                assert oracle.largest_error(sequences, list(rows)) <= 1e-4

        async def grow() -> None:
            populations = [llm.population([3, 4, i], 2 + i % 3) for i in range(5, 12)]
            await step(populations)
            for _ in range(3):
                populations = [
                    population.extend(torch.randint(3, 9, (len(population),)))
                    for population in populations
                ]
                await step(populations)

        asyncio.run(grow())


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "mpt"])
def test_padding_of_members_never_reaches_beyond_the_positions_that_a_model_has(
    name: str, tokenizer: Any
) -> None:
    model_type, options = FAMILIES[name]
    longest = "max_seq_len" if name == "mpt" else "max_position_embeddings"
    model = build_model(model_type, **options | {longest: 64})
    with AsyncLM(lambda: serve(model, tokenizer, path="slot_cache")) as lm:
        population = lm.population(ids_of_lengths(59, 3, 33))
        population.next_token_logprobs_sync()
        for token in (3, 4):
            population = population.extend([token] * 3)
            rows = asyncio.run(population.next_token_logprobs())
            sequences = [context.token_ids for context in population]
            assert Oracle(model).largest_error(sequences, list(rows)) <= 1e-4


def test_steps_from_an_empty_cache_have_equal_bits(tokenizer: Any) -> None:
    """A lossless compressor decodes with the rows with which it has encoded."""
    torch.manual_seed(7)
    model = build_model("llama", **llama_settings(hidden_size=64, intermediate_size=96))
    prompt = ids_of_lengths(19)[0]
    texts = torch.randint(3, 9, (5, 6))
    with AsyncLM(lambda: serve(model, tokenizer)) as lm:

        def rows_of_texts() -> torch.Tensor:
            lm.clear_kv_cache()
            population, rows = lm.population(prompt, len(texts)), []
            for token_ids in texts.T:
                rows.append(population.next_token_logprobs_sync())
                population = population.extend(token_ids)
            return torch.stack(rows)

        rows = rows_of_texts()
        lm.population([prompt[:7], prompt, [3]]).sample_sync(4, seed=1)
        assert torch.equal(rows_of_texts(), rows)


class Highest(genlm.Reduction):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> list[Any]:
        return [(highest, [0, highest]) for highest in rows.amax(1).tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_changes_no_result(tokenizer: Any, dtype: Any) -> None:
    ids, _ = ids_of_lengths(9, 5)
    model = build_model("llama", **llama_settings())

    def results() -> list[Any]:
        with genlm.load_model(model, "hf", tokenizer=tokenizer) as llm:
            assert "packed" in llm.statistics().engine["execution_path"]
            tensors = [llm.score_sync(ids), llm.next_token_logprobs_sync(ids)]
            for count in (1, 4):  # separate sequences, and a population as arrays
                population = llm.population(ids, count)
                limits = [3, 0, 2, 3][:count]
                sampled = population.sample_sync(limits, stop=(), temperature=0.7, seed=1)
                tensors += [sampled.logprobs, sampled.draw_logprob]
                tensors += [population.score_sync(sampled.token_ids)]
                tensors += [population.reduce_sync(Highest())]
            return tensors

    expected, default = results(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = results()
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
