"""Configs in the names that mlx-lm reads."""

from __future__ import annotations

from typing import Any

import pytest

from genlm_mlx.published import mlx_settings, read_config

LOCAL = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


def added(model_type: str, **settings: Any) -> dict[str, Any]:
    written = {"model_type": model_type, **settings}
    return mlx_settings(written, read_config(written))


def test_rotary_settings_get_their_older_names() -> None:
    settings = added("llama", rope_parameters=LINEAR)
    assert settings["rope_theta"] == 1e6
    assert settings["rope_scaling"] == LINEAR | {"type": "linear"}


def test_settings_of_an_older_config_stay_as_they_are() -> None:
    old = {"type": "linear", "factor": 8.0}
    settings = added("llama", rope_theta=1e6, rope_scaling=old)
    assert (settings["rope_theta"], settings["rope_scaling"]["factor"]) == (1e6, 8.0)


def test_plain_embeddings_need_no_scaling() -> None:
    assert added("llama", rope_parameters=LOCAL)["rope_scaling"] is None


def test_settings_by_kind_of_layer_are_told_apart() -> None:
    settings = added(
        "gemma3_text",
        rope_parameters={"full_attention": LINEAR, "sliding_attention": LOCAL},
    )
    assert (settings["rope_theta"], settings["rope_local_base_freq"]) == (1e6, 5000.0)
    assert settings["rope_scaling"]["factor"] == 8.0


def test_defaults_are_those_of_transformers_and_nothing_written_is_changed() -> None:
    settings = added("llama", rms_norm_eps=0.5)
    assert settings["tie_word_embeddings"] is False  # mlx-lm's own default is True
    assert "rms_norm_eps" not in settings


def test_a_setting_with_two_names_is_found_by_the_other_one() -> None:
    assert added("qwen3_moe", num_local_experts=6)["num_experts"] == 6


@pytest.mark.parametrize(
    ("kinds", "expected"), [("LLGLLG", 3), ("LGLGL", 2), ("GLLG", None), ("LLL", None)]
)
def test_a_regular_pattern_of_layers_is_told_by_its_distance(
    kinds: str, expected: int | None
) -> None:
    names = {"L": "sliding_attention", "G": "full_attention"}
    layers = [names[kind] for kind in kinds]
    settings = added("gemma3_text", num_hidden_layers=len(kinds), layer_types=layers)
    assert settings.get("sliding_window_pattern") == expected


def test_the_language_model_of_several_is_described_inside_it() -> None:
    text = {
        "hidden_size": 64,
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
    }
    settings = added("gemma3", text_config=text)
    assert list(settings) == ["text_config"]
    assert settings["text_config"]["hidden_size"] == 64
    assert settings["text_config"]["rope_theta"] == 1e6


def test_an_architecture_that_transformers_does_not_know_has_no_config() -> None:
    assert read_config({"model_type": "of tomorrow"}) is None
