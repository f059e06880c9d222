"""The caller's model runs in another thread, in the middle of every pass of the engine."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from genlm_hf.engine import HFEngine

from .test_adapters import make_adapter
from .tiny import WIDTH, alone, answers, build_model, ids_of_lengths

SEQUENCES = ids_of_lengths(9, 1, 9, 4)
PATHS = ["packed", "slot_cache", "padded"]


@contextmanager
def in_the_middle_of_passes(
    layer: torch.nn.Module, other: Callable[[], None]
) -> Iterator[list[int]]:
    """Have another thread run `other` whenever this thread's passes get to `layer`."""
    thread, runs = threading.get_ident(), [0]

    def interrupt(*_: Any) -> None:
        if threading.get_ident() == thread:
            pool.submit(other).result()
            runs[0] += 1

    with ThreadPoolExecutor(1) as pool:
        handle = layer.register_forward_pre_hook(interrupt)
        try:
            yield runs
        finally:
            handle.remove()


def used(model: Any) -> Callable[[], None]:
    """Runs a model in several ways, and checks that it gives what it gave.

    Two of the batches have the shapes that the engine's passes over `SEQUENCES` have.
    """
    shapes = [torch.tensor(ids_of_lengths(*lengths)) for lengths in [(9,) * 4, (23,), (5,)]]

    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                *(model(ids).logits for ids in shapes),
                model(shapes[0], attention_mask=(shapes[0] != 5).long()).logits,
                model(shapes[2], output_hidden_states=True).hidden_states[1],
                model.generate(shapes[2], max_new_tokens=2, do_sample=False, pad_token_id=0),
            ]

    expected = results()

    def check() -> None:
        for found, known in zip(results(), expected, strict=True):
            assert torch.equal(found, known)
        assert not model.training

    return check


@pytest.mark.parametrize("path", PATHS)
def test_rows_and_the_callers_passes_are_right_at_the_same_time(
    llama: Any, tokenizer: Any, tmp_path: Path, path: str
) -> None:
    red = make_adapter(llama, tmp_path / "red", 1)
    models = {None: copy.deepcopy(llama), "red": red}
    requests = [(ids, name) for ids in SEQUENCES for name in models]
    expected = [alone(models[name], ids) for ids, name in requests]
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path, prepack=True)
    engine.add_adapter("red", str(tmp_path / "red"))
    with in_the_middle_of_passes(llama.model.layers[1], used(llama)) as runs:
        rows = answers(engine, requests)
    assert runs[0] >= 2
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_thread_that_never_stops_running_the_model_disturbs_no_row(
    llama: Any, tokenizer: Any
) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    engine = HFEngine.from_model(llama, tokenizer)
    check, ended = used(llama), threading.Event()

    def run() -> int:
        runs = 0
        while not ended.is_set():
            check()
            runs += 1
        return runs

    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(run)
        for _ in range(30):
            torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
            engine.clear_prefix_cache()
        ended.set()
        assert runs.result() >= 1


def test_a_model_that_its_owner_trains_stays_in_training(llama: Any, tokenizer: Any) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    llama.train()
    llama.model.layers[0].self_attn.attention_dropout = 0.5
    engine = HFEngine.from_model(llama, tokenizer)

    def train() -> None:
        assert all(module.training for module in llama.modules())
        batch = torch.tensor(ids_of_lengths(9))
        llama(batch, labels=batch).loss.backward()

    with in_the_middle_of_passes(llama.model.layers[1], train) as runs:
        torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    assert runs[0] >= 1
    assert all(parameter.grad is not None for parameter in llama.parameters())


def test_adapters_of_the_engine_are_not_in_the_callers_model(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    make_adapter(llama, tmp_path / "red", 1, target_modules=["embed_tokens", "lm_head"])
    modules, parameters = dict(llama.named_modules()), dict(llama.named_parameters())
    engine = HFEngine.from_model(llama, tokenizer)
    engine.add_adapter("red", str(tmp_path / "red"))
    answers(engine, [(ids, "red") for ids in SEQUENCES])
    assert dict(llama.named_modules()) == modules
    found = dict(llama.named_parameters())
    assert all(found[name] is parameter for name, parameter in parameters.items())
    assert all(parameter.requires_grad for parameter in parameters.values())
    assert not hasattr(llama, "peft_config")


def test_adapters_that_the_caller_switches_stay_the_callers(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    base = copy.deepcopy(llama)
    red = make_adapter(llama, tmp_path / "red", 1)
    engine = HFEngine.from_model(red, tokenizer)
    expected = {name: alone(model, SEQUENCES[0]) for name, model in ((None, base), ("on", red))}

    def switch_off() -> None:
        with torch.no_grad(), red.disable_adapter():
            logits = red(torch.tensor([SEQUENCES[0]])).logits[0, -1, : len(expected[None])]
        torch.testing.assert_close(logits.log_softmax(-1), expected[None], atol=1e-4, rtol=0)

    layer = red.get_base_model().model.layers[1]
    with in_the_middle_of_passes(layer, switch_off) as runs:
        (row,) = answers(engine, SEQUENCES[:1])
    assert runs[0] >= 1
    torch.testing.assert_close(row, expected["on"], atol=1e-4, rtol=0)


def test_weights_are_the_same_memory_and_changes_in_place_are_seen(
    llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(llama, tokenizer)
    answers(engine, SEQUENCES)
    with torch.no_grad():
        llama.lm_head.weight.mul_(0.5)
    engine.clear_prefix_cache()
    expected = [alone(llama, ids) for ids in SEQUENCES]
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)


def test_hooks_of_the_model_run_in_the_engines_passes(llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer)

    def shift(_: Any, __: Any, states: torch.Tensor) -> torch.Tensor:
        return states + 0.5

    handle = llama.model.layers[0].register_forward_hook(shift)
    shifted = [alone(llama, ids) for ids in SEQUENCES]
    torch.testing.assert_close(answers(engine, SEQUENCES), shifted, atol=1e-4, rtol=0)
    handle.remove()
    engine.clear_prefix_cache()
    expected = [alone(llama, ids) for ids in SEQUENCES]
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    assert (shifted[0] - expected[0]).abs().max() > 0.1


def test_compiled_models_and_modules_are_served_by_uncompiled_ones(
    llama: Any, tokenizer: Any
) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    llama.model.norm.compile(backend="eager")
    engine = HFEngine.from_model(torch.compile(llama, backend="eager"), tokenizer)
    assert engine.statistics()["execution_path"] == "packed"
    with in_the_middle_of_passes(llama.model.layers[1], used(llama)) as runs:
        rows = answers(engine, SEQUENCES)
    assert runs[0] >= 1
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_replaced_forward_method_is_followed(llama: Any, tokenizer: Any) -> None:
    attention = llama.model.layers[0].self_attn
    whole = type(attention).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        states, *others = whole(self, *args, **kwargs)
        return (2 * states, *others)

    attention.forward = doubled.__get__(attention)
    expected = [alone(llama, ids) for ids in SEQUENCES]
    engine = HFEngine.from_model(llama, tokenizer)
    assert engine.statistics()["execution_path"] == "packed"
    with in_the_middle_of_passes(llama.model.layers[1], used(llama)):
        rows = answers(engine, SEQUENCES)
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_hooks_of_accelerate_run_the_engines_modules(llama: Any, tokenizer: Any) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    for module in llama.modules():
        add_hook_to_module(module, ModelHook())  # replaces the forward method
    engine = HFEngine.from_model(llama, tokenizer)
    assert engine.statistics()["execution_path"] == "packed"
    with in_the_middle_of_passes(llama.model.layers[1], used(llama)) as runs:
        rows = answers(engine, SEQUENCES)
    assert runs[0] >= 1
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_model_that_cannot_be_told_apart_is_served_in_place_and_said_so(
    llama: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layer = llama.model.layers[0]
    whole = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * whole(*args, **kwargs)
    expected = [alone(llama, ids) for ids in SEQUENCES]
    engine = HFEngine.from_model(llama, tokenizer)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "genlm_hf"]
    assert "served in place, because other code holds its module" in warning
    assert "do not run it elsewhere" in warning
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    engine.close()
    assert "forward" in vars(layer)


def rescaling() -> Any:
    """An RWKV model, which divides weights by powers of two when it leaves training mode."""
    settings = {"vocab_size": WIDTH, "hidden_size": 32, "num_hidden_layers": 3}
    settings |= {"attention_hidden_size": 32, "intermediate_size": 64, "rescale_every": 1}
    return build_model("rwkv", **settings)


def test_a_model_that_changes_its_weights_changes_them_once(tokenizer: Any) -> None:
    expected = [alone(rescaling(), ids) for ids in SEQUENCES]
    model = rescaling()
    engine = HFEngine.from_model(model, tokenizer)
    for _ in range(2):
        torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
        found = [alone(model, ids) for ids in SEQUENCES]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_model_that_changes_its_weights_with_its_mode_is_served_in_place(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [alone(rescaling(), ids) for ids in SEQUENCES]
    model = rescaling().train()
    engine = HFEngine.from_model(model, tokenizer)
    assert "it changes its weights when it leaves training mode" in caplog.text
    for _ in range(2):
        torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
        model(torch.tensor(SEQUENCES[:1]))  # multiplies again what was divided
