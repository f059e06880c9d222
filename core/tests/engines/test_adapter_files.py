"""Folders of adapters are read, or refused with what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from genlm import AdapterError
from genlm.plugin import read_lora_config


def write(folder: Path, config: str, weights: str = "adapter_model.safetensors") -> Path:
    (folder / "adapter_config.json").write_text(config)
    (folder / weights).touch()
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_settings_are_read_beside_any_kind_of_weights(tmp_path: Path, suffix: str) -> None:
    config = {"peft_type": "LORA", "r": 3, "bias": "none"}
    write(tmp_path, json.dumps(config), f"adapter_model.{suffix}")
    assert read_lora_config("poet", tmp_path, engine="mine") == config
    assert read_lora_config("poet", str(tmp_path), engine="mine")["r"] == 3


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.bin"])
def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, missing: str) -> None:
    write(tmp_path, "{}", "adapter_model.bin")
    (tmp_path / missing).unlink()
    with pytest.raises(AdapterError, match=r"'poet'.*not a folder with adapter_config\.json"):
        read_lora_config("poet", tmp_path, engine="mine")


@pytest.mark.parametrize(
    ("config", "problem"), [("{", "not valid JSON"), ("[]", "no settings")]
)
def test_settings_that_cannot_be_read_are_refused(
    tmp_path: Path, config: str, problem: str
) -> None:
    with pytest.raises(AdapterError, match=problem):
        read_lora_config("poet", write(tmp_path, config), engine="mine")


# -- settings of LoRA adapters ---------------------------------------------------------

PLAIN = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "use_dora": False}


def lora(folder: Path, supported: Collection[str] | None = (), **settings: Any) -> Any:
    write(folder, json.dumps(PLAIN | settings))
    return read_lora_config("poet", folder, engine="genlm-x", supported=supported)


def test_a_plain_adapter_is_read_whatever_it_says_about_training(tmp_path: Path) -> None:
    settings = {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "new_setting": None}
    settings |= {"target_modules": ["q_proj"], "alpha_pattern": {}, "inference_mode": True}
    assert lora(tmp_path, **settings) == PLAIN | settings


def test_another_kind_of_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="of type IA3; only LORA"):
        lora(tmp_path, peft_type="IA3")


@pytest.mark.parametrize(
    "change",
    [{"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"new_setting": 3}, {"bias": "all"}],
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_the_engine_does_not_know_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    [(name, value)] = change.items()
    expected = re.escape(f"has {name}={value!r}, which genlm-x does not support")
    with pytest.raises(AdapterError, match=expected):
        lora(tmp_path, **change)
    assert lora(tmp_path, {name}, **change)[name] == value


@pytest.mark.parametrize(
    "change",
    [{"r": 0}, {"r": "8"}, {"r": None}, {"lora_alpha": "16"}, {"lora_alpha": float("nan")}],
    ids=str,
)
def test_ranks_and_scales_that_are_not_numbers_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    [(name, value)] = change.items()
    with pytest.raises(AdapterError, match=re.escape(f"has {name}={value!r}")):
        lora(tmp_path, None, **change)


def test_an_engine_that_runs_peft_refuses_only_what_changes_the_base_model(
    tmp_path: Path,
) -> None:
    assert lora(tmp_path, None, use_dora=True, new_setting=3)["use_dora"] is True
    changing = {
        "bias": "lora_only",
        "init_lora_weights": "pissa",
        "layer_replication": [[0, 2]],
        "alora_invocation_tokens": [5],
    }
    for name, value in changing.items():
        with pytest.raises(AdapterError, match=f"has {name}="):
            lora(tmp_path, None, **{name: value})
