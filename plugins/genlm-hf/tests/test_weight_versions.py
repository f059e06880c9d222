"""Requests use the current weights of a model object, in every way in which they change."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import optimizer as torch_optimizer

import genlm
from genlm import EvaluationError
from genlm_hf import prepacked
from genlm_hf.weight_versions import WeightVersions

from .test_adapters import make_adapter
from .tiny import alone, build_model, ids_of_lengths, llama_settings

IDS, OTHER_IDS = ids_of_lengths(9, 5)


def step(model: Any, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.sign(parameter.detach())
    make(parameters, lr=0.02, **options).step()


def scale(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def scale_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        scale(model)


def scale_without_gradients(model: Any) -> None:
    with torch.no_grad():
        scale(model)


def load_scaled(model: Any) -> None:
    model.load_state_dict({key: 0.9 * value for key, value in model.state_dict().items()})


def replace_memory(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = 0.9 * parameter.data


def replace_a_parameter(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(0.5 * model.lm_head.weight.detach())


CHANGES: dict[str, Callable[[Any], None]] = {
    "sgd": lambda model: step(model, SGD),
    "adamw": lambda model: step(model, AdamW, foreach=False),
    "adamw-foreach": lambda model: step(model, AdamW, foreach=True),
    "adamw-fused": lambda model: step(model, AdamW, fused=True),
    "no-grad": scale_without_gradients,
    "inference-mode": scale_in_inference_mode,
    "load-state-dict": load_scaled,
    "replaced-memory": replace_memory,
    "replaced-parameter": replace_a_parameter,
}


def assert_rows_are_current(llm: genlm.AsyncLM, model: Any, population: Any) -> None:
    """Compare a repeated row, an extended prefix, scores and members with the model."""
    size = llm.vocab_size
    rows = llm.batch_next_token_logprobs_sync([IDS, [*IDS, 7]])
    expected = [alone(model, IDS, size), alone(model, [*IDS, 7], size)]
    torch.testing.assert_close(list(rows), expected, atol=1e-4, rtol=0)
    scores = [alone(model, IDS[:end], size)[IDS[end]] for end in range(1, len(IDS))]
    torch.testing.assert_close(llm.score_sync(IDS), torch.stack(scores), atol=1e-4, rtol=0)
    expected = [alone(model, member.token_ids, size) for member in population]
    rows = population.next_token_logprobs_sync()
    torch.testing.assert_close(list(rows), expected, atol=1e-4, rtol=0)


def started_population(llm: genlm.AsyncLM) -> Any:
    population = llm.population([IDS, IDS, OTHER_IDS] * 4)
    return population.extend(population.draw_sync(seed=1).token_ids)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
def test_changed_weights_are_used(
    change: Callable[[Any], None], path: str, llama: Any, tokenizer: Any
) -> None:
    options = {"tokenizer": tokenizer, "execution_path": path}
    with genlm.load_model(llama, "hf", **options) as llm:
        population = started_population(llm)
        for _ in range(2):
            assert_rows_are_current(llm, llama, population)
            before = alone(llama, IDS)
            change(llama)
            assert (alone(llama, IDS) - before).abs().max() > 1e-2
        assert_rows_are_current(llm, llama, population)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_can_be_changed_between_pending_requests(
    change: Callable[[Any], None], llama: Any, tokenizer: Any
) -> None:
    before = alone(llama, IDS)

    async def main(llm: genlm.AsyncLM) -> torch.Tensor:
        pending = asyncio.ensure_future(llm.next_token_logprobs(IDS))
        await asyncio.sleep(0)
        await llm.aupdate_weights(lambda _: change(llama))
        return await pending

    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        population = started_population(llm)
        row = asyncio.run(main(llm))
        torch.testing.assert_close(row, before[: len(row)].log_softmax(0), atol=1e-4, rtol=0)
        assert_rows_are_current(llm, llama, population)
        assert (alone(llama, IDS) - before).abs().max() > 1e-2


def test_weights_are_prepacked_again(tokenizer: Any) -> None:
    settings = llama_settings(hidden_size=256, intermediate_size=512)
    wide_llama = build_model("llama", **settings)
    with genlm.load_model(wide_llama, "hf", tokenizer=tokenizer, prepack=True) as llm:
        assert llm.statistics().engine["prepacked_bytes"] > 0
        population = started_population(llm)
        step(wide_llama, AdamW, fused=True)
        assert_rows_are_current(llm, wide_llama, population)
        assert llm.statistics().engine["prepacked_bytes"] > 0


def test_weights_are_prepacked_again_after_memory_was_short(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = llama_settings(hidden_size=256, intermediate_size=512)
    wide_llama = build_model("llama", **settings)
    with genlm.load_model(wide_llama, "hf", tokenizer=tokenizer, prepack=True) as llm:
        sizes = [llm.statistics().engine["prepacked_bytes"]]
        for free in (0, 2**36):
            monkeypatch.setattr(prepacked, "free_memory_bytes", lambda free=free: free)
            step(wide_llama, AdamW)
            assert_rows_are_current(llm, wide_llama, started_population(llm))
            sizes.append(llm.statistics().engine["prepacked_bytes"])
    assert sizes == [sizes[0], 0, sizes[0]]
    assert sizes[0] > 0


def test_no_result_of_earlier_weights_remains_after_an_error_while_they_are_dropped(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise MemoryError

    settings = llama_settings(hidden_size=256, intermediate_size=512)
    wide_llama = build_model("llama", **settings)
    with genlm.load_model(wide_llama, "hf", tokenizer=tokenizer, prepack=True) as llm:
        population = started_population(llm)
        assert_rows_are_current(llm, wide_llama, population)
        step(wide_llama, AdamW)
        with monkeypatch.context() as patch:
            patch.setattr(prepacked, "_prepackable_weight", fail)
            with pytest.raises(EvaluationError, match="MemoryError"):
                llm.next_token_logprobs_sync(IDS)
        assert_rows_are_current(llm, wide_llama, population)
        assert llm.statistics().engine["prepacked_bytes"] > 0


def shift_memory(model: Any) -> None:
    """Change parameters and a buffer in a way that torch does not count."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    model.model.rotary_emb.inv_freq.detach().numpy()[:] *= 0.5


@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
def test_changes_that_torch_does_not_count_are_used_after_an_update(
    path: str, llama: Any, tokenizer: Any
) -> None:
    options = {"tokenizer": tokenizer, "execution_path": path}
    with genlm.load_model(llama, "hf", **options) as llm:
        population = started_population(llm)
        assert_rows_are_current(llm, llama, population)
        shift_memory(llama)
        llm.update_weights()
        assert_rows_are_current(llm, llama, population)
        llm.update_weights(lambda _: shift_memory(llama))
        assert_rows_are_current(llm, llama, population)


def test_changed_buffers_of_the_state_dict_are_used(llama: Any, tokenizer: Any) -> None:
    """Routers of mixtures of experts have such buffers, which training changes."""
    norm = llama.model.norm
    norm.register_buffer("shift", torch.zeros(norm.weight.shape[0]))
    norm.register_forward_hook(lambda module, _, states: states + module.shift)
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        population = started_population(llm)
        assert_rows_are_current(llm, llama, population)
        norm.shift[::2] += 0.5
        assert_rows_are_current(llm, llama, population)
        norm.shift = torch.linspace(-1, 1, len(norm.shift))
        assert_rows_are_current(llm, llama, population)


def test_an_update_prepacks_weights_again(tokenizer: Any) -> None:
    settings = llama_settings(hidden_size=256, intermediate_size=512)
    wide_llama = build_model("llama", **settings)
    with genlm.load_model(wide_llama, "hf", tokenizer=tokenizer, prepack=True) as llm:
        assert llm.statistics().engine["prepacked_bytes"] > 0
        population = started_population(llm)
        shift_memory(wide_llama)
        llm.update_weights()
        assert_rows_are_current(llm, wide_llama, population)
        assert llm.statistics().engine["prepacked_bytes"] > 0


def test_new_weights_are_not_prepacked_without_the_option(tokenizer: Any) -> None:
    settings = llama_settings(hidden_size=256, intermediate_size=512)
    wide_llama = build_model("llama", **settings)
    with genlm.load_model(wide_llama, "hf", tokenizer=tokenizer, prepack=False) as llm:
        llm.update_weights()
        step(wide_llama, SGD)
        llm.next_token_logprobs_sync(IDS)
        assert llm.statistics().engine["prepacked_bytes"] == 0


def test_layers_of_peft_that_were_inserted_later_are_followed_after_an_update(
    llama: Any, tokenizer: Any
) -> None:
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        population = started_population(llm)
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(llama, config)
        llm.update_weights()
        assert_rows_are_current(llm, llama, population)
        step(llama, SGD)
        assert_rows_are_current(llm, llama, population)


def test_a_model_in_another_dtype_is_refused_until_it_is_changed_back(
    llama: Any, tokenizer: Any
) -> None:
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        population = started_population(llm)
        assert_rows_are_current(llm, llama, population)
        llama.half()
        message = r"loaded in float32 on cpu and is in float16 on cpu now; close it and load"
        for _ in range(2):
            with pytest.raises(EvaluationError, match=message):
                llm.next_token_logprobs_sync(IDS)
            with pytest.raises(EvaluationError, match=message):
                population.draw_sync(seed=1)
            with pytest.raises(ValueError, match=message):
                llm.update_weights()
        llama.float()
        assert_rows_are_current(llm, llama, population)


def test_a_prefix_is_pinned_with_the_current_weights(llama: Any, tokenizer: Any) -> None:
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        llm.pin_prefix(IDS[:-1])
        step(llama, SGD)
        llm.pin_prefix(IDS[:-1])
        row = llm.next_token_logprobs_sync(IDS)
        torch.testing.assert_close(row, alone(llama, IDS, len(row)), atol=1e-4, rtol=0)


def test_steps_of_other_models_keep_cached_results(llama: Any, tokenizer: Any) -> None:
    other = torch.nn.Linear(3, 3)
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        llm.next_token_logprobs_sync(IDS)
        before = llm.statistics()
        step(other, AdamW, fused=True)
        llama(torch.tensor([IDS])).logits.sum().backward()
        llama.train().eval().requires_grad_(False)
        llm.next_token_logprobs_sync(IDS)
        llm.next_token_logprobs_sync([*IDS, 7])
        counts = llm.statistics() - before
    assert counts.cache_hits == 1
    assert counts.engine["tokens_computed"] == 1


def test_an_optimizer_of_some_parameters_changes_the_weights(
    llama: Any, tokenizer: Any
) -> None:
    weight = llama.model.layers[0].mlp.up_proj.weight
    weight.grad = torch.sign(weight.detach())
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        llm.next_token_logprobs_sync(IDS)
        before = alone(llama, IDS)
        AdamW([weight], lr=0.1, fused=True).step()
        assert (alone(llama, IDS) - before).abs().max() > 1e-2
        row = llm.next_token_logprobs_sync(IDS)
        torch.testing.assert_close(row, alone(llama, IDS, len(row)), atol=1e-4, rtol=0)


def test_results_of_new_weights_are_cached(llama: Any, tokenizer: Any) -> None:
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        for change in (lambda: None, lambda: step(llama, SGD), llm.update_weights):
            change()
            llm.next_token_logprobs_sync(IDS)
            before = llm.statistics()
            llm.next_token_logprobs_sync(IDS)
            llm.next_token_logprobs_sync([*IDS, 7])
            counts = llm.statistics() - before
            assert counts.cache_hits == 1
            assert counts.engine["tokens_computed"] == 1


def test_adapters_loaded_and_unloaded_keep_cached_results(
    llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    make_adapter(llama, tmp_path, seed=1)
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        llm.next_token_logprobs_sync(IDS)
        before = llm.statistics()
        llm.load_lora(tmp_path, "one")
        llm.next_token_logprobs_sync(IDS, lora_name="one")
        llm.next_token_logprobs_sync(IDS)
        llm.unload_lora("one")
        llm.next_token_logprobs_sync([*IDS, 7])
        counts = llm.statistics() - before
    assert counts.cache_hits == 1
    assert counts.engine["tokens_computed"] == len(IDS) + 1


def test_no_hook_remains_after_closing(llama: Any, tokenizer: Any) -> None:
    hooks = torch_optimizer._global_optimizer_post_hooks
    before = dict(hooks)
    llm = genlm.load_model(llama, "hf", tokenizer=tokenizer)
    assert len(hooks) == len(before) + 1
    llm.close()
    gc.collect()
    assert hooks == before


def test_parameters_without_versions_or_memory_have_a_version() -> None:
    with torch.inference_mode():
        made_in_inference_mode = torch.nn.Linear(2, 2)
    model = torch.nn.ModuleList([made_in_inference_mode, torch.nn.Linear(2, 2, device="meta")])
    versions = WeightVersions(model)
    before = versions.current()
    assert versions.current() == before
    del model[0].weight
    assert versions.current() != before
