"""Models that the caller made are served as they are, and given back when the engine closes."""

from __future__ import annotations

from typing import Any

import pytest
import tiktoken
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from genlm import ModelLoadError, VocabularyError
from genlm_hf.engine import HFEngine

from .tiny import WIDTH, alone, answers, build_model, ids_of_lengths, llama_settings

SEQUENCES = ids_of_lengths(9, 1, 9, 4)


def rescaling() -> Any:
    """An RWKV model, which divides weights by powers of two when it leaves training mode."""
    settings = {"vocab_size": WIDTH, "hidden_size": 32, "num_hidden_layers": 3}
    settings |= {"attention_hidden_size": 32, "intermediate_size": 64, "rescale_every": 1}
    return build_model("rwkv", **settings)


def test_weights_that_change_in_place_are_used(llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer)
    answers(engine, SEQUENCES)
    with torch.no_grad():
        llama.lm_head.weight.mul_(0.5)
    expected = [alone(llama, ids) for ids in SEQUENCES]
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)


def test_tokenizers_of_other_libraries_are_served(llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer.backend_tokenizer)
    expected = [alone(llama, ids) for ids in SEQUENCES]
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={}
    )
    model = build_model("llama", **llama_settings(vocab_size=256))
    engine = HFEngine.from_model(model, encoding)
    [row] = answers(engine, [encoding.encode("é 日")])
    expected = [alone(model, encoding.encode("é 日"), 256)]
    torch.testing.assert_close([row], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
def test_dropout_is_disabled_after_the_caller_has_trained_the_model(
    path: str, tokenizer: Any
) -> None:
    model = build_model(
        "gpt2",
        vocab_size=WIDTH, n_embd=32, n_layer=2, n_head=4,
        embd_pdrop=0.5, resid_pdrop=0.5, attn_pdrop=0.5,
    )  # fmt: skip
    engine = HFEngine.from_model(model, tokenizer, execution_path=path)
    expected = [alone(model, ids) for ids in SEQUENCES]
    model.train()
    model.transformer.h[0].eval()  # frozen by the caller
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    assert model.training
    assert model.transformer.h[1].mlp.dropout.training
    assert not model.transformer.h[0].mlp.dropout.training


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


def test_a_compiled_model_is_served_without_its_wrapper(llama: Any, tokenizer: Any) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    engine = HFEngine.from_model(torch.compile(llama, backend="eager"), tokenizer)
    assert engine.statistics()["execution_path"] == "packed"
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)


def test_other_modules_are_refused(llama: Any, tokenizer: Any) -> None:
    with pytest.raises(ModelLoadError, match="Sequential is not a model of transformers"):
        HFEngine.from_model(torch.nn.Sequential(llama), tokenizer)


def test_a_replaced_forward_method_is_kept(llama: Any, tokenizer: Any) -> None:
    layer = llama.model.layers[0]
    original_forward = layer.forward
    layer.forward = doubled = lambda *args, **kwargs: 2 * original_forward(*args, **kwargs)
    expected = [alone(llama, ids) for ids in SEQUENCES]
    engine = HFEngine.from_model(llama, tokenizer)
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    engine.close()
    assert vars(layer)["forward"] is doubled


def test_hooks_of_accelerate_are_kept(llama: Any, tokenizer: Any) -> None:
    expected = [alone(llama, ids) for ids in SEQUENCES]
    for module in llama.modules():
        add_hook_to_module(module, ModelHook())  # replaces the forward method
    engine = HFEngine.from_model(llama, tokenizer)
    assert engine.statistics()["execution_path"] == "packed"
    torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", [False, True])
def test_a_model_that_changes_its_weights_with_its_mode_is_served(
    tokenizer: Any, mode: bool
) -> None:
    expected = [alone(rescaling(), ids) for ids in SEQUENCES]
    model = rescaling().train(mode)
    engine = HFEngine.from_model(model, tokenizer)
    for _ in range(2):
        torch.testing.assert_close(answers(engine, SEQUENCES), expected, atol=1e-4, rtol=0)
    engine.close()
    assert model.training is mode
    rows = [alone(model.eval(), ids) for ids in SEQUENCES]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_model_is_in_evaluation_mode_until_it_is_closed(llama: Any, tokenizer: Any) -> None:
    llama.train()
    llama.model.layers[0].eval()  # frozen by the caller
    modes = [module.training for module in llama.modules()]
    engine = HFEngine.from_model(llama, tokenizer)
    assert not any(module.training for module in llama.modules())
    engine.close()
    assert [module.training for module in llama.modules()] == modes


def test_a_model_that_cannot_be_served_keeps_its_training_mode(llama: Any) -> None:
    llama.train()
    with pytest.raises(VocabularyError):
        HFEngine.from_model(llama, object())
    assert all(module.training for module in llama.modules())
