"""One padded forward pass: the logits that follow each of several sequences.

Sequences are padded on the right and nothing is cached, which is right for every
causal model, whatever its attention, positions or state. Position ids are left to
the model: under right padding its own default numbers each sequence from 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["accepted", "current_device", "evaluation_mode", "head_sees", "next_logits"]

_parameters: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def next_logits(
    model: Any,
    sequences: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device,
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute the logits at one position of each sequence, in one forward pass.

    The output embedding is applied to these positions only, so that nothing of
    shape (sequences, positions, vocabulary) is made.

    Args:
        model: A causal language model of transformers' interface.
        sequences: Token ids that the model can embed, none empty.
        pad_id: Fills the right of shorter sequences; never attended to.
        device: Where the model takes its input.
        positions: One for each sequence; its last token by default.

    Returns:
        Logits, shape `(len(sequences), width of the model's output)`, in the
        model's dtype, on the device of its output.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    kept = lengths - 1 if positions is None else torch.tensor(positions, device=device)
    longest = max(len(sequence) for sequence in sequences)
    padded = [[*s, *[pad_id] * (longest - len(s))] for s in sequences]
    mask = torch.arange(longest, device=device) < lengths[:, None]
    inputs = {
        "input_ids": torch.tensor(padded, device=device),
        "attention_mask": mask.long(),
        "use_cache": False,
        "return_dict": True,
    }

    def take(states: torch.Tensor) -> torch.Tensor:
        return _take(states, kept)[:, None]

    shape = (len(sequences), longest)
    with torch.inference_mode(), evaluation_mode(model), head_sees(model, shape, take):
        output = model(**accepted(model, inputs))
        logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
        return logits[:, 0] if logits.shape[1] == 1 else _take(logits, kept)


def accepted(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return those of `inputs` that the model's `forward` has parameters for."""
    names = _parameters.get(model)
    if names is None:
        names = _parameters[model] = frozenset(inspect.signature(model.forward).parameters)
    return {name: value for name, value in inputs.items() if name in names}


def _take(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(states.shape[0], device=states.device)
    return states[rows, positions.to(states.device)]


@contextmanager
def head_sees(
    model: Any, shape: tuple[int, int], take: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Hand `take(states)` to the output embedding instead of all states.

    The model's own scaling or capping of logits still follows. A model that uses
    its output embedding otherwise, on states that are not `(*shape, width)`, keeps
    all its logits; the caller takes its pick.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Module):
        yield
        return

    # In the module's own attributes: its dictionary of hooks may be another model's as well.
    attributes, whole = vars(head), head.forward
    replaced = attributes.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and tuple(args[0].shape[:-1]) == shape:
            return whole(take(args[0]), *args[1:], **kwargs)
        return whole(*args, **kwargs)

    attributes["forward"] = forward
    try:
        yield
    finally:
        if replaced is None:
            del attributes["forward"]
        else:
            attributes["forward"] = replaced


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch off what is random in training (dropout) while in this context.

    A model that its owner is training is in training mode again afterwards.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Let this thread launch kernels on `device` where a library does not say on which."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
