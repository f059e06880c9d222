"""SGLang's hidden states, and the computation of logits from any of them.

The calls into SGLang that `scores` needs. They are private, so the engine compares scores with
a row when it is built, and scores by rows if this fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ComputeLogits", "limit_reuse", "obstacle_to_score", "read_hidden_states"]

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]
"""Computes logits, shape `(n, width)`, of hidden states, shape `(n, hidden_size)`."""

ReadStates = Callable[[Any, torch.Tensor, ComputeLogits], None]
"""Takes SGLang's `ForwardBatch`, the hidden states of its tokens, and a `ComputeLogits`."""


def obstacle_to_score(scheduler: Any) -> str | None:
    """Return why hidden states cannot be read, or their logits would be wrong; else None."""
    runner = scheduler.tp_worker.model_runner
    if getattr(runner.lora_manager, "lm_head_module", None) is not None:
        return "adapters of lm_head"  # SGLang applies them to one row of each request only
    graphs = runner.prefill_cuda_graph_runner
    if type(graphs).__name__ in {"NoneType", "EagerRunner"}:
        return None
    # Other graphs, such as SGLang's default on CUDA, end before the logits.
    if getattr(graphs, "_uses_eager_prefill_tail", lambda: False)():
        return None
    return "graphs of prefills"  # run no code of Python


def read_hidden_states(model: Any, read: ReadStates) -> Any:
    """Call `read` in every pass over prompts, before its logits are computed.

    Args:
        model: SGLang's model.
        read: Callback, in the modes and the stream of the pass.

    Returns:
        A handle, whose `remove` ends the calls.

    Raises:
        AttributeError: The model does not compute its logits as those of the known versions.
    """
    from sglang.srt.layers.logits_processor import LogitsMetadata

    processor = model.logits_processor
    signature = inspect.signature(processor.forward)
    get_logits = processor._get_logits  # noqa: SLF001

    def before(_processor: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = signature.bind(*arguments, **named).arguments
        forward_batch, lm_head = found["logits_metadata"], found["lm_head"]
        if not forward_batch.forward_mode.is_extend():
            return

        def compute_logits(states: torch.Tensor) -> torch.Tensor:
            metadata = LogitsMetadata.from_forward_batch(forward_batch)
            logits: torch.Tensor = get_logits(
                states, lm_head, metadata, use_logits_buffer=False
            )
            return logits

        read(forward_batch, found["hidden_states"], compute_logits)

    return processor.register_forward_pre_hook(before, with_kwargs=True)


def limit_reuse(req: Any, length: int) -> None:
    """Have the radix cache serve no more than the first tokens of a request."""
    most = req._compute_max_prefix_len  # noqa: SLF001

    def limited(input_len: int) -> int:
        return min(length, int(most(input_len)))

    req._compute_max_prefix_len = limited  # noqa: SLF001
