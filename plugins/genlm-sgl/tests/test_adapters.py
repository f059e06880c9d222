"""LoRA adapters: rows equal those of peft, and bad adapters are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from genlm import (
    AdapterError,
    Capability,
    Query,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm_sgl.conformance import TinyLlama

from .driving import collected, prompts_of

TOLERANCE = 1e-4
"""Maximum error of a log-probability. The largest measured error is 1.1e-5; the adapters change
log-probabilities by at least 3."""

NAMES = (None, "red", "blue")
PROMPTS = prompts_of(9, 1, 30)


@pytest.fixture
def adapted(build: Any, tiny: TinyLlama) -> Callable[..., Any]:
    """Function that builds an engine with both adapters."""

    def engine(**options: Any) -> Any:
        engine = build(enable_lora=True, max_lora_rank=8, **options)
        for name, path in tiny.adapters.items():
            engine.add_adapter(name, path)
        return engine

    return engine


def check(engine: Any, tiny: TinyLlama, names: Sequence[str | None] = NAMES) -> None:
    """Check the rows of all prompts and adapters, which are computed together."""
    pairs = [(prompt, name) for prompt in PROMPTS for name in names]
    for number, (prompt, name) in enumerate(pairs):
        engine.submit(Query(number, prompt, name))
    for row, pair in zip(collected(engine, range(len(pairs))), pairs, strict=True):
        assert isinstance(row, torch.Tensor), row
        assert float((row - tiny.logprobs(*pair)).abs().max()) <= TOLERANCE, pair


def test_contexts_of_several_adapters_are_answered_together(
    adapted: Any, tiny: TinyLlama
) -> None:
    check(adapted(), tiny)


def test_prefixes_are_kept_for_each_adapter_on_its_own(adapted: Any, tiny: TinyLlama) -> None:
    engine = adapted()
    [shared] = prompts_of(40)
    for name in NAMES:
        engine.cache_prefix(shared, name)
    computed = engine.statistics()["tokens_computed"]
    assert computed == 3 * 40
    for number, name in enumerate(NAMES):
        engine.submit(Query(number, (*shared, 5), name))
    rows = collected(engine, range(3))
    assert engine.statistics()["tokens_computed"] == computed + 3
    for row, name in zip(rows, NAMES, strict=True):
        assert float((row - tiny.logprobs((*shared, 5), name)).abs().max()) <= TOLERANCE


def test_more_adapters_than_sglang_has_buffers_for_take_turns(
    adapted: Any, tiny: TinyLlama
) -> None:
    engine = adapted(max_loras_per_batch=1)
    for _ in range(2):
        check(engine, tiny)


def test_an_adapter_can_be_added_while_others_are_asked(
    build: Any, tiny: TinyLlama, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = build(enable_lora=True)
    engine.submit(Query(0, PROMPTS[0]))
    engine.add_adapter("red", tiny.adapters["red"])
    [row] = collected(engine, [0])
    assert float((row - tiny.logprobs(PROMPTS[0])).abs().max()) <= TOLERANCE
    check(engine, tiny, [None, "red"])
    assert "".join(capfd.readouterr()) == ""


def test_a_removed_adapter_leaves_the_others_and_can_be_loaded_again(
    adapted: Any, tiny: TinyLlama
) -> None:
    engine = adapted()
    check(engine, tiny)
    engine.remove_adapter("red")
    check(engine, tiny, [None, "blue"])
    with pytest.raises(UnknownAdapterError):
        engine.remove_adapter("red")
    engine.add_adapter("red", tiny.adapters["red"])
    check(engine, tiny)


def test_without_enable_lora_the_error_says_what_to_do(build: Any, tiny: TinyLlama) -> None:
    import genlm

    options = {"device": "cpu", "max_total_tokens": 4096}
    with (
        genlm.load_model(tiny.path, "sgl", engine_opts=options) as lm,
        pytest.raises(UnsupportedCapabilityError, match="'enable_lora': True"),
    ):
        lm.load_lora(tiny.adapters["red"], "red")
    engine = build()
    assert Capability.LORA not in engine.capabilities
    with pytest.raises(UnsupportedCapabilityError, match="'enable_lora': True"):
        engine.add_adapter("red", tiny.adapters["red"])


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def of_another(modules: Sequence[str] = ("q_proj", "v_proj"), **settings: Any) -> Any:
    """Create an adapter of another model or with other modules."""

    def make(folder: Path) -> None:
        llama = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64}
        llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, **settings}
        config = transformers.LlamaConfig(num_key_value_heads=2, **llama)
        model = transformers.AutoModelForCausalLM.from_config(config)
        lora_config = peft.LoraConfig(r=3, target_modules=list(modules), task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, lora_config)
        adapted.save_pretrained(folder, save_embedding_layers=False)

    return make


def truncated(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])


def renamed(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"down_proj", b"xown_proj"))


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "absent": (shutil.rmtree, "is not a folder with adapter_config.json"),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "is not a folder with",
    ),
    "garbage": (lambda f: (f / "adapter_config.json").write_text("{"), "not valid JSON"),
    "no settings": (lambda f: (f / "adapter_config.json").write_text("[]"), "no settings"),
    "another type": (edited(peft_type="PREFIX_TUNING"), "of type PREFIX_TUNING"),
    "dora": (edited(use_dora=True), "has use_dora=True"),
    "rslora": (edited(use_rslora=True), "has use_rslora=True"),
    "bias": (edited(bias="all"), "has bias='all'"),
    "pissa": (edited(init_lora_weights="pissa"), "has init_lora_weights='pissa'"),
    "a rank of its own": (edited(rank_pattern={"q_proj": 5}), "has rank_pattern"),
    "a setting of the future": (edited(use_newlora={"depth": 2}), "has use_newlora"),
    "high rank": (edited(r=16), "rank 16 .*max_lora_rank"),
    "truncated": (truncated, "cannot serve"),
    "unknown weights": (renamed, "skipped"),
    "queries alone": (of_another(["q_proj"]), "needs both q_proj and v_proj"),
    "keys and values alone": (of_another(["k_proj", "v_proj"]), "needs both q_proj and v_proj"),
    "up alone": (of_another(["up_proj"]), "up_proj needs gate_proj"),
    "embeddings": (of_another(["embed_tokens"]), "cannot serve"),
    "narrow base": (of_another(hidden_size=16), "does not match weight shape"),
    "deep base": (of_another(num_hidden_layers=3), "cannot serve"),
}


def test_a_bad_adapter_is_refused_and_changes_nothing(
    adapted: Any, tiny: TinyLlama, tmp_path: Path
) -> None:
    engine = adapted()
    check(engine, tiny)
    for kind, (spoil, message) in BAD.items():
        folder = tmp_path / kind
        shutil.copytree(tiny.adapters["red"], folder)
        spoil(folder)
        with pytest.raises(AdapterError, match=message):
            engine.add_adapter("bad", str(folder))
        engine.clear_prefix_cache()
        check(engine, tiny)
    with pytest.raises(AdapterError, match="'red' is loaded already"):
        engine.add_adapter("red", tiny.adapters["blue"])
    check(engine, tiny)
