"""Models in 8 and 4 bit, through bitsandbytes itself on the CPU.

Two oracles: an unbatched pass of the same quantised model, and of a float32 model with its
weights dequantised, which knows nothing of bitsandbytes' kernels. These round activations to
8 bit, or on some CPUs to bfloat16, so that rows agree as in half precision or worse.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.testing._internal.two_tensor import TwoTensor

import genlm_hf.loading
from genlm import MissingRequirementError, ModelLoadError
from genlm_hf.engine import HFEngine
from genlm_hf.quantised import is_quantised

from .population import Oracle
from .test_adapters import make_adapter
from .tiny import VOCAB_SIZE, WIDTH, answers, build_model, ids_of_lengths, llama_settings

IN_8_BIT = {"load_in_8bit": True}
WITHOUT_OUTLIERS = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
IN_4_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# In log-probability; a row of another sequence is off by more than 3.
TOLERANCES = [(IN_8_BIT, 0.4), (WITHOUT_OUTLIERS, 1e-3), (IN_4_BIT, 0.1)]

LLAMA = llama_settings(hidden_size=64, intermediate_size=128)
GPT2 = {"vocab_size": WIDTH, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQUENCES = ids_of_lengths(9, 1, 23, 40, 5)


@pytest.fixture(params=["llama", "gpt2"])
def path(request: pytest.FixtureRequest, save_model: Callable[[Any], Path]) -> Path:
    return save_model(
        build_model(request.param, **{"llama": LLAMA, "gpt2": GPT2}[request.param])
    )


def quantised(path: Path, options: dict[str, Any]) -> Any:
    """What transformers makes of a folder and bitsandbytes' options, without genlm."""
    settings = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=settings, dtype=torch.float32, device_map={"": "cpu"}
    )
    return model.requires_grad_(False)


def largest_difference(rows: list[torch.Tensor], other_rows: list[torch.Tensor]) -> float:
    return max(float((row - other).abs().max()) for row, other in zip(rows, other_rows))


@pytest.mark.parametrize("execution_path", ["packed", "slot_cache", "padded"])
@pytest.mark.parametrize(("options", "tolerance"), TOLERANCES)
def test_rows_are_those_of_unbatched_passes(
    options: dict[str, Any], tolerance: float, execution_path: str, path: Path
) -> None:
    engine = HFEngine(
        path,
        device="cpu",
        dtype="float32",
        bitsandbytes_opts=options,
        execution_path=execution_path,
    )
    unbatched = Oracle(quantised(path, options))
    dequantised = Oracle(quantised(path, options).dequantize())
    for step in (SEQUENCES, [[*ids, 5] for ids in SEQUENCES], SEQUENCES[:1]):
        rows = answers(engine, step)
        assert unbatched.largest_error(step, rows) <= tolerance
        assert dequantised.largest_error(step, rows) <= 0.4


@pytest.mark.parametrize("options", [IN_8_BIT, IN_4_BIT])
def test_the_fastest_path_is_chosen_though_kernels_round(
    options: dict[str, Any], path: Path
) -> None:
    engine = HFEngine(path, device="cpu", dtype="float32", bitsandbytes_opts=options)
    assert engine.statistics()["execution_path"] == "packed"


def test_only_outliers_in_8_bit_let_a_row_depend_on_its_batch(
    save_model: Callable[[Any], Path],
) -> None:
    path = save_model(build_model("llama", **LLAMA))
    sequences = ids_of_lengths(*[20] * 50)
    differences = []
    for options in (IN_8_BIT, WITHOUT_OUTLIERS):
        engine = HFEngine(
            path,
            device="cpu",
            dtype="float32",
            bitsandbytes_opts=options,
            execution_path="padded",
        )
        alone = [answers(engine, [ids])[0] for ids in sequences]
        differences.append(largest_difference(answers(engine, sequences), alone))
    assert 1e-2 < differences[0] < 0.4
    assert differences[1] <= 1e-4


@pytest.mark.parametrize("options", [IN_8_BIT, IN_4_BIT])
def test_a_checkpoint_that_was_saved_quantised_is_served(
    options: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    model = quantised(path, options)
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path)
    engine = HFEngine(tmp_path, device="cpu", dtype="float32")
    assert Oracle(model).largest_error(SEQUENCES, answers(engine, SEQUENCES)) <= 0.4


@pytest.mark.parametrize(("options", "tolerance"), TOLERANCES)
def test_adapters_are_switched_and_leave_the_quantised_weights_as_they_are(
    options: dict[str, Any], tolerance: float, save_model: Callable[[Any], Path], tmp_path: Path
) -> None:
    full = build_model("llama", **LLAMA)
    path = save_model(full)
    engine = HFEngine(path, device="cpu", dtype="float32", bitsandbytes_opts=options)
    oracles: dict[str | None, Oracle] = {None: Oracle(quantised(path, options))}
    for seed, name in enumerate(["red", "blue"]):
        make_adapter(full, tmp_path / name, seed)
        engine.add_adapter(name, str(tmp_path / name))
        model = peft.PeftModel.from_pretrained(quantised(path, options), tmp_path / name)
        oracles[name] = Oracle(model)
    rows = iter(answers(engine, [(ids, name) for name in oracles for ids in SEQUENCES]))
    rows_by_name = {name: [next(rows) for _ in SEQUENCES] for name in oracles}
    for name, oracle in oracles.items():
        assert oracle.largest_error(SEQUENCES, rows_by_name[name]) <= tolerance
    assert largest_difference(rows_by_name["red"], rows_by_name["blue"]) > 2
    bare = engine._served.model
    engine.close()
    with torch.inference_mode():
        logits = [bare(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in SEQUENCES]
    rows_after = [row[:VOCAB_SIZE].log_softmax(-1) for row in logits]
    assert oracles[None].largest_error(SEQUENCES, rows_after) <= tolerance


def test_a_model_that_sees_later_tokens_is_refused_in_8_bit_too(
    save_model: Callable[[Any], Path],
) -> None:
    bert = {"vocab_size": WIDTH, "hidden_size": 64, "intermediate_size": 128}
    bert |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    path = save_model(build_model("bert", **bert))
    with pytest.raises(ModelLoadError, match="not a causal language model"):
        HFEngine(path, device="cpu", dtype="float32", bitsandbytes_opts=IN_8_BIT)


@pytest.mark.parametrize("options", [IN_8_BIT, IN_4_BIT])
def test_new_weights_are_refused_and_leave_the_rows_unchanged(
    options: dict[str, Any], save_model: Callable[[Any], Path]
) -> None:
    full = build_model("llama", **LLAMA)
    engine = HFEngine(
        save_model(full), device="cpu", dtype="float32", bitsandbytes_opts=options
    )
    rows = answers(engine, SEQUENCES)
    for weights in (full.state_dict(), dict(engine._served.model.named_parameters())):
        with pytest.raises(ValueError, match="weights of a quantised model cannot be replaced"):
            engine.update_weights(weights)
        assert largest_difference(answers(engine, SEQUENCES), rows) == 0


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_weights_that_the_caller_quantised_are_recognised(is_wrapped: bool) -> None:
    model = build_model("llama", **LLAMA)
    assert not is_quantised(model)
    weight = model.lm_head.weight.detach()
    weight = TwoTensor(weight, weight) if is_wrapped else weight.to(torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert is_quantised(model)


def test_activations_quantised_with_one_scale_for_all_tokens_are_refused(
    tokenizer: Any,
) -> None:
    def quantise(_: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        scale = inputs[0].abs().max() / 127
        return (inputs[0] / scale).round() * scale

    model = build_model("llama", **LLAMA)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(quantise)
    with pytest.raises(ModelLoadError, match="quantise weights only"):
        HFEngine.from_model(model, tokenizer)


def test_bitsandbytes_says_once_what_it_says_at_every_product(
    save_model: Callable[[Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = save_model(build_model("llama", **LLAMA))
    engine = HFEngine(path, device="cpu", dtype="float32", bitsandbytes_opts=IN_8_BIT)
    for _ in range(2):
        answers(engine, SEQUENCES)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages))


def test_quantisation_without_its_library_says_how_to_install_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        genlm_hf.loading.importlib.util,
        "find_spec",
        lambda name: None if name == "bitsandbytes" else find(name),
    )
    with pytest.raises(MissingRequirementError) as refused:
        HFEngine(path, bitsandbytes_opts={"load_in_8bit": True})
    message = str(refused.value)
    assert message.startswith("bitsandbytes_opts={'load_in_8bit': True} needs bitsandbytes")
    assert "pip install 'genlm-hf[bitsandbytes]'" in message
