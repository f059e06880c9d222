"""Where an adapter's weights lie; the second device is "meta", on which nothing is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genlm_hf.engine import HFEngine
from genlm_hf.peft_layers import move_to_base_devices

from .test_adapters import make_adapter
from .tiny import alone, answers, ids_of_lengths

SECOND = torch.device("meta")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["adapted", "dora", "replaced"],
)
def test_weights_follow_the_layer_that_they_adapt(
    llama: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = make_adapter(llama, tmp_path, 2, **settings).get_base_model()
    head = model.lm_head
    base = getattr(head, "original_module", None) or head.get_base_layer()
    base.to(SECOND, torch.bfloat16)
    move_to_base_devices(model, "default")
    weights = {name: weight for name, weight in model.named_parameters() if "default" in name}
    of_head = {name for name in weights if name.startswith("lm_head")}
    assert of_head
    assert {name for name, weight in weights.items() if weight.device == SECOND} == of_head
    replaced = {torch.bfloat16} if "modules_to_save" in settings else {torch.float32}
    assert {weights[name].dtype for name in of_head} == replaced


@pytest.mark.parametrize("replaced", ["lm_head", "norm"])
def test_a_replaced_module_takes_the_precision_of_the_model(
    llama: Any, tokenizer: Any, tmp_path: Path, replaced: str
) -> None:
    adapted = make_adapter(llama, tmp_path, 2, modules_to_save=[replaced])
    half = llama.to(torch.bfloat16)
    engine = HFEngine.from_model(half, tokenizer)
    engine.add_adapter("red", str(tmp_path))
    sequences = ids_of_lengths(9, 1)
    rows = answers(engine, [(ids, "red") for ids in sequences])
    for ids, row in zip(sequences, rows, strict=True):
        assert (row - alone(adapted, ids)).abs().max() <= 0.2
