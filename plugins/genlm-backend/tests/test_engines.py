"""Classes of other engines: what they ask plugins for, and what they say without them."""

from __future__ import annotations

import pytest
import torch

import genlm
from genlm.backend import AsyncVirtualLM, load_model_by_name
from genlm.backend.llm import AsyncLM, AsyncMlxLM, AsyncSGLTransformer


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
        ("vllm", r"AsyncVirtualLM needs .*'vllm'.*pip install genlm-vllm, or .* in a clone"),
        ("sgl", r"AsyncSGLTransformer needs .*'sgl'.*pip install genlm-sgl, or .* in a clone"),
        ("mlx", r"AsyncMlxLM needs .*'mlx'.*pip install genlm-mlx, or .* in a clone"),
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
def test_an_engine_that_exists_is_refused(model_class):
    with pytest.raises(
        TypeError, match=r"got a dict; .*\.from_name\(name, engine_opts=\.\.\.\)"
    ):
        model_class({})
