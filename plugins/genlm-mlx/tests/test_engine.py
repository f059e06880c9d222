"""Loading, limits, budgets and failures of the engine."""

from __future__ import annotations

import textwrap
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import torch
from programs import run_code
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from genlm import (
    AsyncLM,
    Capability,
    EvaluationError,
    ModelLoadError,
    Query,
    TokenIdError,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm.testing import TINY_LLAMA, TinyModel, families
from genlm_mlx import forward
from genlm_mlx.engine import MLXEngine

from .conftest import Make
from .driving import largest_error, population, rows_of, used


@pytest.fixture
def engine(llama: TinyModel) -> MLXEngine:
    return MLXEngine(llama.path, dtype="float32")


def test_prefixes_are_computed_once(engine: MLXEngine, llama: TinyModel) -> None:
    prompt, before = tuple(range(3, 23)), used(engine, "tokens_computed")
    step = [(*prompt, i) for i in range(30, 40)]
    assert largest_error(engine, step, llama.logprobs) <= 1e-5
    assert used(engine, "tokens_computed") - before == 20 + 10
    assert used(engine, "kv_tokens") == 30


@pytest.mark.parametrize("slots", [0, 1, 12, 40, 150])
def test_a_budget_changes_nothing_but_the_work(slots: int, llama: TinyModel) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32
    budget = (slots + 1) * token_bytes
    engine = MLXEngine(llama.path, dtype="float32", kv_budget_bytes=budget)
    for step in population(3, 30):
        assert largest_error(engine, step, llama.logprobs) <= 1e-5
        assert used(engine, "kv_bytes_used") <= slots * token_bytes
        assert engine._choice.path.forward.storage.nbytes <= max(budget, token_bytes)
    assert (used(engine, "tokens_evicted") > 0) == (slots > 1)


def test_storage_grows_with_what_is_kept(make: Make) -> None:
    model = make("llama", {**TINY_LLAMA, "max_position_embeddings": 4096})
    engine = MLXEngine(model.path, dtype="float32")
    first = engine._choice.path.forward.storage.nbytes
    contexts = [tuple((i * j) % 290 + 3 for j in range(700)) for i in range(1, 5)]
    assert largest_error(engine, contexts, model.logprobs) <= 1e-4
    assert engine._choice.path.forward.storage.nbytes > 2 * first
    again = [(*ids, 7) for ids in contexts]
    before = used(engine, "tokens_computed")
    assert largest_error(engine, again, model.logprobs) <= 1e-4
    assert used(engine, "tokens_computed") - before == 4
    engine.clear_prefix_cache()
    assert engine._choice.path.forward.storage.nbytes == first
    assert largest_error(engine, again[:1], model.logprobs) <= 1e-4


@pytest.mark.parametrize("path", ["slot_cache", "uncached"])
def test_long_contexts_pass_in_pieces(path: str, llama: TinyModel) -> None:
    engine = MLXEngine(
        llama.path, dtype="float32", execution_path=path, max_tokens_per_batch=10
    )
    step = [tuple(range(3, 60)), tuple(range(9, 20)), (5,), (6,)]
    assert largest_error(engine, step, llama.logprobs) <= 1e-5
    assert used(engine, "forwards") >= 8


def test_logits_of_long_prompts_are_made_for_the_last_tokens_alone(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_LOGITS_AT_ONCE", 0)
    engine = MLXEngine(llama.path, dtype="float32")
    assert engine.statistics()["execution_path"] == "slot_cache"
    for step in population(4, 12):
        assert largest_error(engine, step, llama.logprobs) <= 1e-5
    # One that ends inside another, both new.
    assert largest_error(engine, [(9, 8, 7, 6, 5), (9, 8, 7)], llama.logprobs) <= 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.3), ("float16", 0.05)])
def test_half_precision_is_close(dtype: str, tolerance: float, llama: TinyModel) -> None:
    engine = MLXEngine(llama.path, dtype=dtype)
    assert engine.statistics()["execution_path"] == "slot_cache"
    for step in population(5, 6):
        rows = rows_of(engine, step)
        assert rows.dtype == torch.float32
        assert largest_error(engine, step, llama.logprobs) <= tolerance


def test_quantised_models_keep_their_rows_whatever_is_batched(make: Make) -> None:
    llama = make("llama", {**TINY_LLAMA, "intermediate_size": 64})
    model, tokenizer, config = mlx_lm.load(str(llama.path), return_config=True)
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    engine = MLXEngine.from_model(model, tokenizer, config)
    alone = MLXEngine.from_model(model, tokenizer, config, execution_path="uncached")
    assert engine.statistics()["execution_path"] == "slot_cache"
    for step in population(6, 9):
        expected = torch.cat([rows_of(alone, [ids]) for ids in step])
        torch.testing.assert_close(rows_of(engine, step), expected, rtol=0, atol=1e-4)
        assert largest_error(engine, step, llama.logprobs) > 1e-2  # it is quantised


def test_a_model_of_another_thread_is_served_once_it_is_evaluated(llama: TinyModel) -> None:
    loaded = mlx_lm.load(str(llama.path), return_config=True)
    with AsyncLM(lambda: MLXEngine.from_model(*loaded), name="mlx") as llm:
        row = llm.next_token_logprobs_sync([5, 6, 7])
    torch.testing.assert_close(row.double(), llama.logprobs([5, 6, 7]), rtol=0, atol=1e-5)


def test_tied_weights_may_have_both_names(tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, families(8)["gemma2 with capped scores"])
    read, expected = model.weights[1]
    weights = dict(read())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # as in a state_dict
    with AsyncLM(lambda: MLXEngine(model.path, dtype="float32"), name="mlx") as llm:
        llm.update_weights(weights)
        row = llm.next_token_logprobs_sync([5, 6, 7])
    torch.testing.assert_close(row.double(), expected((5, 6, 7), None), rtol=0, atol=1e-5)


def test_either_kind_of_tokenizer_is_taken(llama: TinyModel) -> None:
    model, wrapped, config = mlx_lm.load(str(llama.path), return_config=True)
    for tokenizer in (wrapped, AutoTokenizer.from_pretrained(llama.path)):
        engine = MLXEngine.from_model(model, tokenizer, config)
        assert isinstance(engine.vocabulary.tokenizer, PreTrainedTokenizerFast)
        assert engine.vocabulary.size == 300


def test_a_model_that_waits_for_its_thread_is_refused(llama: TinyModel) -> None:
    arguments: list[Any] = []

    def make_lazily() -> None:
        model, tokenizer = mlx_lm.load(str(llama.path))
        model.model.norm.weight = mx.random.normal((32,)) + 1
        arguments.extend((model, tokenizer))

    thread = threading.Thread(target=make_lazily)
    thread.start()
    thread.join()
    with pytest.raises(ModelLoadError, match=r"call mx\.eval\(model\.parameters\(\)\)"):
        MLXEngine.from_model(*arguments)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path, llama: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        MLXEngine(tmp_path / "nothing")
    with pytest.raises(ModelLoadError, match=r"mlx-lm could not load .*FileNotFoundError"):
        MLXEngine(tmp_path)
    with pytest.raises(ModelLoadError, match=r"pass a model that mlx_lm\.load returned"):
        MLXEngine.from_model("llama", None)


def test_wrong_options_are_refused(llama: TinyModel) -> None:
    for options, message in (
        ({"dtype": "int8"}, "no dtype 'int8'; use 'float32'"),
        ({"max_tokens_per_batch": 0}, "must be 1 or more"),
        ({"kv_budget_bytes": -1}, "must be 0 or more"),
        ({"execution_path": "packed"}, "choose one of 'slot_cache', 'uncached'"),
        ({"mlx_opts": {"lazy": True}}, "which the engine decides"),
        ({"mlx_opts": {"colour": "red"}}, "arguments of mlx_lm.load"),
    ):
        with pytest.raises(ValueError, match=message):
            MLXEngine(llama.path, **options)
    with pytest.raises(TypeError, match=r"^mlx_opts='x'; expected a mapping"):
        MLXEngine(llama.path, mlx_opts="x")


def test_an_execution_path_that_cannot_serve_is_refused(make: Make) -> None:
    settings = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    path = make("mamba", settings).path
    with pytest.raises(ModelLoadError, match=r"slot_cache' cannot serve .*ArraysCache"):
        MLXEngine(path, execution_path="slot_cache")
    engine = MLXEngine(path)
    assert Capability.PREFIX_CACHE not in engine.capabilities
    for call in (engine.clear_prefix_cache, lambda: engine.cache_prefix((1,), None)):
        with pytest.raises(UnsupportedCapabilityError, match="has no cache"):
            call()


def test_requests_that_the_model_cannot_answer_are_refused(engine: MLXEngine) -> None:
    with pytest.raises(TokenIdError):
        engine.submit(Query(1, (3, 320)))
    with pytest.raises(UnknownAdapterError):
        engine.submit(Query(1, (3,), "green"))
    assert engine.max_context == 64


@pytest.mark.parametrize("path", ["slot_cache", "uncached"])
def test_a_step_is_one_pass_and_has_the_oldest(path: str, llama: TinyModel) -> None:
    engine = MLXEngine(
        llama.path, dtype="float32", execution_path=path, max_tokens_per_batch=30
    )
    contexts = {i: tuple((i * j) % 290 + 3 for j in range(1, 21)) for i in range(1, 6)}
    for i, ids in contexts.items():
        engine.submit(Query(i, ids))
    engine.abort(5)
    waiting = [1, 2, 3, 4]
    while waiting:
        before = used(engine, "tokens_computed")
        for answer in engine.step():
            expected = llama.logprobs(contexts[answer.query_id])
            torch.testing.assert_close(answer.result.double(), expected, rtol=0, atol=1e-5)
            assert answer.query_id == waiting.pop(0)
        assert used(engine, "tokens_computed") - before == 20


def test_prefixes_are_kept_within_the_budget(llama: TinyModel) -> None:
    engine = MLXEngine(llama.path, dtype="float32", kv_budget_bytes=21 * 256)
    engine.cache_prefix(tuple(range(3, 13)), None)
    with pytest.raises(EvaluationError, match="does not fit"):
        engine.cache_prefix(tuple(range(30, 45)), None)
    before = used(engine, "tokens_computed")
    assert largest_error(engine, [tuple(range(3, 14))], llama.logprobs) <= 1e-5
    assert used(engine, "tokens_computed") - before == 1


def test_a_pass_that_fails_half_way_is_forgotten(
    engine: MLXEngine, llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list(population(7, 6))
    evaluate, calls = mx.eval, 0

    def fail_once(*arrays: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("[metal::malloc] out of memory")
        evaluate(*arrays)

    for number, step in enumerate(steps):
        if number == 3:
            monkeypatch.setattr(mx, "eval", fail_once)
            with pytest.raises(RuntimeError, match="out of memory"):
                rows_of(engine, step)
            assert used(engine, "kv_tokens") == 0
        assert largest_error(engine, step, llama.logprobs) <= 1e-5


def test_figures_outlive_the_engine(engine: MLXEngine) -> None:
    rows_of(engine, [(5, 6)])
    engine.close()
    figures = engine.statistics()
    assert figures["tokens_evaluated"] == 2
    assert figures["model"] == "llama"
    assert figures["execution_path"] == "slot_cache"


def test_programs_end_without_closing_their_models(llama: TinyModel) -> None:
    """Caches of MLX, one for each thread, have destructors that need the interpreter."""
    program = """
        import sys, warnings
        warnings.simplefilter("ignore")
        from genlm import AsyncLM
        from genlm_mlx.engine import MLXEngine

        def build():
            return MLXEngine(sys.argv[1], self_test=False)

        models = [AsyncLM(build) for _ in range(12)]  # each may abort the process
        for llm in models:
            llm.next_token_logprobs_sync([1, 2, 3])
    """
    run_code(textwrap.dedent(program), str(llama.path))
