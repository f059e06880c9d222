"""Putting queries through an engine, and the oracle's answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from genlm import Query
from genlm.core.rows.reductions import Draw
from genlm.plugin import draw_tokens, stream_uniform
from genlm.testing import TINY_VOCABULARY
from genlm_vllm.conformance import TinyLlama

Ids = tuple[int, ...]

_query_ids = itertools.count()


def prompts(*lengths: int, seed: int = 0) -> list[Ids]:
    """Random sequences of these lengths, always the same ones."""
    generator = random.Random(seed)
    return [tuple(generator.randrange(3, TINY_VOCABULARY) for _ in range(n)) for n in lengths]


def submit(engine: Any, token_ids: Ids, adapter: str | None = None, **options: Any) -> Query:
    query = Query(next(_query_ids), token_ids, adapter, **options)
    engine.submit(query)
    return query


def finish(engine: Any, queries: Iterable[Query]) -> list[Any]:
    """Step until all are answered; their results or errors, in order."""
    waiting = {query.query_id: query for query in queries}
    found: dict[int, Any] = {}
    while len(found) < len(waiting):
        for answer in engine.step():
            assert answer.query_id in waiting, "an answer to a query that is not waiting"
            assert answer.query_id not in found, "two answers to one query"
            found[answer.query_id] = answer.result if answer.error is None else answer.error
    return [found[query_id] for query_id in waiting]


def rows(engine: Any, asked: Iterable[Ids], adapter: str | None = None) -> list[Any]:
    return finish(engine, [submit(engine, ids, adapter) for ids in asked])


def drawn(
    engine: Any, asked: Iterable[Ids], length: int, beside: Iterable[Query] = ()
) -> list[list[int]]:
    """Continuations drawn by the engine, of each prompt with its own seed, beside queries."""
    sequences, others = list(asked), list(beside)
    for place in range(length):
        outputs = [(Draw(stream_uniform(seed, place)),) for seed in range(len(sequences))]
        queries = [
            submit(engine, ids, outputs=output)
            for ids, output in zip(sequences, outputs, strict=True)
        ]
        sequences = [
            (*ids, found.values[0].token_id)
            for ids, found in zip(sequences, finish(engine, queries + others), strict=False)
        ]
        others = []
    return [list(ids[-length:]) for ids in sequences]


def largest_error(
    model: TinyLlama, found: Sequence[Any], asked: Sequence[Ids], adapter: str | None = None
) -> float:
    """Largest difference of a log-probability from an unbatched float32 forward."""
    for row in found:
        assert isinstance(row, torch.Tensor), row
    return max(
        float((row - model.logprobs(ids, adapter)).abs().max())
        for row, ids in zip(found, asked, strict=True)
    )


def expected_draws(
    model: TinyLlama,
    prompt: Ids,
    length: int,
    seed: int,
    temperature: float = 1.0,
    adapter: str | None = None,
) -> list[int]:
    """What a continuation must be: drawn one token at a time from the oracle's rows."""
    sequence = list(prompt)
    for place in range(length):
        row = model.logprobs(tuple(sequence), adapter)[None]
        token = draw_tokens(row, [temperature], [stream_uniform(seed, place)])
        sequence.append(int(token))
    return sequence[len(prompt) :]
