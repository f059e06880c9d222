"""Folders of adapters are read, or refused with what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm import AdapterError, read_adapter_config


def write(folder: Path, config: str, weights: str = "adapter_model.safetensors") -> Path:
    (folder / "adapter_config.json").write_text(config)
    (folder / weights).touch()
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_settings_are_read_beside_any_kind_of_weights(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, '{"r": 3, "bias": "none"}', f"adapter_model.{suffix}")
    assert read_adapter_config("poet", tmp_path) == {"r": 3, "bias": "none"}
    assert read_adapter_config("poet", str(tmp_path))["r"] == 3


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.bin"])
def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, missing: str) -> None:
    write(tmp_path, "{}", "adapter_model.bin")
    (tmp_path / missing).unlink()
    with pytest.raises(AdapterError, match=r"'poet'.*no folder with adapter_config\.json"):
        read_adapter_config("poet", tmp_path)


@pytest.mark.parametrize(("config", "problem"), [("{", "no valid JSON"), ("[]", "no settings")])
def test_settings_that_cannot_be_read_are_refused(
    tmp_path: Path, config: str, problem: str
) -> None:
    with pytest.raises(AdapterError, match=problem):
        read_adapter_config("poet", write(tmp_path, config))
