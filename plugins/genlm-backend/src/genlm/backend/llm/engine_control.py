"""`run_burst`: steps of a population whose tokens a control object draws.

The interface is that of genlm-backend's sources after 0.3.1, with which genlm-control's
`BurstLoop` runs sequential Monte Carlo inside the engine. The control object owns the
particles: it assigns handles to sequences, draws their tokens and resamples. Every engine
supports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

import genlm

if TYPE_CHECKING:
    from genlm.core.model.context import Context

__all__ = ["EngineControl", "run_burst"]


class EngineControl(Protocol):
    """Draws the tokens of a burst. Handles are integers that the control object chooses."""

    def draw(
        self, logits: torch.Tensor, handles: Sequence[int]
    ) -> torch.Tensor | Sequence[int]:
        """Return a token id for each handle.

        Args:
            logits: Log-probabilities of all next tokens, shape `(len(handles), vocab_size)`,
                float32.
            handles: Handles of the rows.
        """

    def drain_aborts(self) -> Iterable[int]:
        """Return handles of ended sequences, and remove them from the queue."""

    def drain_adds(self) -> Iterable[tuple[int, Sequence[int], str | None]]:
        """Return `(unused handle, token ids, adapter)` of new sequences, and remove these."""

    def on_burst_end(self) -> None:
        """Finish deferred work of `draw`; called after the last sequence has ended."""


def run_burst(llm: genlm.AsyncLM, control: EngineControl, max_steps: int) -> None:
    """Compute rows and extend sequences until the control has ended all of them.

    The call blocks. Methods of `control` run on the calling thread.

    Args:
        llm: The model.
        control: Draws the tokens.
        max_steps: Maximum number of drawn tokens per sequence.

    Raises:
        GenlmError: Errors of `batch_next_token_logprobs_sync`, which end the burst.
    """
    contexts: dict[int, Context] = {}
    drawn: dict[int, int] = {}

    def drain() -> None:
        for handle in control.drain_aborts():
            contexts.pop(handle, None)
        for handle, token_ids, lora_name in control.drain_adds():
            contexts[handle] = llm.context(token_ids, lora_name=lora_name)
            drawn[handle] = 0

    drain()
    while contexts:
        handles = list(contexts)
        rows = llm.batch_next_token_logprobs_sync(list(contexts.values()))
        token_ids = torch.as_tensor(control.draw(rows, handles)).tolist()
        for handle, token_id in zip(handles, token_ids, strict=True):
            contexts[handle] = contexts[handle].extend(token_id)
            drawn[handle] += 1
            if drawn[handle] == max_steps:
                del contexts[handle]
        drain()
    control.on_burst_end()
    drain()
