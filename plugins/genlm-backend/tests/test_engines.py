"""Classes of other engines: what they ask plugins for, and what they say without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import run_program

import genlm
from genlm.backend import AsyncVirtualLM, load_model_by_name
from genlm.backend.llm import AsyncLM, AsyncMlxLM, AsyncSGLTransformer
from genlm.backend.llm.handover import recipe_of_vllm
from genlm.backend.llm.vllm import GlobalLogprobsCapture

from .tiny import assert_right, make_model

VIRTUAL_LM = Path(__file__).parent / "programs" / "virtual_lm.py"


@pytest.fixture
def without_plugins(monkeypatch):
    monkeypatch.setenv("GENLM_DISABLE_PLUGINS", "vllm,sgl,mlx")
    genlm.refresh()
    yield
    monkeypatch.undo()
    genlm.refresh()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("vllm", r"AsyncVirtualLM needs .*'vllm'.*pip install 'genlm-backend\[vllm\]'"),
        ("sgl", r"AsyncSGLTransformer needs .*'sgl'.*pip install 'genlm-backend\[sgl\]'"),
        ("mlx", r"AsyncMlxLM needs .*'mlx'.*pip install 'genlm-backend\[mlx\]'"),
    ],
)
def test_without_its_plugin_a_class_says_what_to_install(without_plugins, backend, message):
    with pytest.raises(ImportError, match=message):
        load_model_by_name("any/model", backend=backend)


@pytest.mark.parametrize("model_class", [AsyncVirtualLM, AsyncSGLTransformer, AsyncMlxLM])
def test_every_class_is_of_the_published_base(model_class):
    assert issubclass(model_class, AsyncLM)
    assert issubclass(model_class, genlm.AsyncLM)


def test_the_default_backend_is_vllm_only_where_it_can_be_used(
    without_plugins, folder, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "genlm.backend.llm.AsyncTransformer.from_name", lambda name: ("hf", name)
    )
    assert load_model_by_name(str(folder)) == ("hf", str(folder))


def test_any_other_installed_engine_can_be_asked_for():
    with load_model_by_name("demo", backend="reference") as llm:
        assert isinstance(llm, AsyncLM)
        row = llm.next_token_logprobs_sync(llm.tokenizer.encode("the "))
        assert row.logsumexp(0).item() == pytest.approx(0, abs=1e-4)
        assert llm.device == row.device
        with pytest.raises(genlm.GenlmError):
            llm.next_token_logprobs_sync([])


@pytest.mark.parametrize("model_class", [AsyncVirtualLM, AsyncSGLTransformer])
def test_an_object_that_is_no_engine_is_refused(model_class, monkeypatch):
    for module in ("vllm", "sgl"):
        monkeypatch.setattr(f"genlm.backend.llm.{module}.installed_engine", lambda *_: None)
    with pytest.raises(TypeError, match=r"got a dict; expected .*from_name\(name\)"):
        model_class({})


def test_a_vllm_model_gives_the_unbatched_rows_by_name_and_by_object(tokenizer, tmp_path):
    model = make_model(head_dim=32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = run_program(sys.executable, VIRTUAL_LM, tmp_path)
    by_name, by_object = map(
        json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))
    )
    sequences = [[3, 4, 5], [3, 4, 5, 6], [200]]
    assert_right(torch.tensor(by_name["rows"]), model, *sequences)
    assert_right(torch.tensor(by_name["again"]), model, sequences[2])
    assert (by_name["hits"], by_name["entries"]) == (1, 2)
    assert by_name["model"] == "LlamaForCausalLM"
    assert 0 <= by_name["number"] < 256
    assert by_name["distinct"] > 1
    assert_right(torch.tensor(by_object["rows"]), model, *sequences)
    assert len(by_object["warnings"]) == 1
    assert "use AsyncVirtualLM.from_name" in by_object["warnings"][0]
    assert by_object["max_context"] == 47
    assert by_object["kv_bytes"] == 2**24


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", None, {}),
        ("cpu", 2**24, {"kv_cache_memory_bytes": 2**24}),
        ("cuda", None, {"gpu_memory_utilization": 0.05}),
        ("cuda", 2**24, {"kv_cache_memory_bytes": 2**24}),
    ],
)
def test_a_share_of_all_memory_is_not_asked_for_again_on_a_cpu(device, given, expected):
    """vLLM would refuse to start where other processes, or its own files, take too much."""
    recipe = recipe_of(vllm_config(device, given))
    sizes = {name for name in recipe.engine_opts if "memory" in name}
    assert {name: recipe.engine_opts[name] for name in sizes} == expected


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("revision", "v1"),
        ("tokenizer", "elsewhere"),
        ("trust_remote_code", True),
        ("quantization", "fp8"),
        ("hf_overrides", {"rope_theta": 5.0}),
    ],
)
def test_the_model_that_is_loaded_again_is_the_same(attribute, value):
    config = vllm_config("cpu", 2**24)
    setattr(config.model_config, attribute, value)
    assert recipe_of(config).engine_opts[attribute] == value


def test_settings_of_cache_and_weights_are_kept():
    config = vllm_config("cpu", 2**24)
    config.cache_config.cache_dtype, config.load_config.load_format = "fp8", "dummy"
    options = recipe_of(config).engine_opts
    assert (options["kv_cache_dtype"], options["load_format"]) == ("fp8", "dummy")


def vllm_config(device, cache_bytes):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            dtype=torch.float32,
            max_model_len=48,
            enforce_eager=True,
            revision=None,
            code_revision=None,
            tokenizer="m",
            tokenizer_revision=None,
            tokenizer_mode="auto",
            trust_remote_code=False,
            quantization=None,
            hf_overrides={},
        ),
        cache_config=SimpleNamespace(
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=cache_bytes,
            enable_prefix_caching=True,
            cache_dtype="auto",
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type=device),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
    )


def recipe_of(config):
    ended = SimpleNamespace(shutdown=lambda: None)
    with pytest.warns(DeprecationWarning, match=r"use AsyncVirtualLM\.from_name"):
        return recipe_of_vllm(SimpleNamespace(vllm_config=config, engine_core=ended))


def test_the_capture_of_older_versions_keeps_the_last_batch():
    capture = GlobalLogprobsCapture(device="cpu")
    logits = torch.randn(2, 5)
    assert capture.get_logprobs() is None
    assert capture.get_all_logprobs() is None
    assert capture.apply(logits) is logits
    capture.update_state(None)
    assert capture.is_argmax_invariant()
    expected = logits.log_softmax(-1)
    assert torch.equal(capture.get_logprobs(1), expected[1])
    capture.get_all_logprobs().fill_(0)  # a copy
    assert torch.equal(capture.get_all_logprobs(), expected)
    assert capture.get_logprobs(2) is None
    capture.clear()
    assert capture.get_logprobs() is None
