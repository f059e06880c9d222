"""Forward passes whose output embedding is applied to the requested positions only.

`padded_pass` pads sequences on the right, by token 0, and caches nothing, which is right for
every causal model, whatever its attention, positions or state. Position ids are left to the
model: under right padding its default numbers every sequence from 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from genlm_hf.served_model import ServedModel

_parameters: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def padded_pass(served: ServedModel, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the inputs of a pass over sequences, none empty, that are padded on the right."""
    device = served.device
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    longest = max(len(sequence) for sequence in sequences)
    padded = [[*s, *[0] * (longest - len(s))] for s in sequences]
    mask = torch.arange(longest, device=device) < lengths[:, None]
    arguments = {"attention_mask": mask.long(), "use_cache": False, "return_dict": True}
    return {
        "input_ids": torch.tensor(padded, device=device),
        **accepted_arguments(served.model, arguments),
    }


@torch.inference_mode()
def compute_logits(
    model: Any, inputs: dict[str, Any], rows: torch.Tensor | int, columns: torch.Tensor
) -> torch.Tensor:
    """Run a model; compute the logits of some positions only, if the model permits it.

    The output embedding is applied to the states of these positions instead of all states; the
    model's scaling or capping of logits still follows. A model that applies its output
    embedding to states of another shape than `(*shape of the ids, width)` computes all logits.

    Args:
        model: A causal language model of transformers.
        inputs: Arguments of its `forward`.
        rows: Sequence of each position, shape `(n,)`, or the only sequence.
        columns: The positions in the sequences, shape `(n,)`.

    Returns:
        Logits, shape `(n, width)`, in the model's dtype, on the device of its output.
    """
    shape, is_selected = inputs["input_ids"].shape, False

    def select(states: torch.Tensor) -> torch.Tensor:
        index = rows if isinstance(rows, int) else rows.to(states.device)
        return states[index, columns.to(states.device)][None]

    def select_states(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
        nonlocal is_selected
        states, *others = arguments
        if states.shape[:-1] != shape:
            return arguments
        is_selected = True
        return select(states), *others

    head = model.get_output_embeddings()
    has_head = isinstance(head, torch.nn.Module)
    with head.register_forward_pre_hook(select_states) if has_head else nullcontext():
        output = model(**inputs)
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return (logits if is_selected else select(logits))[0]


def accepted_arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `inputs` that are parameters of the model's `forward`."""
    names = _parameters.get(model)
    if names is None:
        names = _parameters[model] = frozenset(inspect.signature(model.forward).parameters)
    return {name: value for name, value in inputs.items() if name in names}


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` current on this thread, for libraries that use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
