"""Models with wrong rows are refused when they are loaded, and the process is free again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import genlm
from genlm.testing import TinyModel, families
from genlm_vllm import forward_check
from genlm_vllm.fallback_attention import check_fallback_attention

from .traffic import largest_error, prompts

BROKEN_TOKEN = 290
OPTIONS = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 8}
PROMPTS = prompts(5, 40)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TinyModel:
    return TinyModel.of(tmp_path / "model", families(64)[request.param])


@pytest.fixture
def llama(tmp_path: Path) -> TinyModel:
    return TinyModel.of(tmp_path / "llama", families(64)["llama"])


def load(model: TinyModel, *, multiprocess: bool = False, **options: Any) -> genlm.AsyncLM:
    """Load a model without an output cache; unverified families are refused."""
    return genlm.load_model(
        model.path,
        "vllm",
        engine_opts=OPTIONS | options,
        multiprocess=multiprocess,
        unverified="refuse",
        output_cache=genlm.OutputCache(0),
    )


def error_of(lm: genlm.AsyncLM, model: TinyModel) -> float:
    with lm:
        return largest_error(model, lm.batch_next_token_logprobs_sync(PROMPTS), PROMPTS)


@pytest.mark.parametrize("model", ["mistral with a window of 16"], indirect=True)
def test_a_window_that_vllm_leaves_out_is_refused(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.attention import Attention

    original = Attention.__init__

    def without_window(layer: Any, *arguments: Any, **options: Any) -> None:
        options["cache_config"].sliding_window = options["per_layer_sliding_window"] = None
        original(layer, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "__init__", without_window)
        with pytest.raises(genlm.ModelLoadError, match=r"windows.*none in any.* 16 in all"):
            load(model)
        with load(model, max_model_len=16) as lm:  # no context is longer
            assert lm.max_context == 15
    assert error_of(load(model), model) <= 1e-4


@pytest.mark.parametrize("model", ["llama with dynamic rope"], indirect=True)
def test_contexts_longer_than_the_frequencies_hold_for_are_refused(model: TinyModel) -> None:
    with pytest.raises(genlm.ModelLoadError, match=r"dynamic rotary.* at most 16"):
        load(model, max_model_len=17)
    with load(model, max_model_len=12) as lm:
        assert lm.max_context == 11


@pytest.mark.parametrize("model", ["mamba2"], indirect=True)
def test_prefixes_of_recurrent_models_are_not_cached(model: TinyModel) -> None:
    with pytest.raises(genlm.ModelLoadError, match="recurrent layers"):
        load(model, enable_prefix_caching=True)
    with load(model) as lm:
        assert genlm.Capability.PREFIX_CACHE not in lm.capabilities


def test_an_implementation_that_was_not_compared_is_unverified(llama: TinyModel) -> None:
    with pytest.raises(genlm.ModelLoadError, match=r"Llama\w+ by Transformers.*not verified"):
        load(llama, model_impl="transformers")
    options = OPTIONS | {"model_impl": "transformers"}
    with pytest.warns(genlm.UnverifiedModelWarning, match=r"vLLM .*by Transformers"):
        lm = genlm.load_model(llama.path, "vllm", engine_opts=options)
    assert error_of(lm, llama) <= 1e-4
    with pytest.raises(ValueError, match="unverified='ask'; expected 'warn' or 'refuse'"):
        genlm.load_model("no folder", "vllm", unverified="ask")  # before it loads a model
    assert error_of(load(llama), llama) <= 1e-4


def test_a_model_on_a_device_without_a_table_is_compared_when_it_is_loaded(
    llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm_vllm.model_checks.has_compared_kernels", lambda: False)
    with pytest.warns(genlm.UnverifiedModelWarning, match="Llama.* with CPU_ATTN"):
        genlm.load_model(llama.path, "vllm", engine_opts=OPTIONS).close()
    assert error_of(load(llama), llama) <= 1e-4
    load(llama, dtype="bfloat16").close()
    other = TinyModel.of(tmp_path / "other", families(64)["qwen2"])
    rows = forward_check._reference_rows

    def of_another(config: Any, *arguments: Any) -> Any:
        return rows(SimpleNamespace(model=str(other.path), **CONFIG), *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(forward_check, "_reference_rows", of_another)
        with pytest.raises(genlm.ModelLoadError, match=r"row of 1 tokens diverges by"):
            load(llama)
        patch.setattr(forward_check, "free_memory_bytes", lambda: 1000)
        with pytest.raises(genlm.ModelLoadError, match=r"0.0 GiB are free.*unverified='warn'"):
            load(llama)
    assert error_of(load(llama), llama) <= 1e-4


CONFIG = {"revision": None, "trust_remote_code": False}


@pytest.mark.parametrize("model", ["gpt_neox"], indirect=True)
def test_transformers_classes_stay_usable_while_vllm_serves_them(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = transformers.GPTNeoXModel
    cls._can_set_experts_implementation()  # which transformers caches in the class
    before = cls.__bases__, dict(vars(cls))
    with load(model) as lm:
        assert (cls.__bases__, dict(vars(cls))) == before
        rows = lm.batch_next_token_logprobs_sync(PROMPTS)
        assert largest_error(model, rows, PROMPTS) <= 1e-4  # a model of the same class
    with monkeypatch.context() as patch:
        patch.setattr("vllm.model_executor.models.transformers.base.Base.init_parameters", None)
        with pytest.raises(genlm.ModelLoadError, match="not callable"):
            load(model)
    assert (cls.__bases__, dict(vars(cls))) == before


@pytest.mark.parametrize("multiprocess", [False, True])
def test_the_reason_why_no_row_can_be_computed_reaches_the_message(
    multiprocess: bool, tmp_path: Path, llama: TinyModel
) -> None:
    narrow = TinyModel.of(tmp_path / "narrow", families(16)["llama"])
    with pytest.raises(genlm.ModelLoadError, match=r"first row failed.*head.*16"):
        load(narrow, multiprocess=multiprocess)
    assert error_of(load(llama), llama) <= 1e-4


def test_the_reason_why_a_process_cannot_load_reaches_the_message(tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, families(64)["lfm2"])
    with pytest.raises(genlm.ModelLoadError, match=r"no attribute 'conv_dim'"):
        load(model, multiprocess=True)


@pytest.fixture
def broken(llama: TinyModel) -> TinyModel:
    """A Llama whose embedding of one token is NaN; the oracle has the original."""
    from safetensors.torch import load_file, save_file

    llama.logprobs(PROMPTS[0])  # loads it
    file = llama.path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][BROKEN_TOKEN] = torch.nan
    save_file(weights, file.with_suffix(".new"), metadata={"format": "pt"})
    file.with_suffix(".new").replace(file)  # the oracle may have mapped the other
    return llama


@pytest.mark.parametrize("multiprocess", [False, True])
def test_rows_that_are_no_distributions_fail_only_their_own_requests(
    broken: TinyModel, multiprocess: bool
) -> None:
    good = [tuple(t for t in ids if t != BROKEN_TOKEN) for ids in prompts(3, 17, 31, 40, 55)]
    bad = [(*ids[:9], BROKEN_TOKEN, *ids[9:]) for ids in good]
    with load(broken, multiprocess=multiprocess) as lm:
        for _ in range(4):  # blocks of the cache are used again
            for ids in bad:
                with pytest.raises(genlm.EvaluationError, match="NaN"):
                    lm.next_token_logprobs_sync(ids)
                with pytest.raises(genlm.EvaluationError, match="NaN"):
                    lm.sample_sync(ids, max_tokens=3, temperature=0.0)
            rows = lm.batch_next_token_logprobs_sync(good)
            assert largest_error(broken, rows, good) <= 1e-4
        lm.clear_kv_cache()  # for a place for each member
        population = lm.population(good[1:3])
        population.next_token_logprobs_sync()
        with pytest.raises(genlm.PopulationError, match="NaN"):
            population.extend([BROKEN_TOKEN] * 2).next_token_logprobs_sync()
        rows = population.next_token_logprobs_sync()
        assert largest_error(broken, rows, good[1:3]) <= 1e-4


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("doge", "DogeAttention passes a custom attention mask, which vLLM ignores"),
        ("jetmoe", "JetMoeAttention computes keys of 512 elements a token"),
    ],
    indirect=["model"],
)
def test_attention_that_vllm_computes_otherwise_is_refused(
    model: TinyModel, reason: str
) -> None:
    with (
        pytest.warns(genlm.UnverifiedModelWarning),
        pytest.raises(genlm.ModelLoadError, match=reason),
    ):
        genlm.load_model(model.path, "vllm", engine_opts=OPTIONS)


def test_masks_are_refused_by_latent_attention() -> None:
    """No model of the tests uses it: vLLM has implementations of all that have tiny models."""
    check_fallback_attention()
    check_fallback_attention()
    attention = ALL_ATTENTION_FUNCTIONS["vllm_mla"]
    assert not hasattr(attention.__wrapped__, "__wrapped__")
    states = [torch.zeros(1, 1, 1, 4)] * 3
    with pytest.raises(NotImplementedError, match="Linear passes a custom attention mask"):
        attention(torch.nn.Linear(1, 1), *states, torch.zeros(1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("apertus", r"stores \S+ in bfloat16, which is less precise than the model's dtype"),
        ("bloom", "computes the exact GELU"),
        (
            "cohere2",
            "sliding windows that differ from its config: 5 in 3 layers instead of 4 in 3",
        ),
        ("gemma3n_text", "omits the token embeddings of each layer"),
    ],
    indirect=["model"],
)
def test_models_that_vllm_builds_otherwise_than_defined_are_refused(
    model: TinyModel, reason: str
) -> None:
    with pytest.raises(genlm.ModelLoadError, match=reason):
        load(model)
