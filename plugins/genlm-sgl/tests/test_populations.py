"""Populations on block tables: rows under forks, eviction and failures, and no leaked slots.

Each test runs on three engines: with room for all, with three rows of SGLang's table of slots,
and with a KV cache of 110 tokens, in which a population evicts others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from population_programs import run_population_programs
from serving_populations import PROMPT, check

import genlm
from genlm.plugin import GroupReduction
from genlm_sgl.conformance import TinyLlama

from .particles import served, slots_used

ENGINES: dict[str, dict[str, Any]] = {
    "room for all": {"max_total_tokens": 4096},
    "three rows": {"max_running_requests": 3},
    "few slots": {"max_total_tokens": 110, "chunked_prefill_size": 16},
}


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[genlm.AsyncLM]:
    with served(tiny, **ENGINES[request.param]) as llm:
        yield llm


@pytest.fixture
def no_slot_leaks(llm: genlm.AsyncLM) -> Iterator[None]:
    yield
    assert slots_used(llm) == 0


# -- rows -----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_slot_leaks")
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_on_populations(llm: genlm.AsyncLM, tiny: TinyLlama, seed: int) -> None:
    run_population_programs(llm, tiny.logprobs, seed=seed, steps=15, adapters=(None, "red"))


@pytest.mark.usefixtures("no_slot_leaks")
def test_several_prompts_of_which_one_begins_with_another(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    prompts = [PROMPT[:length] for length in (3, 4, 12, 20, 1)]
    population = llm.population(prompts).extend([6, 9, 9, -1, 4])
    for _ in range(3):
        check(tiny, population, population.next_token_logprobs_sync())
        population = population.extend([3, 3, 4, 5, 6])


# -- ends and failures ----------------------------------------------------------------


@pytest.mark.usefixtures("no_slot_leaks")
def test_threads_use_populations_of_one_engine(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    failures: list[BaseException] = []

    def program(seed: int) -> None:
        try:
            population = llm.population(PROMPT[: 10 + seed], 4)
            for step in range(5):
                drawn = population.draw_sync(seed=step)
                population = population.extend(drawn.token_ids)[[0, 1, 1, 3]]
            check(tiny, population, population.next_token_logprobs_sync())
        except BaseException as error:  # noqa: BLE001 - asserted below
            failures.append(error)

    threads = [threading.Thread(target=program, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Broken(GroupReduction):
    """Raises for the member `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def compute(self, rows: Any, row_of: Any, members: Any) -> tuple[torch.Tensor, ...]:
        if self.at in members.tolist():
            raise ArithmeticError("broken")
        return (rows[row_of, 0],)


@pytest.mark.usefixtures("no_slot_leaks")
def test_a_reduction_that_raises_fails_its_own_query(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    async def together() -> None:
        population = llm.population(PROMPT, 4)
        for _ in range(2):  # through the tree, then from the table
            population = population.extend([3, 4, 5, 6])
            failed, rows = await asyncio.gather(
                population.reduce(Broken(2)),
                population.next_token_logprobs(),
                return_exceptions=True,
            )
            assert isinstance(failed, genlm.PopulationError)
            assert 2 in failed.members
            check(tiny, population, rows)

    asyncio.run(together())


def broken(*_arguments: Any, **_options: Any) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.usefixtures("no_slot_leaks")
@pytest.mark.parametrize("beside", [False, True])
def test_a_pass_that_raises_loses_no_population(
    llm: genlm.AsyncLM, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    engine: Any = llm.engine
    population = llm.population(PROMPT, 5)
    population.draw_sync(seed=0)
    population = population.extend([3, 4, 5, 3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "forward", broken)
        if beside:
            with pytest.raises(RuntimeError, match="out of memory"):
                llm.next_token_logprobs_sync([3, 4])
        with pytest.raises(genlm.PopulationError, match="out of memory"):
            population.draw_sync(seed=1)
    for _ in range(2):
        check(tiny, population, population.next_token_logprobs_sync())


@pytest.mark.usefixtures("no_slot_leaks")
def test_a_removed_adapter_takes_its_tables_along(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    population = llm.population(PROMPT, 3, lora_name="blue").extend([3, 4, 5])
    check(tiny, population, population.next_token_logprobs_sync(), "blue")
    llm.unload_lora("blue")
    with pytest.raises(genlm.UnknownAdapterError):
        population.draw_sync(seed=0)
    llm.load_lora(tiny.adapters["blue"], "blue")
    again = llm.population(PROMPT, 3, lora_name="blue").extend([3, 4, 5])
    check(tiny, again, again.next_token_logprobs_sync(), "blue")
