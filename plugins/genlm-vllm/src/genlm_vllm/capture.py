"""`Capture`: the logits processor that stores rows and draws tokens inside vLLM.

It runs in the process of the model's last layer: this one, or a worker of vLLM. A request
carries its `CaptureRequest` in `SamplingParams.extra_args`. Its row, or the requested outputs
of the row, is stored under a separate key, so the order of requests in a batch does not matter.

vLLM has one interface for logits processors for each of its two model runners. The class
implements both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as _Runner1
from vllm.v1.sample.logits_processor import MoveDirectionality

from genlm.plugin import draw_tokens, rows_from_logits, stream_uniform
from genlm_vllm.processes import TRANSPORT
from genlm_vllm.row_buffer import ROW_BUFFER, Outputs, device_index

if TYPE_CHECKING:
    from genlm.plugin import Vocabulary

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as _Runner2
except ImportError:  # before 0.31, which runs processors in the first runner only
    _Runner2 = object

__all__ = ["ARGUMENT", "Capture", "CaptureRequest", "CaptureRow", "DrawToken"]

ARGUMENT = "genlm"
"""Key in `SamplingParams.extra_args`."""


class CaptureRow(NamedTuple):
    """Store the next-token row of the request under a key.

    Attributes:
        key: The key.
        outputs: The requested outputs of the row, None for the row itself. Bytes that
            `Transport.pack_outputs` returned, in another process.
    """

    key: int
    outputs: Outputs | bytes | None = None

    @property
    def wanted(self) -> Outputs:
        """The requested outputs of the row."""
        if isinstance(self.outputs, bytes):
            return tuple(TRANSPORT.unpack_outputs(self.outputs))
        return tuple(self.outputs or ())


class DrawToken(NamedTuple):
    """Draw the next token of the request from its row.

    Attributes:
        key: Key of the flag that says whether the row is a distribution.
        seed: Seed of the continuation.
        temperature: Divides the log-probabilities; 0 takes the most likely token.
        prompt_length: Number of tokens that were not drawn.
    """

    key: int
    seed: int
    temperature: float
    prompt_length: int


CaptureRequest = CaptureRow | DrawToken
"""The computation on the logits of a request."""


class Capture(_Runner1, _Runner2):  # type: ignore[misc]
    """Stores rows and draws tokens.

    A drawn token is enforced by setting all other logits of its row to -inf. Other rows of the
    logits are not changed.
    """

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: Any = None):
        # The runners pass different arguments.
        del vllm_config, device_or_states, is_pin_memory
        self._requests: dict[int, CaptureRequest] = {}
        self._output_ids: dict[int, list[int]] = {}  # the first runner's lists, which grow

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept every request; both interfaces have this method."""

    def is_argmax_invariant(self) -> bool:
        """Return False: otherwise vLLM skips the processor in greedy batches."""
        return False

    # -- requests of the batch --------------------------------------------------------

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that are added, removed and moved (first runner)."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._remove(index)
        for index, params, _prompt, output_ids in batch_update.added:
            self.add_request(index, params)
            self._output_ids[index] = output_ids
        for origin, target, way in batch_update.moved:
            request, output_ids = self._remove(origin)
            other, other_ids = self._remove(target)
            self._place(target, request, output_ids)
            if way == MoveDirectionality.SWAP:
                self._place(origin, other, other_ids)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Register a request (both runners); `req_idx` may be reused."""
        request = (sampling_params.extra_args or {}).get(ARGUMENT)
        self._remove(req_idx)
        if request is None:
            return False
        # In another process a named tuple arrives as a list.
        kind = DrawToken if len(request) == 4 else CaptureRow
        self._requests[req_idx] = kind(*request)
        return True

    def _remove(self, index: int) -> tuple[CaptureRequest | None, list[int] | None]:
        return self._requests.pop(index, None), self._output_ids.pop(index, None)

    def _place(
        self, index: int, request: CaptureRequest | None, output_ids: list[int] | None
    ) -> None:
        if request is not None:
            self._requests[index] = request
        if output_ids is not None:
            self._output_ids[index] = output_ids

    # -- each step --------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Store rows and draw tokens; return the logits, changed where tokens were drawn."""
        rows: list[tuple[CaptureRow, int]] = []
        draws: list[tuple[DrawToken, int, int]] = []
        for index, request, drawn in self._in_batch(logits.shape[0], ctx):
            if isinstance(request, DrawToken):
                draws.append((request, index, drawn))
            elif drawn == 0:
                # Later chunks of a prompt replace the row of earlier ones.
                rows.append((request, index))
        if ROW_BUFFER.active and rows:
            # vLLM computes in inference mode, whose tensors cannot be changed outside.
            with torch.inference_mode(False), torch.no_grad():
                _store(logits, rows)
        if draws:
            _draw(logits, draws)
        return logits

    def _in_batch(self, count: int, ctx: Any) -> Iterator[tuple[int, CaptureRequest, int]]:
        """Yield the row index, the capture request and the number of drawn tokens of each."""
        if ctx is None:
            for index, request in self._requests.items():
                if index < count:
                    yield index, request, len(self._output_ids.get(index, ()))
            return
        lengths = ctx.seq_lens_upper_bound_np.tolist()
        for row, index in enumerate(ctx.idx_mapping_np.tolist()):
            if index in self._requests:
                request = self._requests[index]
                if isinstance(request, DrawToken):
                    yield row, request, max(0, lengths[row] - request.prompt_length)
                else:
                    yield row, request, 0


def _store(logits: torch.Tensor, rows: list[tuple[CaptureRow, int]]) -> None:
    keys = [request.key for request, _ in rows]
    try:
        outputs = [None if each.outputs is None else each.wanted for each, _ in rows]
        ROW_BUFFER.put(keys, _selected(logits, [index for _, index in rows]), outputs)
    except Exception as error:  # noqa: BLE001 - out of memory; vLLM goes on
        ROW_BUFFER.fail(keys, error)


def _selected(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if len(indices) < logits.shape[0] or indices != list(range(len(indices))):
        logits = logits[device_index(indices, logits.device)]
    return logits


def _draw(logits: torch.Tensor, draws: list[tuple[DrawToken, int, int]]) -> None:
    try:
        index = device_index([row for _, row, _ in draws], logits.device)
        rows = rows_from_logits(logits[index], cast("Vocabulary", ROW_BUFFER.ids))
        uniforms = [stream_uniform(plan.seed, drawn) for plan, _, drawn in draws]
        tokens = draw_tokens(rows, [plan.temperature for plan, _, _ in draws], uniforms)
        # A row that is not a distribution is NaN everywhere; its draw may be any id.
        invalid = rows[:, 0].isnan()
        tokens.masked_fill_(invalid, 0)
        if ROW_BUFFER.active:
            ROW_BUFFER.put_draws([plan.key for plan, _, _ in draws], invalid)
        logits.index_fill_(0, index, float("-inf"))
        logits[index, tokens] = 0.0
    except Exception as error:
        if not ROW_BUFFER.alone:  # other ranks go on with the tokens that they drew
            raise
        ROW_BUFFER.fail([plan.key for plan, _, _ in draws], error)
