"""Detection of changes to the weights of a model that its owner may train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightVersion(NamedTuple):
    """State of a model's weights; equal as long as they are unchanged.

    Attributes:
        optimizer_steps: Number of steps of optimizers that have one of the parameters.
        parameters: Number of changes in place, and address in memory, of each parameter and
            of each buffer in `state_dict()`.
        adapters: State of the adapters that the model came with; see `Adapters.version`.
    """

    optimizer_steps: int = 0
    parameters: tuple[tuple[int, int], ...] = ()
    adapters: Hashable = ()

    @property
    def in_graphs(self) -> Hashable:
        """The part that CUDA graphs fix: the address of each parameter, and the adapters."""
        return tuple(address for _, address in self.parameters), self.adapters


class WeightVersions:
    """The versions of a model's weights.

    Steps of optimizers, operations on parameters in place, `load_state_dict`, and replaced
    parameters and memory are detected. Changes through other tensors in the memory of a
    parameter, such as `parameter.data.add_(1)`, are not, because torch does not count them.

    Fused optimizers do not count their changes as versions of the parameters; a hook of torch
    counts the steps of all optimizers that have one of these parameters.

    Args:
        model: The model.
        adapters: Returns the state of the adapters that the model came with, in any thread.
    """

    def __init__(
        self, model: torch.nn.Module, adapters: Callable[[], Hashable] = tuple
    ) -> None:
        # By module and name, because tensors may be replaced. Buffers that `state_dict()` lacks
        # are omitted: some, such as rotary frequencies, change in passes.
        self._places: list[tuple[dict[str, Any], str]] = [
            (tensors, name)
            for module in model.modules()
            for tensors, omitted in (
                (module._parameters, ()),  # noqa: SLF001 - `parameters` takes 20 times as long
                (module._buffers, module._non_persistent_buffers_set),  # noqa: SLF001
            )
            for name, tensor in tensors.items()
            if tensor is not None and name not in omitted
        ]
        self._adapters = adapters
        self._optimizer_steps = 0
        reference = weakref.ref(self)

        def count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            versions = reference()
            if versions is not None:
                versions._count_step(optimizer)  # noqa: SLF001 - the same class

        handle = register_optimizer_step_post_hook(count_step)
        weakref.finalize(self, handle.remove)

    def current(self) -> WeightVersion:
        """Return the version of the weights; 0.2 microseconds per parameter, in any thread."""
        places = self._places
        states = tuple([_state(parameters.get(name)) for parameters, name in places])
        return WeightVersion(self._optimizer_steps, states, self._adapters())

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(parameters.get(name)) in stepped for parameters, name in self._places):
            self._optimizer_steps += 1


def _state(parameter: Any) -> tuple[int, int]:
    try:
        return parameter._version, parameter.data_ptr()  # noqa: SLF001 - as torch documents
    except (AttributeError, RuntimeError):  # removed; without a version or without memory
        return 0, id(parameter)
