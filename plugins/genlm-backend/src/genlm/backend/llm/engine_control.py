"""`run_burst`: steps of a population whose tokens a control object draws.

The interface is that of the library's sources after 0.3.1, with which genlm-control's
`BurstLoop` runs sequential Monte Carlo inside the engine. The control object owns the
particles: it names the sequences, draws their tokens and resamples. It may drive any engine.
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
    """What draws the tokens of a burst. A handle is an integer of the control's own choice."""

    def draw(
        self, logits: torch.Tensor, handles: Sequence[int]
    ) -> torch.Tensor | Sequence[int]:
        """Return a token id for each handle.

        Args:
            logits: Log-probabilities of all next tokens, shape `(len(handles), vocab_size)`,
                float32.
            handles: The handle of each row.
        """

    def drain_aborts(self) -> Iterable[int]:
        """Return the handles whose sequences end, each once."""

    def drain_adds(self) -> Iterable[tuple[int, Sequence[int], str | None]]:
        """Return new sequences, each once: an unused handle, token ids, an adapter's name."""

    def on_burst_end(self) -> None:
        """Finish what `draw` has deferred; called when no sequence is left."""


def run_burst(llm: genlm.AsyncLM, control: EngineControl, max_steps: int) -> None:
    """Compute rows and extend sequences until the control has ended all of them.

    Blocks the calling thread, on which the methods of `control` are called.

    Args:
        llm: The model.
        control: Draws the tokens.
        max_steps: Maximum number of tokens that are drawn for a sequence.

    Raises:
        GenlmError: As `batch_next_token_logprobs_sync`; sequences of the burst are dropped.
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
