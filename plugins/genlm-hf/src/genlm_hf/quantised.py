"""Quantised models: detection, and workarounds for bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_quantised(model: Any) -> bool:
    """Whether weights are quantised; kernels then round more than the model's dtype does.

    Weights that the caller has quantised are whole numbers, or tensors of a class that wraps
    them (torchao, quanto); the config does not say so.
    """
    return getattr(model.config, "quantization_config", None) is not None or any(
        is_traceable_wrapper_subclass(weight) or not weight.is_floating_point()
        for weight in model.parameters()
    )


@contextmanager
def preserve_packed_weights(model: Any) -> Iterator[None]:
    """Restore 4-bit weights that `state_dict`, which peft calls, has unpacked.

    On CPUs with AVX512-BF16 bitsandbytes packs them in the first forward pass.
    `state_dict` unpacks them, but not their scales (seen in bitsandbytes 0.50.2), which
    would change the rows.
    """
    packed_weights = [
        (weight, weight.data, weight.quant_state, dict(vars(weight.quant_state)))
        for weight in model.parameters()
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False)
    ]
    try:
        yield
    finally:
        for weight, data, state, settings in packed_weights:
            weight.data, weight.quant_state = data, state
            vars(state).clear()
            vars(state).update(settings)


def dedupe_logs() -> None:
    """Let bitsandbytes log each message once instead of at every matrix product."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_new)


_seen_messages: set[str] = set()


def _is_new(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    is_new = message not in _seen_messages
    _seen_messages.add(message)
    return is_new
