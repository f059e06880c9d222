"""The padded forward pass computes the requested logits only."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genlm_hf.engine import HFEngine
from genlm_hf.forward import compute_logits, padded_pass

from .tiny import WIDTH, alone, answers, ids_of_lengths


def next_logits(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logits after the last token of each sequence."""
    served: Any = SimpleNamespace(model=model, device=torch.device("cpu"))
    last = torch.tensor([len(ids) - 1 for ids in sequences])
    return compute_logits(model, padded_pass(served, sequences), torch.arange(len(last)), last)


def test_the_output_embedding_sees_one_position_per_sequence(llama: Any) -> None:
    shapes = []
    llama.lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    next_logits(llama, ids_of_lengths(9, 23, 4))
    assert shapes == [(1, 3, WIDTH)]


def test_a_model_that_hides_its_output_embedding_is_right_too(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "get_output_embeddings", lambda: None)
    sequences = ids_of_lengths(9, 23, 1)
    logits = next_logits(llama, sequences)
    for ids, row in zip(sequences, logits):
        assert (row.log_softmax(-1) - alone(llama, ids, WIDTH)).abs().max() <= 1e-4


def test_the_model_is_told_what_is_padding(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {}
    forward = llama.model.forward

    def record(**inputs: Any) -> Any:
        arguments.update(inputs)
        return forward(**inputs)

    monkeypatch.setattr(llama.model, "forward", record)
    next_logits(llama, [[0, 0, 5], [7]])
    assert arguments["input_ids"].tolist() == [[0, 0, 5], [7, 0, 0]]
    assert arguments["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert arguments["use_cache"] is False


def test_the_hook_is_gone_when_the_model_raises(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llama.model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        next_logits(llama, [[3]])
    assert not llama.lm_head._forward_pre_hooks
    assert "forward" not in vars(llama.lm_head)


def test_forwards_of_older_signatures_are_called_with_what_they_take(llama: Any) -> None:
    class Old(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
            return (llama(input_ids).logits,)

        def get_output_embeddings(self) -> Any:
            return llama.lm_head

    sequences = ids_of_lengths(9, 4)
    logits = next_logits(Old(), sequences)
    for ids, row in zip(sequences, logits):
        assert (row.log_softmax(-1) - alone(llama, ids, WIDTH)).abs().max() <= 1e-4


def test_a_model_that_flattens_its_states_is_right_too(llama: Any) -> None:
    class Flat(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            states = llama.model(input_ids, attention_mask=attention_mask)[0]
            logits = llama.lm_head(states.flatten(0, 1))
            return SimpleNamespace(logits=logits.view(*input_ids.shape, -1))

        def get_output_embeddings(self) -> Any:
            return llama.lm_head

    sequences = ids_of_lengths(9, 4, 23)
    logits = next_logits(Flat(), sequences)
    for ids, row in zip(sequences, logits):
        assert (row.log_softmax(-1) - alone(llama, ids, WIDTH)).abs().max() <= 1e-4


@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
def test_steps_read_no_signatures(
    llama: Any, tokenizer: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    read: list[Any] = []
    monkeypatch.setattr(inspect, "signature", read.append)
    rows = answers(engine, [[3, 4], [5, 6, 7]])
    monkeypatch.undo()
    assert all(isinstance(row, torch.Tensor) for row in rows)
    assert not read
