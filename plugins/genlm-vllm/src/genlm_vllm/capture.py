"""`Capture`: the logits processor that reads rows and draws tokens inside vLLM.

It runs where the model's last layer does: in this process, or in a worker of vLLM's.
What to do for a request travels with it, in `SamplingParams.extra_args`, and a row is
put down under the request's own key; nothing is concluded from the order of requests.

vLLM has two interfaces for logits processors, one for each of its model runners. The
class implements both. It knows nothing of the engine, of tokenizers, or of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as _Runner1
from vllm.v1.sample.logits_processor import MoveDirectionality

from genlm import draw_tokens, rows_from_logits, stream_uniform
from genlm_vllm.kept_rows import KEPT

if TYPE_CHECKING:
    from genlm import Vocabulary

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as _Runner2
except ImportError:  # before 0.31; those versions use the first runner for processors
    _Runner2 = object

__all__ = ["ARGUMENT", "Capture", "Draw", "WantedRow"]

ARGUMENT = "genlm"
"""Key in `SamplingParams.extra_args`."""


class WantedRow(NamedTuple):
    """A request whose next-token row is to be kept under a key."""

    key: int


class Draw(NamedTuple):
    """A request whose next token is to be drawn from its row.

    Attributes:
        seed: Of its stream of randomness.
        temperature: Divides the log-probabilities; 0 takes the most likely token.
        prompt_length: Tokens that were not drawn.
    """

    seed: int
    temperature: float
    prompt_length: int


Wish = WantedRow | Draw


class Capture(_Runner1, _Runner2):  # type: ignore[misc]
    """Keeps the rows that requests want, and draws the tokens that they want drawn.

    A drawn token is enforced by taking every other token's probability away. Apart from
    that no logit is changed.
    """

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: Any = None):
        # The runners pass other arguments; none is needed.
        del vllm_config, device_or_states, is_pin_memory
        self._wishes: dict[int, Wish] = {}
        self._output_ids: dict[int, list[int]] = {}  # the first runner's, which grow

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept every request; both interfaces have this method."""

    def is_argmax_invariant(self) -> bool:
        """Say no: else vLLM skips this in greedy batches, and runs it after temperature."""
        return False

    # -- who is where in the batch ----------------------------------------------------

    def update_state(self, batch_update: Any) -> None:
        """Follow requests as they come, go and move (first runner)."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._forget(index)
        for index, params, _prompt, output_ids in batch_update.added:
            self.add_request(index, params)
            self._output_ids[index] = output_ids
        for origin, target, way in batch_update.moved:
            wish, output_ids = self._forget(origin)
            other, other_ids = self._forget(target)
            self._place(target, wish, output_ids)
            if way == MoveDirectionality.SWAP:
                self._place(origin, other, other_ids)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take note of a request (both runners); slots are used again."""
        wish = (sampling_params.extra_args or {}).get(ARGUMENT)
        self._forget(req_idx)
        if wish is None:
            return False
        # In another process a named tuple arrives as a list.
        self._wishes[req_idx] = Draw(*wish) if len(wish) == 3 else WantedRow(*wish)
        return True

    def _forget(self, index: int) -> tuple[Wish | None, list[int] | None]:
        return self._wishes.pop(index, None), self._output_ids.pop(index, None)

    def _place(self, index: int, wish: Wish | None, output_ids: list[int] | None) -> None:
        if wish is not None:
            self._wishes[index] = wish
        if output_ids is not None:
            self._output_ids[index] = output_ids

    # -- each step --------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Keep rows and draw tokens; return the logits, changed where tokens were drawn."""
        keys, kept, draws, drawing = [], [], [], []
        for row, wish, drawn in self._present(logits.shape[0], ctx):
            if isinstance(wish, Draw):
                draws.append((wish, drawn))
                drawing.append(row)
            elif drawn == 0:
                # The last chunk of a prompt is the last to be put.
                keys.append(wish.key)
                kept.append(row)
        if keys and KEPT.active:
            # vLLM computes in inference mode, and its tensors cannot be changed outside.
            with torch.inference_mode(False), torch.no_grad():
                KEPT.put(keys, _rows(logits, kept))
        if draws:
            _draw(logits, drawing, draws)
        return logits

    def _present(self, count: int, ctx: Any) -> Iterator[tuple[int, Wish, int]]:
        """Yield each request with a wish: its row, the wish, how many tokens it has drawn."""
        if ctx is None:
            for index, wish in self._wishes.items():
                if index < count:
                    yield index, wish, len(self._output_ids.get(index, ()))
            return
        lengths = ctx.seq_lens_upper_bound_np.tolist()
        for row, index in enumerate(ctx.idx_mapping_np.tolist()):
            if index in self._wishes:
                wish = self._wishes[index]
                prompt = wish.prompt_length if isinstance(wish, Draw) else lengths[row]
                yield row, wish, max(0, lengths[row] - prompt)


def _rows(logits: torch.Tensor, places: list[int]) -> torch.Tensor:
    if len(places) < logits.shape[0] or places != list(range(len(places))):
        logits = logits[torch.tensor(places, device=logits.device)]
    return rows_from_logits(logits, cast("Vocabulary", KEPT.ids))


def _draw(logits: torch.Tensor, places: list[int], draws: list[tuple[Draw, int]]) -> None:
    index = torch.tensor(places, device=logits.device)
    rows = rows_from_logits(logits[index], cast("Vocabulary", KEPT.ids))
    temperatures = [draw.temperature for draw, _ in draws]
    tokens = draw_tokens(rows, temperatures, [stream_uniform(d.seed, k) for d, k in draws])
    logits.index_fill_(0, index, float("-inf"))
    logits[index, tokens] = 0.0
