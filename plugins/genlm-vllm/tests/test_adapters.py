"""Loading LoRA adapters: bad adapters are refused and have no effect.

Models of peft are the oracle.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from genlm import AdapterError, AdapterLimitError, Capability, UnknownAdapterError
from genlm_vllm.conformance import TinyLlama

from .traffic import finish, largest_error, prompts, rows, submit


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> Iterator[Any]:
    """An engine for four adapters and ranks up to 8."""
    engine = tiny.engine(max_loras=4, max_lora_rank=8)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    yield engine
    engine.close()


def check(engine: Any, tiny: TinyLlama) -> None:
    """Compare rows of the base model and the adapters, with and without the prefix cache."""
    sequences = prompts(70, 3, 33)
    for name in (None, "red", "blue", None):
        assert largest_error(tiny, rows(engine, sequences, name), sequences, name) <= 1e-4, name


def edited(change: dict[str, Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))

    return edit


def other_base(**settings: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        llama = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
        llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32} | settings
        base = transformers.LlamaConfig(num_key_value_heads=2, **llama)
        save_adapter(transformers.AutoModelForCausalLM.from_config(base), folder, ["q_proj"])

    return make


def save_adapter(model: Any, folder: Path, modules: list[str], **settings: Any) -> None:
    config = peft.LoraConfig(r=3, target_modules=modules, task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)


def truncated(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "absent": (shutil.rmtree, "is not a folder with adapter_config.json"),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "is not a folder with",
    ),
    "garbage": (lambda f: (f / "adapter_config.json").write_text("{"), "not valid JSON"),
    "no settings": (lambda f: (f / "adapter_config.json").write_text("[]"), "no settings"),
    "another type": (edited({"peft_type": "PREFIX_TUNING"}), "of type PREFIX_TUNING"),
    "dora": (edited({"use_dora": True}), "has use_dora=True"),
    "bias": (edited({"bias": "all"}), "has bias='all'"),
    "pissa": (edited({"init_lora_weights": "pissa"}), "has init_lora_weights='pissa'"),
    "blocks": (edited({"use_bdlora": {"nblocks": 2}}), "has use_bdlora"),
    "high rank": (edited({"r": 16}), "rank 16 is greater than max_lora_rank"),
    "one high rank": (edited({"rank_pattern": {"q_proj": 16}}), "rank"),
    "truncated": (truncated, "weights cannot be read"),
    "narrow base": (other_base(hidden_size=16), "wide, the model's layer 32"),
    "deep base": (other_base(num_hidden_layers=3), "the model has no .*layers.2"),
    "other modules": (edited({"target_modules": ["embed_q"]}), ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_is_refused_and_changes_nothing(
    engine: Any, tiny: Any, tmp_path: Path, kind: str
) -> None:
    spoil, message = BAD[kind]
    folder = tmp_path / "bad"
    shutil.copytree(tiny.adapters["red"], folder)
    spoil(folder)
    if not message:
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes().replace(b"q_proj", b"x_proj"))
        message = "cannot serve"
    with pytest.raises(AdapterError, match=message):
        engine.add_adapter("bad", str(folder))
    check(engine, tiny)
    assert engine._adapters.names == ("red", "blue")


def test_a_name_keeps_its_adapter(engine: Any, tiny: Any) -> None:
    with pytest.raises(AdapterError, match="'red' is loaded already"):
        engine.add_adapter("red", tiny.adapters["blue"])
    check(engine, tiny)


def test_ranks_and_alphas_of_single_layers_are_kept(
    engine: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path)
    patterns = {
        "rank_pattern": {"q_proj": 5, r"layers\.0\.mlp\.down_proj": 2},
        "alpha_pattern": {r"layers\.1\..*down_proj": 20, "q_proj": 3},
    }
    save_adapter(model, tmp_path, ["q_proj", "k_proj", "down_proj"], **patterns)
    monkeypatch.setitem(tiny.adapters, "uneven", str(tmp_path))
    engine.add_adapter("uneven", str(tmp_path))
    sequences = prompts(40, 9)
    assert largest_error(tiny, rows(engine, sequences, "uneven"), sequences, "uneven") <= 1e-4
    check(engine, tiny)


def test_scores_have_the_output_embedding_of_their_adapter(
    engine: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft saves the embedding too
        save_adapter(model, tmp_path, ["q_proj", "lm_head"])
    monkeypatch.setitem(tiny.adapters, "head", str(tmp_path))
    engine.add_adapter("head", str(tmp_path))
    texts = prompts(40, 9, 20)
    names = ("head", None, "red")
    queries = [
        submit(engine, ids[:-1], name, targets=ids[2:]) for name in names for ids in texts
    ]
    queries += [submit(engine, ids, "head") for ids in texts]
    results = finish(engine, queries)
    assert largest_error(tiny, results[9:], texts, "head") <= 1e-4
    for query, scores in zip(queries, results[:9], strict=False):
        ids = (*query.token_ids, query.targets[-1])
        for place in (2, len(ids) // 2, len(ids) - 1):
            expected = tiny.logprobs(ids[:place], query.adapter)[ids[place]]
            assert abs(float(scores.logprobs[place - 2] - expected)) <= 1e-4, query.adapter
    engine.remove_adapter("head")


def test_as_many_adapters_as_asked_for_leave_the_base_model_alone(
    engine: Any, tiny: Any, tmp_path: Path
) -> None:
    """On the CPU base requests go through the last slot, which no adapter may get."""
    copies = [f"copy {number}" for number in range(4 - len(engine._adapters.names))]
    for name in copies:
        shutil.copytree(tiny.adapters["red"], tmp_path / name)
        engine.add_adapter(name, str(tmp_path / name))
    sequences = prompts(40, 9)
    originals = dict.fromkeys(copies, "red") | {"blue": "blue", None: None}
    queries = [
        submit(engine, ids, name) for name in originals for ids in sequences
    ]  # one batch
    results = finish(engine, queries)
    for place, (name, like) in enumerate(originals.items()):
        rows_of_adapter = results[2 * place : 2 * place + 2]
        assert largest_error(tiny, rows_of_adapter, sequences, like) <= 1e-4, name
    with pytest.raises(
        AdapterLimitError, match=r"4 adapters are loaded or still in use.*max_loras"
    ):
        engine.add_adapter("fifth", tiny.adapters["blue"])
    shutil.rmtree(tmp_path)  # never read again
    assert largest_error(tiny, rows(engine, sequences, copies[-1]), sequences, "red") <= 1e-4
    for name in copies:
        engine.remove_adapter(name)
    with pytest.raises(UnknownAdapterError):
        engine.remove_adapter(copies[0])
    engine.add_adapter("fifth", tiny.adapters["blue"])
    assert largest_error(tiny, rows(engine, sequences, "fifth"), sequences, "blue") <= 1e-4
    engine.remove_adapter("fifth")
    check(engine, tiny)


def test_an_engine_without_lora_says_how_to_get_it(tiny: Any, engine: Any) -> None:
    assert Capability.LORA in engine.capabilities
    other = tiny.engine(lora=False, multiprocess=True)
    try:
        assert Capability.LORA not in other.capabilities
        with pytest.raises(AdapterError, match="'enable_lora': True"):
            other.add_adapter("red", tiny.adapters["red"])
        assert "'enable_lora': True" in other.capability_hints[Capability.LORA]
    finally:
        other.close()


def test_adapters_of_layers_without_slots_are_refused(tiny: Any, tmp_path: Path) -> None:
    engine = tiny.engine(multiprocess=True, lora_target_modules=["down_proj"])
    try:
        with pytest.raises(
            AdapterError, match=r"without its weights of .*q_proj.*=\['down_proj'\]"
        ):
            engine.add_adapter("red", tiny.adapters["red"])
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path)
        save_adapter(model, tmp_path, ["down_proj"])
        engine.add_adapter("down", str(tmp_path))
        assert engine._adapters.names == ("down",)
    finally:
        engine.close()
