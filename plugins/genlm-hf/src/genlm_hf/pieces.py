"""Logits of many positions, a few at a time.

A pass has small hidden states for all its positions, but logits of the vocabulary's width. The
model's decoder is run once; then the model's own forward is run for each few positions, with
the decoder replaced by a function that returns the hidden states of these. So the model
itself applies the output embedding and any scaling or capping of logits. A test, once per
model, checks the logits; models that fail it compute all logits of a pass.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from genlm_hf.forward import padded_inputs, replaced_forward, taken_logits
from genlm_hf.served_model import ServedModel

__all__ = ["OutputPieces"]

_logger = logging.getLogger("genlm_hf")

# Logits at once: 8 MiB in float32 on a CPU. Fewer would take longer, because each piece reads
# the whole output embedding; of larger ones, several stay in glibc's heap when freed, up to
# 100 MiB.
_LOGITS_ON_CPU = 2**21
_LOGITS_ON_DEVICE = 2**25

# Numbers of positions that prepacked layers compute without padding or dividing them.
_MULTIPLE, _MOST_ON_CPU = 32, 256

# Largest difference from the ordinary logits, relative to the largest of those.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_COARSE_TOLERANCE = 0.05

Take = Callable[[torch.Tensor], torch.Tensor]
Receive = Callable[[slice, torch.Tensor], None]


class OutputPieces:
    """Applies the output embedding of a model to many positions, a few at a time.

    Args:
        served: The model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._decoder: torch.nn.Module | None = None
        self._is_tested = False

    @property
    def are_small(self) -> bool:
        """Whether the logits of a pass are never in memory at once.

        The first time this runs the model on a few tokens.
        """
        if not self._is_tested:
            self._decoder = next(self._tested_decoders(), None)
            self._is_tested = True
            if self._decoder is None:
                _logger.info(
                    "logits of %s are computed for all positions of a pass at once",
                    type(self._served.model).__name__,
                )
        return self._decoder is not None

    def compute(
        self, inputs: dict[str, Any], shape: Sequence[int], take: Take, receive: Receive
    ) -> None:
        """Run the model and pass on the logits of some positions.

        Args:
            inputs: Arguments of the model's `forward`.
            shape: Shape of the token ids.
            take: Selects n positions of tensors of shape `(*shape, width)`; returns
                `(1, n, width)`.
            receive: Receives indices into the n positions, and their logits, shape
                `(positions, width of the model's output)`, in the model's dtype.
        """
        if not self.are_small or self._decoder is None:
            logits = taken_logits(self._served.model, inputs, shape, take)[0]
            receive(slice(0, len(logits)), logits)
            return
        self._compute(self._decoder, inputs, take, receive, self._positions_at_once())

    def _positions_at_once(self) -> int:
        served = self._served
        width = max(served.embedding_rows, served.vocabulary.size)
        if served.device.type != "cpu":
            return max(1, _LOGITS_ON_DEVICE // width)
        most = max(1, _LOGITS_ON_CPU // width)
        return min(_MOST_ON_CPU, most - most % _MULTIPLE or most)

    def _compute(
        self,
        decoder: torch.nn.Module,
        inputs: dict[str, Any],
        take: Take,
        receive: Receive,
        step: int,
    ) -> int:
        """Pass on logits of `step` positions at a time; return how often the decoder ran."""
        model = self._served.model
        run, output, runs = decoder.forward, None, 0
        states = torch.empty(0)
        first = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal output, states, runs
            if output is None:
                output, runs = run(*args, **kwargs), runs + 1
                # A copy, so that the states of other positions can be freed.
                states = take(output[0])
                output = _with_states(output, states[:, :0])
            return _with_states(output, states[:, first : first + step])

        with (
            torch.inference_mode(),
            replaced_forward(decoder, forward),
        ):
            while first == 0 or first < states.shape[1]:
                found = model(**inputs)
                logits = (found.logits if hasattr(found, "logits") else found[0])[0]
                receive(slice(first, first + len(logits)), logits)
                del found, logits
                first += step
        return runs

    def _tested_decoders(self) -> Iterator[torch.nn.Module]:
        """Yield the modules whose hidden states give the ordinary logits."""
        for decoder in _decoders(self._served.model):
            try:
                if self._is_right(decoder):
                    yield decoder
            except Exception as error:  # noqa: BLE001 - the model has another form
                _logger.info("not in pieces: %s: %s", type(error).__name__, error)

    def _is_right(self, decoder: torch.nn.Module) -> bool:
        served = self._served
        length = min(5, served.max_context or 5)
        ids = [i % min(served.embedding_rows, served.vocabulary.size) for i in range(length)]
        inputs, shape = padded_inputs(
            served.model, [ids, ids[::-1]], pad_id=served.pad_id, device=served.device
        )

        def take(states: torch.Tensor) -> torch.Tensor:
            return states.flatten(0, 1)[None]

        found: list[torch.Tensor] = []
        runs = self._compute(
            decoder, inputs, take, lambda _, logits: found.append(logits.clone()), 3
        )
        expected = taken_logits(served.model, inputs, shape, take)[0]
        sizes = [len(part) for part in found]
        if runs != 1 or sizes != [3] * (2 * length // 3) + [2 * length % 3] * bool(
            2 * length % 3
        ):
            return False
        difference = (torch.cat(found) - expected).abs().max()
        tolerance = _TOLERANCE.get(served.model.dtype, _COARSE_TOLERANCE)
        return bool(difference <= tolerance * expected.abs().max().clamp(min=1))


def _decoders(model: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules of a model that may return the hidden states of its last layer."""
    found = []
    for get in ("get_decoder", "base_model"):
        module = getattr(model, get, None)
        if get == "get_decoder" and callable(module):
            module = module()
        found.append(module)
    found += [getattr(found[-1], "decoder", None), getattr(model, "model", None)]
    seen: set[int] = set()
    for module in found:
        if not isinstance(module, torch.nn.Module) or module is model or id(module) in seen:
            continue
        seen.add(id(module))
        yield module


def _with_states(output: Any, states: torch.Tensor) -> Any:
    """Return the output of a decoder with other hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return dataclasses.replace(output, last_hidden_state=states)
