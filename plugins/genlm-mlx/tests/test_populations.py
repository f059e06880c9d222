"""Populations on block tables against transformers' unbatched, uncached forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from architecture_tables import read_table
from population_programs import run_population_programs

from genlm import AsyncLM, OutputCache, PopulationError
from genlm.prefix import PrefixRows, TokenBatch, padding
from genlm.testing import TINY_LLAMA, TinyModel, families
from genlm_mlx import storage
from genlm_mlx.engine import MLXEngine

from .conftest import Make, family_parameters
from .driving import largest_error

TABLE = read_table("mlx")
SERVED = {
    name: family
    for name, family in families(16).items()
    if family.representative and TABLE[name].path == "slot_cache"
}


class Counted:
    """Counts the passes over block tables, and the sequences whose pasts were gathered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        self.gathered: list[int] = []
        compute, gather = PrefixRows.group_logits, storage.KVStorage.gather

        def counted_tokens(instance: Any, parts: Any) -> torch.Tensor | None:
            before = instance._tokens_computed
            logits = compute(instance, parts)
            if logits is not None:
                self.tokens.append(instance._tokens_computed - before)
            return logits

        def counted_gather(instance: Any, layer: int, rows: mx.array) -> list[mx.array]:
            self.gathered.append(rows.shape[0])
            return gather(instance, layer, rows)

        monkeypatch.setattr(PrefixRows, "group_logits", counted_tokens)
        monkeypatch.setattr(storage.KVStorage, "gather", counted_gather)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture(autouse=True)
def small_populations_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MLXEngine, "smallest_group", 2)


def serve(model: TinyModel, slots: int | None = None, **options: Any) -> MLXEngine:
    engine = MLXEngine(model.path, dtype="float32", **options)
    if slots is not None:
        size = sum(
            layer.bytes_per_token for layer in engine._choice.path.forward.storage.layers
        )  # type: ignore[union-attr]
        engine = MLXEngine(model.path, dtype="float32", kv_budget_bytes=slots * size, **options)
    assert engine._choice.name == "slot_cache"
    return engine


@pytest.mark.usefixtures("eager_sharing")
@pytest.mark.parametrize("slots", [None, 130, 40])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_members_have_the_rows_of_their_sequences(
    name: str, slots: int | None, tmp_path: Path, counted: Counted
) -> None:
    model = TinyModel.of(tmp_path, families()[name])
    engine = serve(model, slots)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        run_population_programs(lm, model.logprobs, max_length=40)
        assert counted.tokens
        used = engine.statistics()
        assert int(used["kv_bytes_used"]) <= int(used["kv_budget_bytes"])


@pytest.mark.usefixtures("eager_sharing")
@pytest.mark.parametrize("name", family_parameters(SERVED))
def test_families_with_a_prefix_tree_have_right_populations(
    name: str, tmp_path: Path, counted: Counted
) -> None:
    model = TinyModel.of(tmp_path, SERVED[name])
    with AsyncLM(lambda: serve(model), output_cache=OutputCache(0)) as lm:
        run_population_programs(
            lm,
            model.logprobs,
            programs=2,
            steps=6,
            tolerance=max(1e-4, TABLE[name].bound or 0),
            max_length=16,
        )
        assert counted.tokens


@pytest.mark.usefixtures("eager_sharing")
@pytest.mark.parametrize("gathered", [1, 50])
def test_passes_that_gather_little_have_the_same_rows(
    gathered: int, llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding, "_GATHERED_AT_ONCE", gathered)
    with AsyncLM(lambda: serve(llama), output_cache=OutputCache(0)) as lm:
        run_population_programs(lm, llama.logprobs)


def test_a_population_that_is_extended_and_resampled_is_gathered_once(
    llama: TinyModel, counted: Counted
) -> None:
    generator = np.random.default_rng(0)
    with AsyncLM(lambda: serve(llama), output_cache=OutputCache(0)) as lm:
        population = lm.population(tuple(range(3, 20)), 5)
        for step in range(10):
            population = population.extend(generator.integers(3, 300, 5))
            rows = population.next_token_logprobs_sync()
            expected = torch.stack(
                [llama.logprobs(context.token_ids) for context in population]
            )
            torch.testing.assert_close(rows.double(), expected.double(), rtol=0, atol=1e-4)
            if step % 3 == 2:  # some of them twice, some not at all, in another order
                population = population[generator.integers(0, 5, 5)]
            if step == 0:  # from the prompt's slots, which are in no batch of five
                counted.gathered.clear()
        assert counted.gathered == []
        assert counted.tokens == [5] * 9  # the first step is computed through the tree


def test_adapters_have_tables_of_their_own(llama: TinyModel) -> None:
    with AsyncLM(lambda: serve(llama), output_cache=OutputCache(0)) as lm:
        for name in ("red", "blue"):
            lm.load_lora(llama.adapters[name], name)
        run_population_programs(lm, llama.logprobs, adapters=(None, "red", "blue"))


def table(trunk: list[int], slots: list[list[int]], **columns: list[int]) -> TokenBatch:
    arrays: dict[str, Any] = {name: np.array(values) for name, values in columns.items()}
    arrays |= {"trunk": np.array(trunk, np.int64), "slots": np.array(slots, np.int32)}
    return TokenBatch(adapter=None, **arrays)


def one_row(
    trunk: list[int], slots: list[int], tokens: list[int], *, again: bool = False
) -> TokenBatch:
    """The last tokens of a row: new ones, or the very last one computed again."""
    count = len(tokens)
    end = len(trunk) + len(slots)
    return table(
        trunk,
        [slots],
        tokens=tokens,
        positions=list(range(end - count, end)),
        writes=[0] if again else slots[-count:],
        rows=[0] * count,
        results=[count - 1],
    )


def assert_row(logits: torch.Tensor, expected: torch.Tensor) -> None:
    row = logits[:300].log_softmax(-1)
    torch.testing.assert_close(row.double(), expected.double(), rtol=0, atol=1e-4)


def test_a_slot_that_has_another_token_in_the_same_pass_is_not_taken_for_the_old_one(
    llama: TinyModel,
) -> None:
    """Slot 3 ended a sequence whose past is resident; it is allocated again, and continued."""
    run = serve(llama)._choice.path.forward  # type: ignore[union-attr]
    run(one_row([], [1], [5]))
    run(one_row([1], [2], [6]))
    both = table(
        [1],
        [[2, 0], [2, 3]],
        tokens=[6, 7],
        positions=[1, 2],
        writes=[0, 3],
        rows=[0, 1],
        results=[0, 1],
    )
    run(both)  # resident: sequences that end in slots 2 and 3
    logits = run(one_row([1, 2], [3, 4], [8, 9])).logits
    assert_row(logits[0], llama.logprobs((5, 6, 8, 9)))


def test_the_past_of_a_token_after_the_trunk_is_all_of_the_trunk(llama: TinyModel) -> None:
    run = serve(llama)._choice.path.forward  # type: ignore[union-attr]
    run(one_row([], [1], [5]))
    run(one_row([1], [2], [6]))
    run(one_row([], [1], [5], again=True))  # resident: that ends in slot 1
    logits = run(one_row([1, 2], [3], [7])).logits
    assert_row(logits[0], llama.logprobs((5, 6, 7)))


def test_rows_are_right_after_a_pass_that_lost_the_storage(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(llama)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population((5, 6, 7), 3).extend([8, 9, 10])
        population.next_token_logprobs_sync()
        extended = population.extend([11, 12, 13])
        of_mlx = mx.eval
        calls: list[object] = []

        def failing(*arrays: object) -> None:
            calls.append(arrays)
            raise RuntimeError("[malloc] Unable to allocate")

        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", failing)
            with pytest.raises(PopulationError, match="allocate"):
                extended.next_token_logprobs_sync()
        assert calls
        assert mx.eval is of_mlx
        path: Any = engine._choice.path
        assert not path.forward.storage.is_corrupt
        assert engine.statistics()["kv_tokens"] == 0
        rows = extended.next_token_logprobs_sync()
        expected = torch.stack([llama.logprobs(context.token_ids) for context in extended])
        torch.testing.assert_close(rows.double(), expected.double(), rtol=0, atol=1e-4)
        everyone = [context.token_ids for context in (*population, *extended)]
    fresh = serve(llama)
    assert largest_error(fresh, everyone, llama.logprobs) <= 1e-4


def test_a_window_is_that_of_each_member(make: Make, counted: Counted) -> None:
    """Rows of different lengths, in a pass with layers that see only their last tokens."""
    settings = {
        **TINY_LLAMA,
        "hidden_size": 64,
        "head_dim": 8,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    model = make("gemma3_text", settings)
    with AsyncLM(lambda: serve(model), output_cache=OutputCache(0)) as lm:
        prompts = [tuple(range(10, 10 + length)) for length in (1, 3, 4, 9)]
        population = lm.population(prompts)
        for step in range(6):
            population = population.extend([20 + step, 30 + step, 40, 50])
            rows = population.next_token_logprobs_sync()
            expected = torch.stack(
                [model.logprobs(context.token_ids) for context in population]
            )
            torch.testing.assert_close(rows.double(), expected.double(), rtol=0, atol=1e-4)
    assert counted.tokens[-1] == 4
