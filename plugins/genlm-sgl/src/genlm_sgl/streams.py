"""The order of work on SGLang's streams and on the caller's; copies that do not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["computed_event", "device_index", "read_on_current_stream"]


def computed_event(computed: torch.Tensor) -> Any:
    """Record and return an event on the current stream; None on a CPU."""
    if computed.device.type == "cpu":
        return None
    event: Any = torch.get_device_module(computed.device).Event()
    event.record()
    return event


def read_on_current_stream(*computed: torch.Tensor) -> None:
    """Prevent reuse of memory of SGLang's stream before the current stream has read it."""
    for each in computed:
        if each.device.type != "cpu":
            each.record_stream(torch.get_device_module(each.device).current_stream())


def device_index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy integers to a device as int64, without waiting for its computation.

    An index that is a list would be copied from pageable memory, which waits for the device.
    """
    pinned = device.type == "cuda" and torch.cuda.is_available()
    numbers = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return numbers.to(device, non_blocking=True)
