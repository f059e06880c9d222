"""Steps by kernels, and from CUDA graphs, give the rows of the unbatched forward pass.

With `TRITON_INTERPRET=1` the kernels run on the CPU and steps are not captured, but run over
the same padded numbers (`test_interpreter.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from population_programs import run_population_programs

from genlm import AsyncLM
from genlm.plugin import TokenSequence
from genlm_hf.engine import HFEngine
from genlm_hf.packed import kernel_steps, step_attention, work_items
from genlm_hf.packed.attention import PackedForward

from .families import FAMILIES
from .population import Oracle, bytes_per_token, particles, unique, used
from .test_adapters import oracles_of
from .tiny import answers, build_model, ids_of_lengths, llama_settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LAYERS, FEW, MANY, STEPS = (1, 3, 6, 5) if INTERPRETED else (2, 6, 30, 6)
"""Layers of a Llama, numbers of sequences, steps: the interpreter takes a second for each."""
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1} if INTERPRETED else {}
"""Heads of the Llama in tests of what is captured and replayed."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]

SETTINGS = {
    name: FAMILIES[name]
    for name in ("llama", "mistral with a short window", "gpt_oss", "gemma2")
}
SETTINGS["three heads, one of keys"] = (
    "llama",
    llama_settings(hidden_size=36, num_attention_heads=3, num_key_value_heads=1),
)
for _name in ("llama", "mistral with a short window"):  # layers of one kind
    SETTINGS[_name] = (
        SETTINGS[_name][0],
        {**SETTINGS[_name][1], "num_hidden_layers": LAYERS},
    )


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # programs with nothing to do take as long as others
        monkeypatch.setattr(work_items, "_TARGET_ITEMS", 4)
        monkeypatch.setattr(work_items, "_MIN_TOKENS", 4)


@pytest.fixture
def llama() -> Any:
    return build_model("llama", **llama_settings(num_hidden_layers=LAYERS, **HEADS))


@pytest.fixture
def long_llama() -> Any:
    settings = llama_settings(num_hidden_layers=LAYERS, max_position_embeddings=256, **HEADS)
    return build_model("llama", **settings)


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def small_populations_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFEngine, "smallest_group", 2)


def captured(
    model: Any, tokenizer: Any, *, cuda_graphs: bool = True, **options: Any
) -> HFEngine:
    model = model.to(DEVICE)
    return HFEngine.from_model(model, tokenizer, cuda_graphs=cuda_graphs, **options)


def grown(contexts: list[list[int]]) -> list[list[int]]:
    """One more token each."""
    return [[*ids, random.randrange(3, 9)] for ids in contexts]


def rows(engine: HFEngine, requests: Any) -> list[torch.Tensor]:
    return [row.cpu() for row in answers(engine, requests)]


def follow(
    engine: HFEngine,
    oracle: Oracle,
    contexts: list[list[int]],
    steps: int,
    adapter: str | None = None,
    tolerance: float = 1e-4,
) -> list[list[int]]:
    """Check the rows of contexts that grow by a token a step; return them after the last."""
    for _ in range(steps):
        adapter_rows = rows(engine, [(ids, adapter) for ids in contexts])
        assert oracle.largest_error(contexts, adapter_rows) <= tolerance
        contexts = grown(contexts)
    return contexts


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_rows_are_those_of_single_sequences(name: str, tokenizer: Any) -> None:
    random.seed(3)
    model = build_model(SETTINGS[name][0], **SETTINGS[name][1])
    oracle = Oracle(model)
    # transformers computes experts one by one in float32, which a graph cannot contain.
    is_bfloat16 = name == "gpt_oss" and not INTERPRETED
    model = model.bfloat16() if is_bfloat16 else model
    engine = captured(model, tokenizer)
    contexts = [[*ids_of_lengths(20)[0], 3 + number] for number in range(FEW)]
    follow(engine, oracle, contexts, STEPS, tolerance=0.3 if is_bfloat16 else 1e-4)
    assert engine.statistics()["kernels_refused"] == ""
    assert engine.statistics()["graphs_refused"] == ""
    assert used(engine, "graphs_captured") >= 1
    assert used(engine, "graphs_replayed") >= 2


# The interpreter runs the same kernels for the test above, with other padding.
@pytest.mark.parametrize("name", ["gpt_oss"] if INTERPRETED else SETTINGS)
def test_rows_of_kernels_without_graphs_are_those_of_single_sequences(
    name: str, tokenizer: Any
) -> None:
    random.seed(3)
    model = build_model(SETTINGS[name][0], **SETTINGS[name][1])
    oracle = Oracle(model)
    engine = captured(model, tokenizer, cuda_graphs=False)
    contexts = [[*ids_of_lengths(20)[0], 3 + number] for number in range(FEW)]
    follow(engine, oracle, contexts, 4)
    assert engine.statistics()["kernels_refused"] == ""
    assert used(engine, "kernel_steps") >= 3
    assert "graphs_captured" not in engine.statistics()


def test_a_population_that_grows_is_captured_once(long_llama: Any, tokenizer: Any) -> None:
    random.seed(6)
    oracle, engine = Oracle(long_llama), captured(long_llama, tokenizer)
    contexts = [[*ids_of_lengths(40)[0], 3 + number] for number in range(FEW)]
    for _ in range(3):
        contexts = follow(engine, oracle, contexts, 4)
        contexts = [[*ids, *random.choices(range(3, 9), k=30)] for ids in contexts]
    assert used(engine, "graphs_captured") == 1
    assert used(engine, "graphs_replayed") >= 4


def test_more_numbers_than_there_is_room_for_are_captured_again(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_attention, "_INITIAL_NUMBERS", 2)
    random.seed(7)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    for count in (3, MANY):
        contexts = [[*ids_of_lengths(9)[0], 3 + number] for number in range(count)]
        follow(engine, oracle, contexts, 4)
    follow(engine, oracle, [[*ids_of_lengths(9)[0], 3, number] for number in range(3, 6)], 4)
    assert used(engine, "graphs_captured") >= 3
    assert used(engine, "graphs_replayed") >= 3


def test_populations_that_fork_share_one_graph_for_several_shapes(
    llama: Any, tokenizer: Any
) -> None:
    random.seed(11)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    for step in particles(12, 5, ids_of_lengths(20)[0]):
        sequences = unique(step)
        assert oracle.largest_error(sequences, rows(engine, sequences)) <= 1e-4
    assert used(engine, "graphs_replayed") > used(engine, "graphs_captured") >= 1


def test_members_of_a_population_have_the_rows_of_their_sequences(
    llama: Any, tokenizer: Any
) -> None:
    random.seed(12)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    with AsyncLM(lambda: engine) as lm:
        population = lm.population(ids_of_lengths(20)[0], FEW)
        for _ in range(8):
            population = population.extend(random.choices(range(3, 9), k=FEW))
            logprobs = asyncio.run(population.next_token_logprobs()).cpu()
            sequences = [context.token_ids for context in population]
            assert oracle.largest_error(sequences, list(logprobs)) <= 1e-4
        assert used(engine, "graphs_replayed") >= 2


@pytest.mark.parametrize("name", ["llama", "mistral with a short window", "gemma2"])
def test_random_programs_of_populations(name: str, tokenizer: Any) -> None:
    model = build_model(SETTINGS[name][0], **SETTINGS[name][1])
    oracle = Oracle(model)
    engine = captured(model, tokenizer)
    with AsyncLM(lambda: engine) as lm:
        run_population_programs(
            lm, oracle.row, programs=2, steps=10, tolerance=2e-4, max_length=14
        )
    assert used(engine, "graphs_replayed") >= 5


def test_several_prompts_are_several_shared_prefixes(long_llama: Any, tokenizer: Any) -> None:
    random.seed(5)
    oracle, engine = Oracle(long_llama), captured(long_llama, tokenizer)
    prompts = ids_of_lengths(150, 170)
    contexts = [[*prompt, 3 + number] for prompt in prompts for number in range(FEW)]
    follow(engine, oracle, contexts, 5)
    assert used(engine, "graphs_replayed") >= 2


def test_evicted_tokens_are_computed_again(llama: Any, tokenizer: Any) -> None:
    random.seed(11)
    oracle = Oracle(llama)
    budget = 55 * bytes_per_token(llama, tokenizer, "packed")
    engine = captured(llama, tokenizer, kv_budget_bytes=budget)
    populations = [
        [[*prompt, 3 + number] for number in range(3)] for prompt in ids_of_lengths(20, 22)
    ]
    for turn in range(4):
        populations[turn % 2] = follow(engine, oracle, populations[turn % 2], 4)
    assert used(engine, "tokens_evicted") > 0
    assert used(engine, "graphs_replayed") > 0


def test_each_adapter_has_graphs_and_a_replaced_one_has_new_ones(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    random.seed(5)
    oracles = oracles_of(llama, tmp_path)
    engine = captured(llama, tokenizer)
    engine.add_adapter("red", str(tmp_path / "red"))
    contexts = [[*ids_of_lengths(9)[0], 3 + number] for number in range(3)]

    def check(oracle: Oracle, adapter: str | None) -> None:
        nonlocal contexts
        before = used(engine, "graphs_replayed")
        contexts = follow(engine, oracle, contexts, 4, adapter)
        assert used(engine, "graphs_replayed") > before

    for name in (None, "red"):
        check(oracles[name], name)
    engine.remove_adapter("red")
    engine.add_adapter("red", str(tmp_path / "blue"))
    check(oracles["blue"], "red")


def test_graphs_read_weights_that_change_in_place_and_are_dropped_if_they_move(
    llama: Any, tokenizer: Any
) -> None:
    random.seed(5)
    engine = captured(llama, tokenizer)
    contexts = [[*ids_of_lengths(9)[0], 3 + number] for number in range(3)]
    contexts = follow(engine, Oracle(llama), contexts, 4)
    before = used(engine, "graphs_captured")
    assert before > 0
    with torch.no_grad():
        llama.lm_head.weight.mul_(0.5)
    contexts = follow(engine, Oracle(llama), contexts, 2)
    assert used(engine, "graphs_captured") == before
    llama.lm_head.weight.data = 3 * llama.lm_head.weight.data
    follow(engine, Oracle(llama), contexts, 4)
    assert used(engine, "graphs_captured") > before


def test_graphs_are_dropped_if_the_caller_switches_adapters(llama: Any, tokenizer: Any) -> None:
    random.seed(5)
    model = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj"]), "red")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    engine = captured(model.eval(), tokenizer)
    contexts = [[*ids_of_lengths(9)[0], 3 + number] for number in range(3)]
    contexts = follow(engine, Oracle(model), contexts, 3)
    before = used(engine, "graphs_captured")
    assert before > 0
    model.base_model.disable_adapter_layers()
    follow(engine, Oracle(model), contexts, 3)
    assert used(engine, "graphs_captured") > before


def test_passes_of_more_results_than_before_replace_the_memory_of_logits(
    llama: Any, tokenizer: Any
) -> None:
    random.seed(2)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    prompt = ids_of_lengths(9)[0]
    for count in (2, MANY, 2):
        follow(engine, oracle, [[*prompt, 3 + number] for number in range(count)], 4)
    assert used(engine, "graphs_captured") >= 3


def test_sequences_that_are_requested_several_times_have_their_rows(
    llama: Any, tokenizer: Any
) -> None:
    random.seed(4)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    contexts = [[*ids_of_lengths(9)[0], 3 + number] for number in range(3)]
    for _ in range(5):
        contexts = grown(contexts)
        repeated = contexts * 4
        logprobs = engine._choice.path.rows(None, list(map(TokenSequence.of, repeated)))
        assert oracle.largest_error(repeated, list(logprobs.cpu())) <= 1e-4


def test_a_graph_with_wrong_rows_never_answers(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    right = kernel_steps.work_items

    def wrong(plan: Any, tile: int) -> Any:
        items = right(plan, tile)
        items.slots[:] = items.slots[::-1].copy()
        return items

    monkeypatch.setattr(kernel_steps, "work_items", wrong)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    contexts = [[*ids_of_lengths(20)[0], 3 + number] for number in range(5)]
    follow(engine, oracle, contexts, 5)
    assert used(engine, "graphs_replayed") == 0
    assert "differed by" in str(engine.statistics()["kernels_refused"])
    assert "runs steps without kernels and CUDA graphs" in caplog.text


@pytest.mark.parametrize("kernels_fail", [False, True])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_what_was_not_verified_because_of_an_error_is_verified_later(
    cuda_graphs: bool,
    kernels_fail: bool,
    llama: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle = Oracle(llama)
    engine = captured(llama, tokenizer, cuda_graphs=cuda_graphs)
    contexts = [[*ids_of_lengths(20)[0], 3 + number] for number in range(3)]
    # The prompt, then, before a graph is captured, a step without it.
    contexts = follow(engine, oracle, contexts, 1 + cuda_graphs)
    passes, right, attention = 0, PackedForward._logits, kernel_steps.step_attention

    def attend(*args: Any) -> torch.Tensor:
        if kernels_fail and passes == 0:
            raise torch.OutOfMemoryError
        return attention(*args)

    def failing_once(self: Any, plan: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise torch.OutOfMemoryError
        return right(self, plan)

    monkeypatch.setattr(PackedForward, "_logits", failing_once)
    monkeypatch.setattr(kernel_steps, "step_attention", attend)
    follow(engine, oracle, contexts, 1)
    assert passes > 1
    refused = [engine.statistics().get(f"{kind}_refused", "") for kind in ("kernels", "graphs")]
    assert refused == ["", ""]


def test_what_capturing_raises_is_logged_and_the_engine_goes_on(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(kernel_steps, "step_attention", broken)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    contexts = [[*ids_of_lengths(20)[0], 3 + number] for number in range(5)]
    follow(engine, oracle, contexts, 4)
    assert used(engine, "graphs_captured") == 0
    assert "not permitted" in caplog.text


def test_a_step_that_cannot_be_captured_runs_by_kernels(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(kernel_steps.KernelSteps, "_capture_graph", broken)
    random.seed(3)
    oracle, engine = Oracle(llama), captured(llama, tokenizer)
    contexts = [[*ids_of_lengths(20)[0], 3 + number] for number in range(5)]
    follow(engine, oracle, contexts, 5)
    assert used(engine, "graphs_captured") == used(engine, "graphs_replayed") == 0
    assert used(engine, "kernel_steps") >= 3
    assert engine.statistics()["kernels_refused"] == ""
    assert "not permitted" in str(engine.statistics()["graphs_refused"])
    assert "runs steps without CUDA graphs" in caplog.text
