"""New weights on SGLang: unknown and missing names, biases, and quantised models.

The conformance suite tests rows after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm import AsyncLM, EngineDiedError
from genlm.testing import TinyModel, families
from genlm_sgl.conformance import TinyLlama
from genlm_sgl.engine import SGLEngine

IDS = [5, 9, 250, 17, 80]


@pytest.fixture
def llm(tiny: TinyLlama) -> Iterator[AsyncLM]:
    with AsyncLM(lambda: tiny.engine({"max_total_tokens": 640}), name="sgl") as llm:
        yield llm


def prefixed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{name}": value for name, value in weights.items()}


def without_a_matrix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """SGLang has one parameter for queries, keys and values; only the keys are missing."""
    return {name: value for name, value in weights.items() if "1.self_attn.k_proj" not in name}


def with_a_bias(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "model.layers.0.mlp.down_proj.bias": torch.ones(32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (prefixed, "parameters of SGLang's model received no weights"),
        (without_a_matrix, r"1 parameters of .* such as 'model.layers.1.self_attn.qkv_proj"),
        (with_a_bias, r"drops 1 biases of the checkpoint.*down_proj.bias"),
    ],
)
def test_weights_that_do_not_fit_end_the_engine(
    llm: AsyncLM, tiny: TinyLlama, change: Callable[[Any], Any], message: str
) -> None:
    weights = change(dict(tiny.weights[1][0]()))
    with pytest.raises(EngineDiedError, match=message):
        llm.update_weights(weights)
    with pytest.raises(EngineDiedError, match=message):
        llm.next_token_logprobs_sync(IDS)


def test_the_given_tensors_are_not_changed(tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, families(8)["gemma"])
    read, expected = model.weights[1]
    weights = dict(read())
    before = {name: tensor.clone() for name, tensor in weights.items()}
    options = {"device": "cpu", "dtype": "float32", "max_total_tokens": 640}
    with AsyncLM(lambda: SGLEngine(model.path, engine_opts=options), name="sgl") as llm:
        llm.update_weights(weights)
        row = llm.next_token_logprobs_sync(IDS)
    torch.testing.assert_close(row.double(), expected(tuple(IDS), None), atol=1e-4, rtol=0)
    torch.testing.assert_close(weights, before, atol=0, rtol=0)


def test_the_model_can_be_changed_on_the_thread_of_the_engine(
    llm: AsyncLM, tiny: TinyLlama
) -> None:
    population = llm.population(IDS, 3)
    population.next_token_logprobs_sync()

    def halve(engine: Any) -> None:
        with torch.inference_mode():
            for parameter in engine.model.parameters():
                parameter.mul_(0.5)

    llm.update_weights(halve)
    model = tiny._model_of(None)
    halved = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    expected = torch.func.functional_call(model, halved, torch.tensor([IDS]))
    expected = expected.logits[0, -1, : llm.vocab_size].log_softmax(-1)
    for row in population.next_token_logprobs_sync():
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
