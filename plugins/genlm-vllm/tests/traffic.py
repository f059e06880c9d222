"""Functions that pass queries through an engine, and the oracle's results."""

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
    """Return random sequences of these lengths; equal arguments return equal sequences."""
    generator = random.Random(seed)
    return [tuple(generator.randrange(3, TINY_VOCABULARY) for _ in range(n)) for n in lengths]


def submit(engine: Any, token_ids: Ids, adapter: str | None = None, **options: Any) -> Query:
    query = Query(next(_query_ids), token_ids, adapter, **options)
    engine.submit(query)
    return query


def finish(engine: Any, queries: Iterable[Query]) -> list[Any]:
    """Step until all queries are complete and return their results or errors in order."""
    waiting = {query.query_id: query for query in queries}
    results: dict[int, Any] = {}
    while len(results) < len(waiting):
        for answer in engine.step():
            assert answer.query_id in waiting, "an answer to a query that is not waiting"
            assert answer.query_id not in results, "two answers to one query"
            results[answer.query_id] = answer.result if answer.error is None else answer.error
    return [results[query_id] for query_id in waiting]


def rows(engine: Any, sequences: Iterable[Ids], adapter: str | None = None) -> list[Any]:
    return finish(engine, [submit(engine, ids, adapter) for ids in sequences])


def drawn(
    engine: Any, prompts: Iterable[Ids], length: int, beside: Iterable[Query] = ()
) -> list[list[int]]:
    """Draw continuations with the index of the prompt as seed, together with other queries."""
    sequences, others = list(prompts), list(beside)
    for place in range(length):
        outputs = [(Draw(stream_uniform(seed, place)),) for seed in range(len(sequences))]
        queries = [
            submit(engine, ids, outputs=output)
            for ids, output in zip(sequences, outputs, strict=True)
        ]
        sequences = [
            (*ids, result.values[0].token_id)
            for ids, result in zip(sequences, finish(engine, queries + others), strict=False)
        ]
        others = []
    return [list(ids[-length:]) for ids in sequences]


def unfetched(engine: Any) -> int:
    """Return the number of queries whose results the workers have not returned."""

    def count(worker: Any) -> int:
        rows = worker._rows
        return 0 if rows is None else len(rows._works) + len(rows._scores.texts)

    return sum(engine.llm_engine.collective_rpc(count))


def largest_error(
    model: TinyLlama, rows: Sequence[Any], sequences: Sequence[Ids], adapter: str | None = None
) -> float:
    """Return the largest error of rows against unbatched float32 forward passes."""
    for row in rows:
        assert isinstance(row, torch.Tensor), row
    return max(
        float((row.cpu() - model.logprobs(ids, adapter)).abs().max())
        for row, ids in zip(rows, sequences, strict=True)
    )


def expected_draws(
    model: TinyLlama,
    prompt: Ids,
    length: int,
    seed: int,
    temperature: float = 1.0,
    adapter: str | None = None,
) -> list[int]:
    """Draw a continuation one token at a time from the oracle's rows."""
    sequence = list(prompt)
    for place in range(length):
        row = model.logprobs(tuple(sequence), adapter)[None]
        token = draw_tokens(row, [temperature], [stream_uniform(seed, place)])
        sequence.append(int(token))
    return sequence[len(prompt) :]
