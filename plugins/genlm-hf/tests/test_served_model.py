"""What models say about their context and their embedding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from genlm.plugin import context_window
from genlm_hf.served_model import embedding_rows, input_device, is_offloaded


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **settings}


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"max_position_embeddings": 64}, 64),
        ("gpt2", {"n_positions": 64}, 64),
        ("opt", {"max_position_embeddings": 64}, 64),
        ("mpt", {"max_seq_len": 64}, 64),
        ("mistral", {"max_position_embeddings": 64, "sliding_window": 4}, 64),
        ("falcon", {"max_position_embeddings": 64}, 64),
        ("falcon", {"alibi": True}, None),
        ("bloom", {}, None),
        ("mamba", {}, None),
        ("recurrent_gemma", {"attention_window_size": 4}, None),
        ("xlnet", {}, None),
        (
            "llama",
            {"max_position_embeddings": 16, "rope_parameters": rope("linear", factor=4.0)},
            64,
        ),
        (
            "llama",
            {"max_position_embeddings": 16, "rope_parameters": rope("dynamic", factor=4.0)},
            64,
        ),
        (
            "qwen2",
            {
                "max_position_embeddings": 16,
                "rope_parameters": rope(
                    "yarn", factor=4.0, original_max_position_embeddings=16
                ),
            },
            64,
        ),
        (
            "qwen2",
            {
                "max_position_embeddings": 64,
                "rope_parameters": rope(
                    "yarn", factor=4.0, original_max_position_embeddings=16
                ),
            },
            64,
        ),
    ],
)
def test_the_window_is_what_the_config_states(
    model_type: str, settings: dict[str, Any], expected: int | None
) -> None:
    config = transformers.AutoConfig.for_model(model_type, **settings)
    assert context_window(config) == expected
    assert context_window(config.to_dict()) == expected


def test_the_window_of_a_multimodal_model_is_that_of_its_text_model() -> None:
    text = {"max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model("gemma3", text_config=text)
    assert context_window(config.get_text_config()) == 64


def test_the_longest_context_that_is_admitted_can_be_computed(
    llama: Any, tokenizer: Any
) -> None:
    from genlm_hf.engine import HFEngine

    from .tiny import answers, ids_of_lengths

    engine = HFEngine.from_model(llama, tokenizer)
    assert engine.max_context == 64
    [row] = answers(engine, ids_of_lengths(64))
    assert abs(float(row.logsumexp(0))) <= 1e-4


def test_embedding_rows_and_device_come_from_the_model(llama: Any) -> None:
    assert embedding_rows(llama) == 320
    assert input_device(llama) == torch.device("cpu")


@pytest.mark.parametrize(
    ("embedding", "rows"),
    [
        (torch.nn.Embedding(7, 3), 7),
        (SimpleNamespace(num_embeddings=7, weight=torch.empty(12, 1)), 7),  # packed weights
        (SimpleNamespace(weight=torch.empty(7, 3)), 7),
        (SimpleNamespace(num_embeddings=None, weight=torch.empty(7, 3)), 7),
        (SimpleNamespace(weight=torch.empty(21)), None),
        (SimpleNamespace(weight=None), None),
        (SimpleNamespace(), None),
    ],
)
def test_rows_of_an_embedding_are_unknown_without_a_number_or_a_matrix(
    embedding: Any, rows: int | None
) -> None:
    assert embedding_rows(SimpleNamespace(get_input_embeddings=lambda: embedding)) == rows


@pytest.mark.parametrize("offloaded", ["embedding", "head", None])
def test_inputs_of_a_model_with_an_offloaded_embedding_are_on_the_cpu(
    offloaded: str | None, llama: Any
) -> None:
    if offloaded == "embedding":
        llama.model.embed_tokens.to("meta")
    elif offloaded == "head":
        llama.lm_head.to("meta")
    assert input_device(llama) == torch.device("cpu")
    assert is_offloaded(llama) == (offloaded is not None)
