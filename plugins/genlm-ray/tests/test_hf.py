"""Replicas of hf compute the same rows, scores and reductions as hf in this process."""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

import genlm
from genlm.testing import TinyModel

README = Path(__file__).parents[1] / "README.md"
OPTIONS = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel(tmp_path_factory.mktemp("tiny") / "model", adapters=("red", "blue"))


@pytest.fixture(scope="module")
def hf(model):
    with genlm.load_model(str(model.path), "hf", **OPTIONS) as llm:
        for name, path in model.adapters.items():
            llm.load_lora(path, name)
        yield llm


class Spread(genlm.Reduction):
    """User-defined reduction."""

    @classmethod
    def compute(cls, rows, requests):
        return rows.std(-1).tolist()


def test_replicas_answer_what_the_engine_does(load, model, hf, pids, monkeypatch):
    llm = load("hf", str(model.path), replicas=1, engine_opts=OPTIONS)
    assert {"lora", "prefix_cache", "score"} == set(llm.capabilities)
    with pytest.raises(genlm.UnsupportedCapabilityError, match="close this model and load the"):
        llm.update_weights({})
    for name, path in model.adapters.items():
        llm.load_lora(path, name)
    prompts = [[3 + i, 5, 7 + i % 3, 9] for i in range(12)]
    llm.pin_prefix(prompts[0])
    for name in (None, "red", "blue"):
        torch.testing.assert_close(
            llm.batch_next_token_logprobs_sync(prompts, lora_name=name),
            hf.batch_next_token_logprobs_sync(prompts, lora_name=name),
            atol=1e-5,
            rtol=0,
        )
    for scores, expected in zip(
        llm.batch_score_sync(prompts), hf.batch_score_sync(prompts), strict=True
    ):
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    drawn = llm.batch_draw_sync(prompts, masks=[[4, 8, 15]] * 12, seed=range(12))
    expected = hf.batch_draw_sync(prompts, masks=[[4, 8, 15]] * 12, seed=range(12))
    assert [draw.token_id for draw in drawn] == [draw.token_id for draw in expected]
    top = llm.top_tokens_sync(prompts[0], 4)
    assert top.token_ids.tolist() == hf.top_tokens_sync(prompts[0], 4).token_ids.tolist()
    assert llm.sample_sync(prompts[1], max_tokens=5, seed=2) == hf.sample_sync(
        prompts[1], max_tokens=5, seed=2
    )
    spread = llm.reduce_sync(prompts[0], Spread())
    assert spread == pytest.approx(hf.reduce_sync(prompts[0], Spread()), abs=1e-4)
    only_here = types.ModuleType("only_here")  # not importable in the replicas
    only_here.Elsewhere = type("Elsewhere", (Spread,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    for reduced in (llm.reduce_sync, llm.reduce_text_sync):
        with pytest.raises(genlm.EvaluationError, match=r"loaded in a replica.*only_here"):
            reduced(prompts[0], only_here.Elsewhere())
    rows = [llm.next_token_logprobs_sync([5, 6]) for _ in range(2)]
    rows[0].zero_()  # rows belong to their callers
    torch.testing.assert_close(rows[1], hf.next_token_logprobs_sync([5, 6]), atol=1e-5, rtol=0)
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows)

    # A restarted replica loads adapters and prefixes before it receives queries.
    [killed] = pids(llm)
    os.kill(killed, signal.SIGKILL)
    torch.testing.assert_close(
        llm.batch_next_token_logprobs_sync(prompts, lora_name="red"),
        hf.batch_next_token_logprobs_sync(prompts, lora_name="red"),
        atol=1e-5,
        rtol=0,
    )
    assert pids(llm) != [killed]
    llm.clear_kv_cache()


def test_the_readme_runs():
    """With replicas of `reference`: those of hf start slowly and are compared above."""
    program = README.read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0]
    program = program.replace("replicas=2)", "replicas=2, resources={'num_cpus': 0.1})")
    assert 'engine="hf"' in program
    program = program.replace('engine="hf"', 'engine="reference"')
    names: dict[str, object] = {}
    exec(program, names)
    assert names["rows"].shape == (2, names["llm"].vocab_size)
