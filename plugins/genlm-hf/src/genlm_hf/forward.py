"""Forward passes whose output embedding is applied to the wanted positions only.

`padded_pass` pads sequences on the right and caches nothing, which is right for every
causal model, whatever its attention, positions or state. Position ids are left to
the model: under right padding its default numbers every sequence from 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from genlm_hf.served_model import ServedModel

__all__ = [
    "Pass",
    "Take",
    "accepted",
    "current_device",
    "logits_of",
    "padded_pass",
    "replaced_forward",
    "taken_logits",
]

Take = Callable[[torch.Tensor], torch.Tensor]
"""Selector of some positions of all positions of a pass."""

_parameters: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


class Pass(NamedTuple):
    """A forward pass of a model.

    Attributes:
        inputs: Arguments of the model's `forward`.
        shape: Shape of the token ids.
    """

    inputs: dict[str, Any]
    shape: tuple[int, ...]


def padded_pass(served: ServedModel, sequences: Sequence[Sequence[int]]) -> Pass:
    """Return a pass over sequences, none empty, that are padded on the right."""
    device, pad_id = served.device, served.pad_id
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    longest = max(len(sequence) for sequence in sequences)
    padded = [[*s, *[pad_id] * (longest - len(s))] for s in sequences]
    mask = torch.arange(longest, device=device) < lengths[:, None]
    inputs = {
        "input_ids": torch.tensor(padded, device=device),
        "attention_mask": mask.long(),
        "use_cache": False,
        "return_dict": True,
    }
    return Pass(accepted(served.model, inputs), (len(sequences), longest))


def taken_logits(model: Any, work: Pass, take: Take) -> torch.Tensor:
    """Run a model; compute logits of `take(states)` only, if the model permits it.

    Args:
        model: A causal language model of transformers.
        work: The pass.
        take: Selects positions of tensors of shape `(*work.shape, width)`.

    Returns:
        `take(logits)`, in the model's dtype, on the device of its output.
    """
    is_taken = False

    def take_once(states: torch.Tensor) -> torch.Tensor:
        nonlocal is_taken
        is_taken = True
        return take(states)

    with (
        torch.inference_mode(),
        _head_input(model, work.shape, take_once),
    ):
        logits = logits_of(model(**work.inputs))
        return logits if is_taken else take(logits)


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits of a model's output."""
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


def accepted(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return those of `inputs` that the model's `forward` has parameters for."""
    names = _parameters.get(model)
    if names is None:
        names = _parameters[model] = frozenset(inspect.signature(model.forward).parameters)
    return {name: value for name, value in inputs.items() if name in names}


@contextmanager
def _head_input(model: Any, shape: tuple[int, ...], take: Take) -> Iterator[None]:
    """Apply the output embedding to `take(states)` instead of all states.

    The model's scaling or capping of logits still follows. A model that applies its
    output embedding to states of another shape than `(*shape, width)` computes all logits.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Module):
        yield
        return

    whole = head.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and tuple(args[0].shape[:-1]) == shape:
            return whole(take(args[0]), *args[1:], **kwargs)
        return whole(*args, **kwargs)

    with replaced_forward(head, forward):
        yield


@contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward within this context."""
    attributes = vars(module)
    replaced = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if replaced is None:
            del attributes["forward"]
        else:
            attributes["forward"] = replaced


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` current on this thread, for libraries that use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
