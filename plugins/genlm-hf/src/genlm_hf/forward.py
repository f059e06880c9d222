"""Forward passes whose output embedding is applied to the wanted positions only.

`next_logits` pads sequences on the right and caches nothing, which is right for every
causal model, whatever its attention, positions or state. Position ids are left to
the model: under right padding its default numbers every sequence from 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = [
    "accepted",
    "current_device",
    "next_logits",
    "padded_inputs",
    "replaced_forward",
    "taken_logits",
]

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

    Logits of shape (sequences, positions, vocabulary) are not computed.

    Args:
        model: A causal language model of transformers.
        sequences: Token ids that the model can embed, none empty.
        pad_id: Pads shorter sequences on the right; never attended to.
        device: Device of the model's input.
        positions: One position per sequence; by default the last token's.

    Returns:
        Logits, shape `(len(sequences), width of the model's output)`, in the
        model's dtype, on the device of its output.
    """
    inputs, shape = padded_inputs(model, sequences, pad_id=pad_id, device=device)
    last = [len(sequence) - 1 for sequence in sequences]
    kept = torch.tensor(last if positions is None else positions, device=device)

    def take(states: torch.Tensor) -> torch.Tensor:
        return _take(states, kept)[:, None]

    return taken_logits(model, inputs, shape, take)[:, 0]


def padded_inputs(
    model: Any, sequences: Sequence[Sequence[int]], *, pad_id: int, device: torch.device
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return `forward`'s inputs for right-padded sequences, and the ids' shape."""
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
    return accepted(model, inputs), (len(sequences), longest)


def taken_logits(
    model: Any,
    inputs: dict[str, Any],
    shape: Sequence[int],
    take: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run a model; compute logits of `take(states)` only, if the model permits it.

    Args:
        model: A causal language model of transformers.
        inputs: Arguments of its `forward`.
        shape: Shape of the token ids.
        take: Selects positions of tensors of shape `(*shape, width)`.

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
        _head_input(model, tuple(shape), take_once),
    ):
        output = model(**inputs)
        logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
        return logits if is_taken else take(logits)


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
def _head_input(
    model: Any, shape: tuple[int, ...], take: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
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
