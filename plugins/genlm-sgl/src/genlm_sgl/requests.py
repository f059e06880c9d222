"""The queries that SGLang computes: their request ids, rows, scores, draws and completions.

Requested outputs are computed for all rows of a forward pass at once, after SGLang has
processed the pass; under overlap, the next pass runs meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    Query,
    Reduced,
    Vocabulary,
    device_index,
    draw_tokens,
    reduce_logits,
    reduce_rows,
    rows_from_logits,
    stream_uniform,
)
from genlm_sgl.scheduler_api import FinishedRequest
from genlm_sgl.score_api import ComputeLogits
from genlm_sgl.scores import Span, TextScores, score_spans
from genlm_sgl.streams import computed_event, read_on_current_stream

__all__ = ["Request", "Requests"]

_ROW_ONLY = (None,)


class _PassRows:
    """The rows of one forward pass and their requested outputs.

    On a CPU reductions are computed at once, a few rows at a time. A GPU would have to wait
    for the pass, so there they are computed when the first of them is taken.

    Args:
        logits: Logits of the queries with requested outputs.
        vocabulary: Defines the ids of the rows.
        outputs: Requested outputs of each query.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        vocabulary: Vocabulary,
        outputs: Sequence[tuple[Any, ...]],
    ) -> None:
        self._rows: torch.Tensor | None = None
        self._outputs = outputs
        self._results: list[Any] = []
        if logits.device.type == "cpu" and any(each != _ROW_ONLY for each in outputs):
            self._results = self._unwrapped(reduce_logits(logits, vocabulary, outputs))
        else:
            self._rows = rows_from_logits(logits, vocabulary)

    def take(self, place: int) -> Any:
        """Return the outputs of one query, or the error of its row.

        It is computed on the current stream, after `Request.computed`.
        """
        if self._rows is not None:
            read_on_current_stream(self._rows)
            with torch.no_grad():
                self._results = self._computed(self._rows)
            self._rows = None
        result, self._results[place] = self._results[place], None
        return result

    def _computed(self, rows: torch.Tensor) -> list[Any]:
        if all(each == _ROW_ONLY for each in self._outputs):
            # Rows own their memory: a view would keep the whole batch alive.
            own: Sequence[torch.Tensor] = torch.unbind_copy(rows)  # type: ignore[assignment, func-returns-value]
            return list(own)
        return self._unwrapped(reduce_rows(rows, self._outputs, normalised=True))

    def _unwrapped(self, results: Sequence[Reduced | Exception]) -> list[Any]:
        """Return the row for queries that request only the row."""
        return [
            result.values[0] if isinstance(result, Reduced) and each == _ROW_ONLY else result
            for result, each in zip(results, self._outputs, strict=True)
        ]


@dataclass(slots=True)
class Request:
    """A query in SGLang.

    Attributes:
        query: The query.
        max_tokens: Maximum number of tokens to draw.
        order: The number of queries before it.
        scores: Its scores, if it has targets.
        answer: Returns the result of a query for a row; set once the forward pass over its
            last token has run.
        computed: Event after what was computed for it last, on a stream of SGLang's; None on a
            CPU.
        seed: Seed of its continuation.
        invalid: For each drawn token, whether its row was not a distribution; scalars on the
            engine's device, read when the continuation finishes.
    """

    query: Query
    max_tokens: int
    order: int
    scores: TextScores | None = None
    answer: Callable[[], Any] | None = None
    computed: Any = None  # torch.Event
    seed: int = field(init=False)
    invalid: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.query.sampling is not None:
            seed = self.query.sampling.seed
            self.seed = secrets.randbits(63) if seed is None else seed

    def wait(self) -> None:
        """Have the current stream wait for the query's computation."""
        if self.computed is not None:
            self.computed.wait()


class Requests:
    """Maps SGLang's request ids to queries, rows and draws; the `Hooks` of the scheduler.

    Args:
        vocabulary: Defines the ids of the rows.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_rid: dict[str, Request] = {}
        self._rids: dict[int, str] = {}
        self._numbers = itertools.count()
        self._orders = itertools.count()
        self.rows_made = 0
        self.targets_scored = 0
        self.tokens_drawn = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def add(self, query: Query, max_tokens: int) -> str:
        """Add a query; return its request id, which is not a prefix of another id."""
        rid = f"{next(self._numbers)}."
        self._assign(rid, query, max_tokens)
        return rid

    def continue_with(self, rid: str, query: Query) -> None:
        """Add a query for a row to a request that stays and has no query."""
        self._assign(rid, query, 0)

    def _assign(self, rid: str, query: Query, max_tokens: int) -> None:
        scores = TextScores(query, self._vocabulary) if query.targets else None
        self._by_rid[rid] = Request(query, max_tokens, next(self._orders), scores)
        self._rids[query.query_id] = rid

    def get(self, rid: str) -> Request | None:
        """Return the query of a request as a `Request`; None if it has no query."""
        return self._by_rid.get(rid)

    def rid_of(self, query_id: int) -> str | None:
        """Return the request id of a query, None if it is unknown."""
        return self._rids.get(query_id)

    def take_row(self, rid: str) -> Completion | None:
        """Complete the query of a resident request; None if its row is not computed yet."""
        request = self._by_rid.get(rid)
        if request is None or request.answer is None:
            return None
        del self._by_rid[rid], self._rids[request.query.query_id]
        request.wait()
        return _answered(request.query, request.answer)

    def drop(self, query_id: int) -> str | None:
        """Remove a query; return its request id, None if it is unknown."""
        rid = self._rids.pop(query_id, None)
        if rid is not None:
            del self._by_rid[rid]
        return rid

    def unanswered(self) -> list[str]:
        """Return the ids of all requests."""
        return list(self._by_rid)

    def clear(self) -> list[int]:
        """Remove all queries; return their ids."""
        query_ids = list(self._rids)
        self._by_rid.clear()
        self._rids.clear()
        return query_ids

    # -- SGLang's forward passes ------------------------------------------------------

    def on_logits(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> None:
        """Build the rows of the requests whose last token this pass computed.

        The lengths of chunks, and of prompts that SGLang replaced, differ from
        the query's.
        """
        wanted = [
            (j, request)
            for j, (rid, length) in enumerate(zip(rids, lengths, strict=True))
            if (request := self._by_rid.get(rid)) is not None
            and request.query.sampling is None
            and request.scores is None
            and length == len(request.query)
        ]
        if not wanted:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            if len(wanted) < len(logits):
                logits = logits[device_index([j for j, _ in wanted], logits.device)]
            outputs = [request.query.outputs for _, request in wanted]
            computed = _PassRows(logits, self._vocabulary, outputs)
        event = computed_event(logits)
        for place, (_, request) in enumerate(wanted):
            request.answer = functools.partial(computed.take, place)
            request.computed = event
        self.rows_made += len(wanted)

    def on_hidden_states(
        self,
        rids: Sequence[str],
        begins: Sequence[int],
        lengths: Sequence[int],
        states: torch.Tensor,
        compute_logits: ComputeLogits,
    ) -> None:
        """Score the targets that follow tokens of this pass."""
        spans: list[Span] = []
        scoring: list[Request] = []
        row = 0
        for rid, begin, length in zip(rids, begins, lengths, strict=True):
            request = self._by_rid.get(rid)
            if request is not None and request.scores is not None:
                scores = request.scores
                if targets := scores.wanted(begin, length):
                    place = row + scores.position(targets.start) - begin
                    spans.append(Span(scores, targets, place))
                    scoring.append(request)
            row += length
        if spans:
            if row > len(states):  # the graph of a pass may compute more, after these
                raise EvaluationError(
                    f"SGLang computed {len(states)} hidden states in a pass over {row} tokens"
                )
            score_spans(spans, states, compute_logits, self._vocabulary.size)
            event = computed_event(states)
            for each in scoring:
                each.computed = event
            self.targets_scored += sum(len(each.targets) for each in spans)

    def draw(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> torch.Tensor:
        """Draw the next token of each request; those without sampling get id 0."""
        drawing = []
        for j, (rid, length) in enumerate(zip(rids, lengths, strict=True)):
            request = self._by_rid.get(rid)
            if request is None or request.query.sampling is None:
                continue
            position = length - len(request.query)
            if position >= 0:  # otherwise a prompt chunk
                uniform = stream_uniform(request.seed, position)
                drawing.append((j, request, request.query.sampling.temperature, uniform))
        drawn = torch.zeros(len(rids), dtype=torch.int64, device=logits.device)
        if drawing:
            places, requests, temperatures, uniforms = zip(*drawing, strict=True)
            index = device_index(places, logits.device)
            rows = rows_from_logits(logits[index], self._vocabulary)
            tokens = draw_tokens(rows, temperatures, uniforms)
            # A row that is not a distribution is NaN everywhere. Its draw is outside the
            # vocabulary, and would make the whole next forward pass fail.
            invalid = rows[:, 0].isnan()
            drawn[index] = tokens.masked_fill(invalid, 0)
            event = computed_event(invalid)
            for request, flag in zip(requests, invalid.unbind(), strict=True):
                request.invalid.append(flag)
                request.computed = event
        self.tokens_drawn += len(drawing)
        return drawn

    # -- completions ------------------------------------------------------------------

    def completions(self, finished: Iterable[FinishedRequest]) -> list[Completion]:
        """Return the completions of finished requests, except for removed ones."""
        completions = []
        for each in finished:
            request = self._by_rid.pop(each.rid, None)
            if request is not None:
                del self._rids[request.query.query_id]
                completions.append(_completion(request, each))
        return completions


def _completion(request: Request, finished: FinishedRequest) -> Completion:
    query = request.query
    if finished.abort_reason is not None:
        length = len(query)
        message = f"SGLang aborted a request of {length} tokens: {finished.abort_reason}"
        return Completion(query.query_id, error=EvaluationError(message))
    request.wait()
    read_on_current_stream(*request.invalid)
    if request.invalid and bool(torch.stack(request.invalid).any()):
        message = (
            f"SGLang computed a row that is not a distribution in the continuation of a prompt "
            f"of {len(query)} tokens: NaN or infinite logits. Try dtype='float32'"
        )
        return Completion(query.query_id, error=EvaluationError(message))
    if query.sampling is not None:
        drawn, stops = finished.output_ids[: request.max_tokens], query.sampling.stop_token_ids
        end = next((i for i, token in enumerate(drawn) if token in stops), None)
        if end is not None or len(drawn) == request.max_tokens:
            return Completion(query.query_id, drawn[:end])
        message = (
            f"SGLang ended a continuation after {len(drawn)} of {request.max_tokens} tokens"
        )
        return Completion(query.query_id, error=EvaluationError(message))
    answer = request.answer if request.scores is None else request.scores.result
    if answer is None:
        message = f"SGLang ended a request of {len(query)} tokens without its logits"
        return Completion(query.query_id, error=EvaluationError(message))
    return _answered(query, answer)


def _answered(query: Query, answer: Callable[[], Any]) -> Completion:
    try:
        result = answer()
    except Exception as error:  # noqa: BLE001 - it fails the query
        result = error
    if isinstance(result, Exception):
        return Completion(query.query_id, error=result)
    return Completion(query.query_id, result)
