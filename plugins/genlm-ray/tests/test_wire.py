"""Unpacked queries equal the packed queries."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from genlm.plugin import (
    EvaluationError,
    Query,
    Reduction,
    TokenSequence,
    reduce_rows,
)
from genlm_ray import wire

SIZE = 7


@dataclass(frozen=True)
class Constant(Reduction):
    """Returns its value."""

    value: object

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Constant]) -> Sequence[object]:
        return [request.value for request in requests]


def values_of(queries):
    rows = torch.zeros(len(queries), SIZE).log_softmax(1)
    return [
        reduced.values for reduced in reduce_rows(rows, [query.outputs for query in queries])
    ]


def test_queries_arrive_as_they_were_and_a_common_prompt_is_sent_once():
    prompt = TokenSequence.of(range(5000))
    queries = [
        Query(7 + i, TokenSequence.of([i], prompt), "poet" if i % 2 else None)
        for i in range(50)
    ]
    queries.append(Query(3, TokenSequence.of([1, 2]), targets=(2, 3)))
    packed = wire.pack_queries(queries)
    assert wire.unpack_queries(packed) == queries
    assert len(pickle.dumps(packed)) < 4 * 5000 + 100 * 60  # the blocks and the tails


def test_a_reduction_that_cannot_be_pickled_fails_alone():
    outputs = [
        (None,), (Constant(threading.Lock()), None), (Constant(2),), (Constant(lambda: 3),)
    ]  # fmt: skip
    packed = wire.pack_queries(
        [Query(i, (i + 1,), outputs=requested) for i, requested in enumerate(outputs)]
    )
    queries = wire.unpack_queries(packed)
    assert [query.token_ids for query in queries] == [(1,), (2,), (3,), (4,)]
    row, (refused, other), (two,), (function,) = values_of(queries)
    assert torch.is_tensor(row[0])
    assert torch.is_tensor(other)
    assert two == 2
    assert function() == 3
    assert isinstance(refused, EvaluationError)
    assert "Constant cannot be sent to a replica" in str(refused)
