"""`AsyncMlxLM` on MLX itself, by name and by object."""

from __future__ import annotations

import asyncio

import huggingface_hub
import mlx_lm
import pytest
import torch

import genlm
from genlm.backend import load_model_by_name
from genlm.backend.llm import AsyncLM, AsyncMlxLM
from genlm.testing import TinyModel

RED, BLUE = [10, 11, 12, 13], [90, 91]
SEQUENCES = [RED, BLUE, [*RED, 5], [*RED, 6], [7] * 40, [3]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyModel(tmp_path_factory.mktemp("mlx") / "llama", adapters=["first", "second"])


def assert_right(found, tiny, *sequences, adapter=None):
    expected = torch.stack([tiny.logprobs(ids, adapter) for ids in sequences]).float()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_model_by_name_gives_the_unbatched_rows(tiny):
    options = {"timeout": 0.1, "prefill_step_size": 16, "cache_size": 3}
    with load_model_by_name(str(tiny.path), backend="mlx", llm_opts=options) as llm:
        assert type(llm) is AsyncMlxLM
        assert isinstance(llm, AsyncLM)
        assert_right(llm.batch_next_token_logprobs_sync(SEQUENCES), tiny, *SEQUENCES)
        rows = asyncio.run(llm.batch_next_token_logprobs(SEQUENCES[::-1]))
        assert llm.device == rows.device
        assert_right(rows, tiny, *SEQUENCES[::-1])
        assert (llm.timeout, llm.prefill_step_size, len(llm.cache)) == (0.1, 16, 3)
        llm.clear_cache()
        assert len(llm.cache) == 0


def test_a_model_by_object_keeps_its_adapters_apart(tiny):
    model, tokenizer = mlx_lm.load(str(tiny.path))
    with pytest.warns(genlm.UnverifiedModelWarning):  # the objects do not contain the config
        llm = AsyncMlxLM(model, tokenizer, cache_opts={"move_to_cpu": True})
    with llm:
        for name in ("first", "second"):
            llm.add_new_lora(tiny.adapters[name], name)
        for name in ("first", None, "second"):
            row = llm.next_token_logprobs_sync(RED, lora_name=name)
            assert_right(row[None], tiny, RED, adapter=name)
        llm.add_new_lora(tiny.adapters["second"], "first")  # rebinds the name
        row = llm.next_token_logprobs_sync(RED, lora_name="first")
        assert_right(row[None], tiny, RED, adapter="second")
        llm.remove_lora("second")
        with pytest.raises(ValueError, match="second"):
            llm.next_token_logprobs_sync(RED, lora_name="second")


def test_an_adapter_is_found_by_its_hub_id(tiny, monkeypatch):
    hub = {"org/poet": tiny.adapters["first"]}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.__getitem__)
    with AsyncMlxLM.from_name(str(tiny.path)) as llm:
        llm.add_new_lora("org/poet", "poet")
        row = llm.next_token_logprobs_sync(RED, lora_name="poet")
        assert_right(row[None], tiny, RED, adapter="first")
        with pytest.raises(genlm.AdapterError, match="'org/none': there is no such folder"):
            llm.add_new_lora("org/none", "none")


def test_it_samples_from_its_rows(tiny):
    with AsyncMlxLM.from_name(str(tiny.path)) as llm:
        drawn = asyncio.run(llm.sample(RED, 5, [], temperature=0, seed=3))
        greedy = list(RED)
        for _ in range(5):
            greedy.append(int(tiny.logprobs(greedy).argmax()))
        assert drawn == greedy[len(RED) :]
