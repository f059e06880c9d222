"""Options, errors, adapters and the demo model of the engine."""

from __future__ import annotations

import ctypes
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import genlm
from genlm import AdapterError, AsyncLM, ModelLoadError
from genlm_llamacpp.context import LlamaContext
from genlm_llamacpp.engine import LlamaCppEngine

sys.path.append(str(Path(__file__).parents[3] / "scripts"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_seq_max": 300}, "at most 256"),
        ({"n_ctx": 0}, "n_ctx=0"),
        ({"type_k": "f15"}, "type_k='f15'; expected one of f32"),
        ({"split_mode": "rows"}, "split_mode='rows'"),
        ({"kv_unified": "auto"}, "kv_unified='auto'; expected True"),
        ({"flash_attn": "auto"}, "flash_attn='auto'; expected True"),
    ],
)
def test_options_are_checked(llama, options, message):
    with pytest.raises(ValueError, match=message):
        llama.engine(**options)


def test_what_is_not_a_model_is_refused_with_the_reason(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"could not read .*: .*magic"):
        LlamaCppEngine(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="Nothing is downloaded here"):
        LlamaCppEngine("owner/name")
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="2 GGUF models"):
        LlamaCppEngine(tmp_path)


def test_a_context_that_is_not_as_asked_is_refused(llama, monkeypatch):
    """The created context differs from the options, as with another layout of the struct."""
    created = LlamaContext._create

    def another(self, options):
        return created(self, replace(options, kv_unified=False))

    monkeypatch.setattr(LlamaContext, "_create", another)
    with pytest.raises(ModelLoadError, match="n_ctx for each sequence"):
        LlamaCppEngine(llama.file, n_ctx=1024, n_seq_max=4, threads=1)


def test_the_cache_may_be_quantised_and_limits_apply(llama):
    with AsyncLM(lambda: llama.engine(type_k="f16", max_context=20)) as lm:
        assert lm.max_context == 20
        row = lm.next_token_logprobs_sync(list(range(20)))
    torch.testing.assert_close(row.double(), llama.logprobs(list(range(20))), atol=1e-2, rtol=0)


def test_quantised_keys_that_blocks_do_not_divide_are_refused(llama):
    """llama.cpp itself would abort, or read other keys; the heads have 8 values."""
    with pytest.raises(ModelLoadError, match="do not divide the model's 8 values per head"):
        llama.engine(type_k="q8_0")


def test_ctypes_stores_no_type_for_each_number_of_outputs(llama):
    with AsyncLM(llama.engine) as lm:
        lm.next_token_logprobs_sync([1])
        before = len(ctypes._pointer_type_cache)
        for count in range(2, 8):
            lm.batch_next_token_logprobs_sync([[count, i] for i in range(count)])
        assert len(ctypes._pointer_type_cache) == before


def test_folders_without_one_adapter_are_refused(llama, tmp_path):
    with AsyncLM(llama.engine) as lm:
        with pytest.raises(AdapterError, match=r"convert_lora_to_gguf\.py"):
            lm.load_lora(tmp_path, "red")
        (tmp_path / "adapter.gguf").write_bytes(b"nothing")
        with pytest.raises(AdapterError, match="could not load adapter 'red'"):
            lm.load_lora(tmp_path, "red")


def test_settings_of_peft_that_its_gguf_file_ignores_are_refused(llama, tmp_path):
    with AsyncLM(llama.engine) as lm:
        shutil.copytree(llama.adapters["red"], tmp_path / "red")
        settings = tmp_path / "red" / "adapter_config.json"
        settings.write_text(
            settings.read_text().replace('"use_rslora": false', '"use_rslora": true')
        )
        with pytest.raises(AdapterError, match="has use_rslora=True"):
            lm.load_lora(tmp_path / "red", "red")


def test_the_demo_model_is_that_of_genlm_hf(tmp_path):
    """Q8_0 rounds its weights; its most likely tokens are the same."""
    from make_demo_gguf import SHIPPED, write

    write(tmp_path / "demo.gguf")
    assert (tmp_path / "demo.gguf").read_bytes() == SHIPPED.read_bytes()
    text = "This method returns the value of"
    with (
        genlm.load_model("demo", "llamacpp", n_ctx=256, threads=1) as lm,
        genlm.load_model("demo", "hf") as exact,
    ):
        ids = lm.encode(text)
        assert ids == exact.encode(text)
        assert lm.decode(ids) == text
        found, expected = (each.score_sync(ids) for each in (lm, exact))
        assert [bytes(token) for token in lm.byte_vocab] == [bytes(t) for t in exact.byte_vocab]
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads=0; it must be 1 or more"),
        ({"threads_batch": 0}, "threads_batch=0; it must be 1 or more"),
        ({"threads": 10**6}, "threads=1000000; llama.cpp has at most 512"),
        ({"n_ctx": 2**32 + 5}, "n_ctx=4294967301; llama.cpp has at most 2147483647"),
        ({"tensor_split": (1.0,) * 1000}, "tensor_split has 1000 shares; llama.cpp takes"),
    ],
)
def test_options_out_of_range_are_refused(llama, options, message):
    with pytest.raises(ValueError, match=message):
        llama.engine(**options)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("n_ctx", "3", "n_ctx='3'; expected an integer, 1 or more"),
        ("threads", "3", "threads='3'; expected an integer, 1 or more"),
        ("max_context", "3", "max_context='3'; expected an integer, 1 or more"),
        ("n_batch", None, "n_batch=None; expected an integer, 1 or more"),
        ("main_gpu", "3", "main_gpu='3'; expected an integer, -1 or more"),
        ("n_gpu_layers", None, "n_gpu_layers=None; expected an integer, -1 or more"),
        ("tensor_split", 1, "tensor_split=1; expected a list of numbers"),
        ("tensor_split", "3", "tensor_split='3'; expected a list of numbers"),
        ("offload_kqv", "no", "offload_kqv='no'; expected True or False"),
    ],
)
def test_options_of_other_types_are_refused(option, value, message):
    with pytest.raises(TypeError, match=message):
        genlm.load_model("demo", "llamacpp", **{option: value})
