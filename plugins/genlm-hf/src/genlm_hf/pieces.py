"""Logits of many positions of a transformers model, a few at a time; see `genlm.prefix`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from genlm import prefix
from genlm_hf.forward import Pass, Take, logits_of, padded_pass, replaced_forward, taken_logits
from genlm_hf.served_model import ServedModel

__all__ = ["OutputPieces"]

# Logits at once: 8 MiB in float32 on a CPU. Fewer would take longer, because each piece reads
# the whole output embedding; of larger ones, several stay in glibc's heap when freed, up to
# 100 MiB.
_LOGITS_ON_CPU = 2**21
_LOGITS_ON_DEVICE = 2**25

# Numbers of positions that prepacked layers compute without padding or dividing them.
_MULTIPLE, _MOST_ON_CPU = 32, 256


class OutputPieces(prefix.OutputPieces[Pass, torch.nn.Module]):
    """Applies the output embedding of a model to many positions, a few at a time.

    Args:
        served: The model.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__(logging.getLogger("genlm_hf"))
        self._served = served

    @torch.inference_mode()
    def compute(self, work: Pass, take: Take, receive: Callable[[slice, Any], None]) -> None:
        """Run a pass and pass on the logits of some positions."""
        super().compute(work, take, receive)

    def sample(self) -> Pass:
        """Return a pass over two sequences of up to five tokens."""
        served = self._served
        length = min(5, served.max_context or 5)
        ids = [i % min(served.embedding_rows, served.vocabulary.size) for i in range(length)]
        return padded_pass(served, [ids, ids[::-1]])

    @torch.inference_mode()
    def run(self, work: Pass) -> torch.Tensor:
        """Run the model and return its logits."""
        return logits_of(self._served.model(**work.inputs))

    def run_whole(self, work: Pass, take: Take) -> torch.Tensor:
        """Run the model and return the logits of some positions."""
        return taken_logits(self._served.model, work, take)

    def decoders(self) -> Iterator[torch.nn.Module]:
        """Yield the modules that may return the hidden states of the last layer."""
        model = self._served.model
        get = getattr(model, "get_decoder", None)
        base = getattr(model, "base_model", None)
        found = (get() if callable(get) else get, base, getattr(base, "decoder", None))
        modules = [*found, getattr(model, "model", None)]
        for module in dict.fromkeys(m for m in modules if isinstance(m, torch.nn.Module)):
            if module is not model:
                yield module

    def replaced(
        self, decoder: torch.nn.Module, states: Callable[[Callable[[], torch.Tensor]], Any]
    ) -> AbstractContextManager[None]:
        """Let `states` replace the decoder's hidden states."""
        whole, output = decoder.forward, None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal output

            def run() -> torch.Tensor:
                nonlocal output
                output = whole(*args, **kwargs)
                found: torch.Tensor = output[0]
                output = _with_states(output, found[:, :0])  # so that they can be freed
                return found

            found = states(run)
            return _with_states(output, found)

        return replaced_forward(decoder, forward)

    def positions_at_once(self, width: int) -> int:
        """Return the number of positions of a piece."""
        if self._served.device.type != "cpu":
            return max(1, _LOGITS_ON_DEVICE // width)
        most = max(1, _LOGITS_ON_CPU // width)
        return min(_MOST_ON_CPU, most - most % _MULTIPLE or most)

    def is_exact(self, logits: torch.Tensor) -> bool:  # noqa: ARG002 - they may be converted
        """Whether the model's dtype has the precision of float32."""
        return self._served.model.dtype in {torch.float32, torch.float64}

    def as_tensor(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return logits


def _with_states(output: Any, states: torch.Tensor) -> Any:
    """Return the output of a decoder with other hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return dataclasses.replace(output, last_hidden_state=states)
