"""The requests in SGLang's hands: which query each is, and what has come of it so far."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from genlm import (
    Completion,
    EvaluationError,
    Query,
    Vocabulary,
    draw_tokens,
    rows_from_logits,
    stream_uniform,
)
from genlm_sgl.scheduler_api import Ended

__all__ = ["Request", "Requests"]


@dataclass(slots=True)
class Request:
    """A query on its way.

    Attributes:
        query: What was asked.
        most_tokens: How many tokens to draw, unless it stops before.
        row: Its row, once the pass over its last token was seen.
        seed: Of its continuation.
        invalid: For each token drawn, whether its row was not a distribution; scalars on the
            engine's device, which are read when the continuation ends.
    """

    query: Query
    most_tokens: int
    row: torch.Tensor | None = None
    seed: int = field(init=False)
    invalid: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.query.sampling is not None:
            seed = self.query.sampling.seed
            self.seed = secrets.randbits(63) if seed is None else seed


class Requests:
    """Maps SGLang's request ids to queries, rows and draws; the `Hooks` of the scheduler.

    Args:
        vocabulary: Cuts logits to the tokenizer's ids.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_rid: dict[str, Request] = {}
        self._rids: dict[int, str] = {}
        self._numbers = itertools.count()
        self.rows_made = 0
        self.tokens_drawn = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def add(self, query: Query, most_tokens: int) -> str:
        """Take a query in; returns its request id, the beginning of no other's."""
        rid = f"{next(self._numbers)}."
        self._by_rid[rid] = Request(query, most_tokens)
        self._rids[query.query_id] = rid
        return rid

    def drop(self, query_id: int) -> str | None:
        """Forget a query; returns its request id, if it is known."""
        rid = self._rids.pop(query_id, None)
        if rid is not None:
            del self._by_rid[rid]
        return rid

    def unanswered(self) -> list[str]:
        """The ids of all requests."""
        return list(self._by_rid)

    def clear(self) -> None:
        """Forget all."""
        self._by_rid.clear()
        self._rids.clear()

    # -- SGLang's forward passes ------------------------------------------------------

    def saw_logits(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> None:
        """Keep the rows of the requests whose last token this pass computed.

        A prompt in chunks, and one that SGLang replaced with its own, has another length.
        """
        wanted = [
            (j, request)
            for j, (rid, length) in enumerate(zip(rids, lengths, strict=True))
            if (request := self._by_rid.get(rid)) is not None
            and request.query.sampling is None
            and length == len(request.query.token_ids)
        ]
        if not wanted:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            if len(wanted) < len(logits):
                logits = logits[[j for j, _ in wanted]]
            rows = rows_from_logits(logits, self._vocabulary)
            # Each row with memory of its own: a view would keep the whole batch alive.
            own: Sequence[torch.Tensor] = torch.unbind_copy(rows)  # type: ignore[assignment, func-returns-value]
            for (_, request), row in zip(wanted, own, strict=True):
                request.row = row
        self.rows_made += len(wanted)

    def draw(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> torch.Tensor:
        """Draw the next token of each request; those that want none get id 0."""
        drawing = []
        for j, (rid, length) in enumerate(zip(rids, lengths, strict=True)):
            request = self._by_rid.get(rid)
            if request is None or request.query.sampling is None:
                continue
            position = length - len(request.query.token_ids)
            if position >= 0:  # else a chunk of its prompt
                uniform = stream_uniform(request.seed, position)
                drawing.append((j, request, request.query.sampling.temperature, uniform))
        drawn = torch.zeros(len(rids), dtype=torch.int64, device=logits.device)
        if drawing:
            places, requests, temperatures, uniforms = zip(*drawing, strict=True)
            rows = rows_from_logits(logits[list(places)], self._vocabulary)
            tokens = draw_tokens(rows, temperatures, uniforms)
            # NaN is what a row that is not a distribution has everywhere. Its draw is no id,
            # over which the next pass would fail, with all that is in it.
            invalid = rows[:, 0].isnan()
            drawn[list(places)] = tokens.masked_fill(invalid, 0)
            for request, flag in zip(requests, invalid.unbind(), strict=True):
                request.invalid.append(flag)
        self.tokens_drawn += len(drawing)
        return drawn

    # -- ends -------------------------------------------------------------------------

    def completions(self, ended: Iterable[Ended]) -> list[Completion]:
        """The answers of requests that ended; those that were dropped have none."""
        answers = []
        for end in ended:
            request = self._by_rid.pop(end.rid, None)
            if request is not None:
                del self._rids[request.query.query_id]
                answers.append(_answer(request, end))
        return answers


def _answer(request: Request, end: Ended) -> Completion:
    query = request.query
    if end.aborted is not None:
        message = f"SGLang gave up a request of {len(query.token_ids)} tokens: {end.aborted}"
        return Completion(query.query_id, error=EvaluationError(message))
    if request.invalid and bool(torch.stack(request.invalid).any()):
        message = (
            f"SGLang computed a row that is not a distribution in the continuation of a prompt "
            f"of {len(query.token_ids)} tokens: NaN or infinite logits. Try dtype='float32'"
        )
        return Completion(query.query_id, error=EvaluationError(message))
    if query.sampling is not None:
        drawn, stops = end.output_ids[: request.most_tokens], query.sampling.stop_token_ids
        length = next((i for i, token in enumerate(drawn) if token in stops), None)
        if length is not None or len(drawn) == request.most_tokens:
            return Completion(query.query_id, drawn[:length])
        message = (
            f"SGLang ended a continuation after {len(drawn)} of {request.most_tokens} tokens"
        )
        return Completion(query.query_id, error=EvaluationError(message))
    if request.row is None:
        message = f"SGLang ended a request of {len(query.token_ids)} tokens without its logits"
        return Completion(query.query_id, error=EvaluationError(message))
    return Completion(query.query_id, request.row)
