"""LoRA adapters by published names: by request, given again, taken away."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
import transformers
from packaging.version import Version

import genlm
from genlm.backend import AsyncTransformer

from .tiny import alone, make_model

IDS = [10, 11, 12]


def save_adapter(folder: Path, seed: int) -> torch.Tensor:
    """Save an adapter of the tiny model; return the row that peft's own model gives."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(make_model(), config).eval()
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    return alone(copy.deepcopy(adapted).merge_and_unload(), IDS)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Folders with the rows of the adapters in them."""
    folders = [tmp_path_factory.mktemp(name) for name in ("red", "blue")]
    return [(str(folder), save_adapter(folder, seed)) for seed, folder in enumerate(folders)]


def close(row, expected):
    return torch.allclose(row, expected, atol=1e-4, rtol=0)


def test_an_adapter_is_asked_for_by_request(llm, adapters):
    (red, red_row), (blue, blue_row) = adapters
    llm.add_new_lora(red)  # as "lora_1"
    llm.add_new_lora(blue, lora_name="blue")

    async def main():
        return await asyncio.gather(
            llm.next_token_logprobs(IDS),
            llm.next_token_logprobs(IDS, "lora_1"),
            llm.next_token_logprobs(IDS, lora_name="blue"),
            llm.batch_next_token_logprobs([IDS], "blue"),
        )

    base, by_position, by_name, batch = asyncio.run(main())
    assert close(base, alone(make_model(), IDS))
    assert close(by_position, red_row)
    assert close(by_name, blue_row)
    assert close(batch[0], blue_row)
    assert close(llm.next_token_logprobs_uncached(IDS, "blue"), blue_row)
    assert close(llm.with_lora("blue").next_token_logprobs_sync(IDS), blue_row)


def test_samples_are_of_their_adapter(llm, adapters):
    (red, red_row), _ = adapters
    llm.add_new_lora(red, "red")
    drawn = asyncio.run(llm.sample(IDS, 1, [], temperature=0, lora_name="red"))
    assert drawn == [int(red_row.argmax())]


def test_a_name_given_again_stands_for_the_new_adapter(llm, adapters):
    (red, red_row), (blue, blue_row) = adapters
    llm.add_new_lora(red, "poet")
    assert close(llm.next_token_logprobs_sync(IDS, "poet"), red_row)
    llm.cache_kv(IDS[:2], "poet")
    llm.add_new_lora(blue, "poet")
    assert close(llm.next_token_logprobs_sync(IDS, "poet"), blue_row)


def test_an_adapter_can_be_taken_away(llm, adapters):
    (red, red_row), _ = adapters
    llm.add_new_lora(red, "poet")
    llm.remove_lora("poet")
    with pytest.raises(ValueError, match=r"no adapter named 'poet'\. Loaded: none"):
        llm.next_token_logprobs_sync(IDS, lora_name="poet")
    with pytest.raises(genlm.UnknownAdapterError):
        llm.remove_lora("poet")
    llm.add_new_lora(red, "poet")
    assert close(llm.next_token_logprobs_sync(IDS, lora_name="poet"), red_row)
    assert close(llm.next_token_logprobs_sync(IDS), alone(make_model(), IDS))


def test_an_unknown_adapter_is_an_error_that_lists_those_there_are(llm, adapters):
    llm.add_new_lora(adapters[0][0], "red")
    with pytest.raises(ValueError, match=r"no adapter named 'rde'\. Loaded: red\."):
        llm.next_token_logprobs_sync(IDS, lora_name="rde")


def test_there_is_no_adapter_for_all_requests(llm):
    with pytest.raises(RuntimeError, match="pass lora_name= to each call"):
        llm.set_lora("path", "red")
    with pytest.raises(RuntimeError, match="omit lora_name"):
        llm.clear_lora()


def test_an_adapter_is_found_on_the_hub(llm, adapters, tmp_path, monkeypatch):
    """In the local cache of the hub, laid out as the hub's client does."""
    folder, row = adapters[0]
    repository = tmp_path / "models--someone--red"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    llm.add_new_lora("someone/red", "red")
    assert close(llm.next_token_logprobs_sync(IDS, "red"), row)


def test_an_adapter_that_is_nowhere_is_an_error(llm):
    with pytest.raises(genlm.AdapterError, match="no such folder"):
        llm.add_new_lora("someone/nothing", "red")


def test_the_users_model_is_bare_again_afterwards(model, tokenizer, adapters):
    names = {name for name, _ in model.named_parameters()}
    with AsyncTransformer(model, tokenizer) as llm:
        llm.add_new_lora(adapters[0][0], "red")
        llm.next_token_logprobs_sync(IDS, "red")
    assert {name for name, _ in model.named_parameters()} == names


# -- models that come with adapters -------------------------------------------------------


@pytest.fixture
def peft_model(adapters):
    """A `PeftModel` of both adapters, the blue one switched on."""
    model = peft.PeftModel.from_pretrained(make_model(), adapters[0][0], "red")
    model.load_adapter(adapters[1][0], "blue")
    model.set_adapter("blue")
    return model


def test_a_peft_model_is_served_as_it_is_handed_over(peft_model, tokenizer, adapters):
    (red, red_row), (_, blue_row) = adapters
    with AsyncTransformer(peft_model, tokenizer) as llm:
        assert llm.model is peft_model
        assert close(llm.next_token_logprobs_sync(IDS), blue_row)
        assert close(asyncio.run(llm.next_token_logprobs(IDS)), blue_row)
        assert close(llm.next_token_logprobs_uncached(IDS), blue_row)
        assert close(llm.next_token_logprobs_sync(IDS, "red"), red_row)
        llm.add_new_lora(red, "poet")
        assert close(llm.next_token_logprobs_sync(IDS, "poet"), red_row)
        assert close(llm.next_token_logprobs_uncached(IDS), blue_row)
        drawn = asyncio.run(llm.sample(IDS, 1, [], temperature=0, lora_name="red"))
        assert drawn == [int(red_row.argmax())]
    assert list(peft_model.peft_config) == ["red", "blue"]
    assert close(alone(peft_model, IDS), blue_row)


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24")
    and Version(peft.__version__) < Version("0.22"),
    reason="transformers' load_adapter needs peft 0.22 from transformers 5.24 on",
)
def test_adapters_that_transformers_loaded_are_asked_for_by_name(tokenizer, adapters):
    (red, red_row), (blue, blue_row) = adapters
    model = make_model()
    model.load_adapter(red, "red")
    with AsyncTransformer(model, tokenizer) as llm:
        assert close(llm.next_token_logprobs_sync(IDS), alone(make_model(), IDS))
        assert close(llm.next_token_logprobs_sync(IDS, "red"), red_row)
        llm.add_new_lora(blue, "red")
        assert close(llm.next_token_logprobs_sync(IDS, "red"), blue_row)
        llm.remove_lora("red")
        with pytest.raises(genlm.UnknownAdapterError, match="Loaded: none"):
            llm.next_token_logprobs_sync(IDS, "red")
        assert close(llm.next_token_logprobs_uncached(IDS), alone(make_model(), IDS))


def test_an_adapter_of_the_model_can_be_taken_away(peft_model, tokenizer):
    with AsyncTransformer(peft_model, tokenizer) as llm:
        llm.remove_lora("red")
        with pytest.raises(genlm.UnknownAdapterError, match="Loaded: blue"):
            llm.next_token_logprobs_sync(IDS, lora_name="red")


def test_a_view_has_the_rows_of_its_adapter(llm, adapters):
    [(red, red_row), _] = adapters
    llm.add_new_lora(red, "red")
    view = llm.lora_view("red")
    assert close(view.next_token_logprobs_sync(IDS), red_row)
    assert close(asyncio.run(view.batch_next_token_logprobs([IDS]))[0], red_row)
    assert llm.lora_view(None) is llm
    assert not close(llm.next_token_logprobs_sync(IDS), red_row)
    with pytest.raises(genlm.UnknownAdapterError):
        llm.lora_view("nobody")
