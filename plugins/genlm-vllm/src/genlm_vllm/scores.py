"""Scores of given tokens, computed inside vLLM from the hidden states of each step.

vLLM computes the hidden states of all tokens that it schedules, and logits of the last one of
each request. Here the worker computes logits of the wanted positions as well, in pieces, right
where vLLM computes prompt log-probabilities. It runs in the process of the model's last layer,
on all tensor-parallel ranks, which compute logits together; one of them keeps the scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from genlm.plugin import EvaluationError, PositionReduction, TokenSequence, rows_from_logits
from genlm.prefix import PieceScores, ScoredText, TextResult
from genlm_vllm.row_buffer import ROW_BUFFER, device_index
from genlm_vllm.transport import unpack_outputs

if TYPE_CHECKING:
    from genlm.plugin import Reduction, Vocabulary

__all__ = ["SCORES", "SCORE_BUFFER", "ScoreBuffer", "ScoreTargets", "Span", "start_scores"]

SCORES = "genlm_scores"
"""Key in `SamplingParams.extra_args`."""

_VALUES = 2**22
"""Logits that are computed at once, however long the texts are: 16 MiB in float32, memory that
the allocator keeps. The kernel gives larger blocks page by page, anew for each piece."""

_LEAST_POSITIONS = 128
"""Positions that are computed at once although they have more logits than that, because each
piece reads the whole output embedding."""

_VALUES_IN_CACHE = 2**18
"""Most logits that are normalised at once on a CPU, so that they stay in its caches."""

Scores = tuple[bytes, bytes] | str
"""Log-probabilities as float32, and whether each is the largest as bool; or an error."""


class ScoreTargets(NamedTuple):
    """Score given tokens of the request's prompt and the one after it.

    Attributes:
        key: Key of the scores.
        first: Position of the prompt after which the first one comes.
        targets: Their ids; target i comes after position `first + i`.
        output: What is computed of the rows before them, in another process as `pack_outputs`
            made it; None for the scores.
    """

    key: int
    first: int
    targets: Sequence[int]
    output: Reduction | bytes | None = None

    @classmethod
    def of(cls, sampling_params: Any) -> ScoreTargets | None:
        """Return what a request of vLLM carries; None if it carries none."""
        arguments = None if sampling_params is None else sampling_params.extra_args
        found = (arguments or {}).get(SCORES)
        # In another process a named tuple arrives as a list.
        return None if found is None else cls(*found)

    def pieces(self) -> PieceScores:
        """Return what reduces the rows before the targets.

        Raises:
            EvaluationError: The reduction cannot be loaded in this process.
        """
        output = self.output
        if isinstance(output, bytes):
            [output] = unpack_outputs([output])
        if not isinstance(output, PositionReduction):
            raise EvaluationError(getattr(output, "reason", f"no reduction: {output!r}"))
        text = ScoredText(TokenSequence(b""), tuple(self.targets), output.reduction)
        return PieceScores([text], cast("Vocabulary", ROW_BUFFER.ids))


class Span(NamedTuple):
    """The tokens that a step computes of a request that scores.

    Attributes:
        request: What the request carries.
        row: Index of the first of them in the step's hidden states.
        begin: Its position in the request.
        length: How many there are.
    """

    request: ScoreTargets
    row: int
    begin: int
    length: int

    @property
    def wanted(self) -> range:
        """Which targets are predicted by these tokens."""
        first, count = self.request.first, len(self.request.targets)
        begin = max(0, self.begin - first)
        return range(begin, max(begin, min(count, self.begin + self.length - first)))


class _Scores:
    """Scores of one request, some of them unknown yet."""

    def __init__(self, count: int) -> None:
        self.logprobs = np.zeros(count, np.float32)
        self.is_top = np.zeros(count, np.bool_)
        self.known = np.zeros(count, np.bool_)


class ScoreBuffer:
    """Scores by the key of their request, until the engine fetches them.

    A request may be computed in several steps and, after it was preempted, begin again.
    """

    def __init__(self) -> None:
        self._scores: dict[int, _Scores | PieceScores | Exception] = {}

    def reset(self) -> None:
        """Drop all scores."""
        self._scores.clear()

    def put(
        self, request: ScoreTargets, wanted: range, logprobs: torch.Tensor, is_top: torch.Tensor
    ) -> None:
        """Store the scores of some targets of a request, on the CPU."""
        scores = self._scores.setdefault(request.key, _Scores(len(request.targets)))
        if not isinstance(scores, _Scores):
            return
        places = slice(wanted.start, wanted.stop)
        scores.logprobs[places] = logprobs.numpy()
        scores.is_top[places] = is_top.numpy()
        scores.known[places] = True

    def reduce(self, request: ScoreTargets, wanted: range, logits: torch.Tensor) -> None:
        """Reduce the rows before some targets of a request."""
        if request.key not in self._scores:
            try:
                self._scores[request.key] = request.pieces()
            except EvaluationError as error:
                self.fail(request, error)
        scores = self._scores[request.key]
        if isinstance(scores, PieceScores):
            scores.add(np.arange(wanted.start, wanted.stop), logits)

    def fail(self, request: ScoreTargets, error: Exception) -> None:
        """Store an error, such as out of memory: if it were raised, vLLM would end."""
        self._scores[request.key] = error.with_traceback(None)

    def take(
        self, keys: Iterable[int], abandoned: Iterable[int]
    ) -> dict[int, Scores | TextResult]:
        """Remove and return the scores of requests; drop the `abandoned` ones.

        Returns:
            Those of which all targets are known: what vLLM's prefix cache served was not
            computed. An error's message in place of scores that could not be computed. What
            was reduced as `PieceScores.results` has it.
        """
        taken = {key: self._scores.pop(key) for key in keys if key in self._scores}
        for key in abandoned:
            self._scores.pop(key, None)
        packed: dict[int, Scores | TextResult] = {}
        for key, scores in taken.items():
            if isinstance(scores, Exception):
                packed[key] = f"{type(scores).__name__}: {scores}"
            elif isinstance(scores, PieceScores):
                if scores.is_complete:
                    [packed[key]] = scores.results()
            elif scores.known.all():
                packed[key] = (scores.logprobs.tobytes(), scores.is_top.tobytes())
        return packed

    def __len__(self) -> int:
        return len(self._scores)


SCORE_BUFFER = ScoreBuffer()
"""The buffer of this process, as `ROW_BUFFER`."""


def start_scores(runner: Any) -> bool:
    """Have a model runner of vLLM score the targets that requests carry.

    Returns:
        Whether it does: not if it would compute wrong logits for them, or computes prompt
        log-probabilities in another way than the supported versions.
    """
    mapping = _AdapterMapping(runner)
    if not mapping.is_known or runner.cache_config.kv_sharing_fast_prefill:
        return False  # the latter computes the hidden states of the last positions only
    if hasattr(runner, "prompt_logprobs_worker"):
        return _start_second_runner(runner, mapping)
    if not hasattr(runner, "_get_prompt_logprobs_dict"):
        return False
    original = runner._get_prompt_logprobs_dict  # noqa: SLF001 - called in every step

    def scored(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        spans = []
        for name, count in num_scheduled_tokens.items():
            state = runner.requests[name]
            request = ScoreTargets.of(state.sampling_params)
            if request is not None:
                index = runner.input_batch.req_id_to_index[name]
                row = int(runner.query_start_loc.np[index])
                spans.append(Span(request, row, state.num_computed_tokens, count))
        _score(runner.model.compute_logits, hidden_states, spans, mapping)
        return original(hidden_states, num_scheduled_tokens)

    runner._get_prompt_logprobs_dict = scored  # noqa: SLF001
    return True


def _start_second_runner(runner: Any, mapping: _AdapterMapping) -> bool:
    prompts = runner.prompt_logprobs_worker
    if prompts is None:  # not the last stage of a pipeline
        return True
    add, remove, compute = (
        prompts.add_request,
        prompts.remove_request,
        prompts.compute_prompt_logprobs,
    )
    requests: dict[str, ScoreTargets] = {}

    def added(name: str, index: int, sampling_params: Any) -> None:
        request = ScoreTargets.of(sampling_params)
        if request is not None:
            requests[name] = request
        add(name, index, sampling_params)

    def removed(name: str) -> None:
        requests.pop(name, None)
        remove(name)

    def scored(
        logits: Any, hidden_states: torch.Tensor, step_batch: Any, *arguments: Any
    ) -> Any:
        spans = [
            Span(
                requests[name],
                int(step_batch.query_start_loc_np[place]),
                int(step_batch.num_computed_prefill_tokens_np[place]),
                int(step_batch.num_scheduled_tokens[place]),
            )
            for place, name in enumerate(step_batch.req_ids if requests else ())
            if name in requests
        ]
        _score(logits, hidden_states, spans, mapping)
        return compute(logits, hidden_states, step_batch, *arguments)

    prompts.add_request, prompts.remove_request = added, removed
    prompts.compute_prompt_logprobs = scored
    return True


def _score(
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden_states: torch.Tensor,
    spans: Sequence[Span],
    mapping: _AdapterMapping,
) -> None:
    """Compute the scores of a step in pieces and store them, or the error that this raises."""
    wanted = [(span.request, span.wanted, span.row + span.request.first - span.begin)
              for span in spans if span.wanted]  # fmt: skip
    if not wanted:
        return
    try:
        _store(compute_logits, hidden_states, wanted, mapping)
    except Exception as error:
        if not ROW_BUFFER.alone:  # other ranks compute logits together with this one
            raise
        for request, _, _ in wanted:
            SCORE_BUFFER.fail(request, error)


def _store(
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden_states: torch.Tensor,
    wanted: Sequence[tuple[ScoreTargets, range, int]],
    mapping: _AdapterMapping,
) -> None:
    for request, places, row in wanted:
        if request.output is not None:
            _reduce(compute_logits, hidden_states, request, places, row, mapping)
    wanted = [each for each in wanted if each[0].output is None]
    if not wanted:
        return
    device = hidden_states.device
    rows = device_index([row + i for _, places, row in wanted for i in places], device)
    targets = device_index(
        [request.targets[i] for request, places, _ in wanted for i in places], device
    )
    size = max(_LEAST_POSITIONS, _VALUES // ROW_BUFFER.ids.size)
    parts = []
    pieces = zip(torch.split(rows, size), torch.split(targets, size), strict=True)
    for part, ids in pieces:
        with mapping.of(part):
            logits = compute_logits(hidden_states[part])
        if logits is not None and ROW_BUFFER.active:
            parts.append(_picked(logits, ids))
    if not parts:
        return
    logprobs, is_top = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    begin = 0
    for request, places, _ in wanted:
        end = begin + len(places)
        SCORE_BUFFER.put(request, places, logprobs[begin:end], is_top[begin:end])
        begin = end


def _reduce(  # noqa: PLR0917
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden_states: torch.Tensor,
    request: ScoreTargets,
    places: range,
    row: int,
    mapping: _AdapterMapping,
) -> None:
    """Reduce the rows before some targets of a request, which follow from token `row` on."""
    size = max(_LEAST_POSITIONS, _VALUES // ROW_BUFFER.ids.size)
    for begin in range(places.start, places.stop, size):
        part = range(begin, min(begin + size, places.stop))
        rows = torch.arange(row + part.start, row + part.stop, device=hidden_states.device)
        with mapping.of(rows):
            logits = compute_logits(hidden_states[rows])
        if logits is not None and ROW_BUFFER.active:
            SCORE_BUFFER.reduce(request, part, logits)


def _picked(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of an id of each row, and whether none is larger."""
    vocabulary = cast("Vocabulary", ROW_BUFFER.ids)
    size = len(ids)
    if logits.device.type == "cpu":
        size = max(1, _VALUES_IN_CACHE // vocabulary.size)
    logprobs, is_top = [], []
    pieces = zip(torch.split(logits, size), torch.split(ids, size), strict=True)
    for part, targets in pieces:
        rows = rows_from_logits(part, vocabulary)
        picked = rows.gather(1, targets[:, None])[:, 0]
        logprobs.append(picked)
        is_top.append(picked >= rows.amax(-1))
    return torch.cat(logprobs), torch.cat(is_top)


class _AdapterMapping:
    """Which adapter the logits of each row get.

    vLLM knows it for the rows that it samples from: with LoRA its logits processor reads one
    index for each of them.

    Attributes:
        is_known: Whether it can be changed: on the CPU; what GPUs read was not examined.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.lora.layers import LogitsProcessorWithLoRA
        from vllm.platforms import current_platform

        found = [
            module
            for module in runner.get_model().modules()
            if isinstance(module, LogitsProcessorWithLoRA)
        ]
        self._wrapper = found[0].punica_wrapper if found else None
        self.is_known = not found or current_platform.is_cpu()

    @contextlib.contextmanager
    def of(self, rows: torch.Tensor) -> Iterator[None]:
        """Have the next logits be those of tokens of the step, by their indices."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.indices_len[0] is None:  # no adapter was loaded yet
            yield
            return
        indices, length = wrapper._sampler_indices, wrapper.indices_len[1]  # noqa: SLF001
        wrapper._sampler_indices = wrapper.token_lora_indices[rows]  # noqa: SLF001
        wrapper.indices_len[1] = len(rows)
        try:
            yield
        finally:
            wrapper._sampler_indices = indices  # noqa: SLF001
            wrapper.indices_len[1] = length
