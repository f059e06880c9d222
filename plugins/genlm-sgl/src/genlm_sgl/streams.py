"""The order of work on SGLang's streams and on the caller's."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["computed_event", "read_on_current_stream"]


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
