"""From names and options to a served model, or to an error that says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import genlm_hf.loading
from genlm import MissingRequirementError, ModelLoadError
from genlm_hf.engine import HFEngine

from .tiny import WIDTH, alone, answers, build_model, ids_of_lengths, llama_settings

Save = Callable[[Any], Path]


def is_right(engine: HFEngine, model: Any, tolerance: float = 1e-4) -> bool:
    sequences = ids_of_lengths(9, 1, 23)
    rows = answers(engine, sequences)
    return all(
        (row - alone(model, ids)).abs().max() <= tolerance for ids, row in zip(sequences, rows)
    )


def test_a_folder_is_served_in_float32_on_the_cpu(folder: Path, llama: Any) -> None:
    for name in (folder, str(folder)):
        engine = HFEngine(name, device="cpu")
        assert engine.statistics()["dtype"] == "float32"
        assert is_right(engine, llama)


def test_a_half_precision_checkpoint_becomes_float32_on_the_cpu_unless_told_otherwise(
    llama: Any, save_model: Save
) -> None:
    path = save_model(llama.to(torch.bfloat16))
    rounded = build_model("llama", **llama_settings())
    rounded.load_state_dict(llama.state_dict())
    for dtype, expected in [
        (None, "float32"),
        ("auto", "bfloat16"),
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("float16", "float16"),
        (torch.bfloat16, "bfloat16"),
    ]:
        engine = HFEngine(path, hf_opts={"device_map": "cpu"}, dtype=dtype)
        assert engine.statistics()["dtype"] == expected
        engine = HFEngine(path, device="cpu", dtype=dtype)
        assert engine.statistics()["dtype"] == expected
        assert is_right(engine, rounded, 1e-4 if dtype is None else 1e-1)


def test_options_reach_from_pretrained(folder: Path, llama: Any) -> None:
    engine = HFEngine(
        folder,
        hf_opts={
            "attn_implementation": "eager",
            "torch_dtype": "bf16",
            "rms_norm_eps": 0.5,
        },
    )
    config = engine._served.model.config
    assert (config._attn_implementation, config.rms_norm_eps) == ("eager", 0.5)
    assert engine.statistics()["dtype"] == "bfloat16"


def test_a_model_with_a_device_map_is_not_moved(
    folder: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", None)
    engine = HFEngine(folder, hf_opts={"device_map": "cpu"}, dtype="float32")
    assert is_right(engine, llama)


def test_a_local_folder_called_demo_is_not_the_packaged_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    local = HFEngine("./demo")
    assert local.vocabulary.size == HFEngine(Path("demo")).vocabulary.size == 300
    assert HFEngine("demo").vocabulary.size == 1536


def test_the_packaged_model_loads_and_answers() -> None:
    engine = HFEngine("demo", device="cpu")
    [row] = answers(engine, [engine.vocabulary.tokenizer.encode("The ")])
    assert abs(float(row.logsumexp(0))) <= 1e-4


def refusal(model: Any, error: type[Exception] = ModelLoadError, **options: Any) -> str:
    with pytest.raises(error) as refused:
        HFEngine(model, **options)
    return str(refused.value)


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(
    tmp_path: Path, tokenizer: Any
) -> None:
    transformers.T5Config(vocab_size=WIDTH).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert "encoder-decoder (t5)" in message
    assert "decoder-only" in message


def test_a_model_without_a_language_head_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "ViTConfig" in refusal(tmp_path)


def test_a_checkpoint_without_its_language_head_is_refused(
    llama: Any, save_model: Save
) -> None:
    message = refusal(save_model(llama.model))
    assert "lm_head.weight" in message
    assert "LlamaModel" in message


def test_folders_that_hold_no_model_are_refused_with_what_they_hold(
    folder: Path, tmp_path: Path
) -> None:
    assert "the folder contains nothing" in refusal(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    assert "the folder contains config.json" in refusal(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    assert "model.safetensors" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert "AutoModelForCausalLM" in refusal(tmp_path)
    for number in range(30):
        (tmp_path / f"note {number:02}").touch()
    message = refusal(tmp_path)
    assert ", note 09, ...; it must contain config.json" in message
    assert "note 20" not in message


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "~/no/where"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(name: str) -> None:
    assert f"folder {name!r}; there is no such folder" in refusal(name)
    assert "there is no such folder" in refusal(Path("nowhere"))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    message = refusal(tmp_path / "weights.gguf")
    assert "this is a file; pass its folder" in message
    assert "hub" not in message.rpartition("raised")[2]


def test_an_empty_name_is_not_taken_for_the_working_directory() -> None:
    assert "folder ''; there is no such folder" in refusal("")


def test_an_unreachable_hub_id_says_what_was_tried() -> None:
    message = refusal("nobody/nothing")
    assert "'nobody/nothing'" in message
    assert "no folder of that name" in message
    assert "hub cannot be reached" in message


@pytest.fixture
def folder_with_code(folder: Path, tmp_path: Path) -> Path:
    """A model whose architecture comes as code in its folder."""
    path = tmp_path / "custom"
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "model_type": "tiny-custom",
        "architectures": ["TinyForCausalLM"],
        "auto_map": {
            "AutoConfig": "custom.TinyConfig",
            "AutoModelForCausalLM": "custom.TinyForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "custom.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class TinyConfig(LlamaConfig):\n    model_type = 'tiny-custom'\n"
        "class TinyForCausalLM(LlamaForCausalLM):\n    config_class = TinyConfig\n"
    )
    return path


def test_code_of_a_model_runs_only_when_trusted(
    folder_with_code: Path, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    assert "trust_remote_code=True" in refusal(folder_with_code)
    assert not cache.exists()
    for options in ({"trust_remote_code": True}, {"hf_opts": {"trust_remote_code": True}}):
        engine = HFEngine(folder_with_code, **options)
        assert engine.statistics()["model"] == "TinyForCausalLM"
        assert is_right(engine, llama)


def test_a_device_map_without_accelerate_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(genlm_hf.loading.importlib.util, "find_spec", lambda name: None)
    message = refusal(folder, MissingRequirementError, hf_opts={"device_map": "auto"})
    assert "needs accelerate" in message


def test_quantisation_options_reach_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_arguments: dict[str, Any] = {}

    def record(*args: Any, **arguments: Any) -> None:
        passed_arguments.update(arguments)
        raise OSError("seen")

    monkeypatch.setattr(genlm_hf.loading.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", record)
    refusal(folder, bitsandbytes_opts={"load_in_4bit": True}, device="cpu")
    assert passed_arguments["quantization_config"].load_in_4bit
    assert passed_arguments["device_map"] == {"": torch.device("cpu")}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtype": "float33"}, "no dtype 'float33'"),
        ({"dtype": "int8"}, "no dtype 'int8'"),
        ({"dtype": 3}, "no dtype 3"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"device": 1.5}, "no device 1.5"),
        ({"device": "cpu", "hf_opts": {"device_map": "auto"}}, "either device or"),
        ({"dtype": "float32", "hf_opts": {"dtype": "float32"}}, "passed twice"),
        ({"hf_opts": {"dtype": "float32", "torch_dtype": "bf16"}}, "old name 'torch_dtype'"),
        ({"hf_opts": {"no_such_option": 1}}, "no_such_option"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    folder: Path, options: dict[str, Any], problem: str
) -> None:
    assert problem in refusal(folder, ValueError, **options)


def test_an_option_of_bitsandbytes_that_transformers_would_ignore_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(genlm_hf.loading.importlib.util, "find_spec", lambda name: True)
    message = refusal(folder, ValueError, bitsandbytes_opts={"load_in_4bits": True})
    assert message.startswith("bitsandbytes_opts has load_in_4bits; BitsAndBytesConfig takes ")


def test_a_quantisation_without_a_number_of_bits_is_refused(tmp_path: Path) -> None:
    for options in ({"llm_int8_threshold": 4.0}, {"load_in_8bit": False}):
        message = refusal(tmp_path, ValueError, bitsandbytes_opts=options)
        assert "has neither load_in_8bit=True nor load_in_4bit=True" in message


@pytest.mark.parametrize("name", ["hf_opts", "bitsandbytes_opts"])
def test_options_that_are_no_mapping_are_refused(folder: Path, name: str) -> None:
    assert f"{name}='4bit'; expected a mapping" in refusal(folder, TypeError, **{name: "4bit"})


def test_a_gpu_that_is_not_there_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "torch finds 1 CUDA devices" in refusal(folder, device="cuda:1")


def test_a_device_that_torch_cannot_use_is_refused(folder: Path) -> None:
    assert not torch.backends.mps.is_available(), "this test needs a machine without"
    message = refusal(folder, device="mps")
    assert (
        "device 'mps' is not available; this torch was not built for mps, or finds" in message
    )
    assert "device='cpu'" in message
    assert len(message) < 250


def test_a_budget_that_cannot_be_allocated_is_refused(folder: Path) -> None:
    message = refusal(folder, kv_budget_bytes=10**15)
    assert "cpu cannot allocate kv_budget_bytes=1000000000000000; " in message
    assert "Pass a smaller budget" in message


def test_an_unknown_argument_is_a_type_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="devise"):
        HFEngine(folder, devise="cpu")  # type: ignore[call-arg]


def test_tied_and_padded_embeddings_load_whole(save_model: Save) -> None:
    model = build_model("llama", **llama_settings(tie_word_embeddings=True))
    assert is_right(HFEngine(save_model(model)), model)
