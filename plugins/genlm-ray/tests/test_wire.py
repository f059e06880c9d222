"""Queries arrive as they were, named by what their replica knows."""

from __future__ import annotations

import sys
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
from genlm_ray.router import Router

SIZE = 7


@dataclass(frozen=True)
class Constant(Reduction):
    """Holds anything, and returns it."""

    value: object

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Constant]) -> Sequence[object]:
        return [each.value for each in requests]


def asked(*outputs):
    """Queries for these outputs, routed to a replica."""
    router = Router()
    router.add(0)
    router.assign([Query(i, (i + 1,), outputs=each) for i, each in enumerate(outputs)])
    return router.take(0, 100)


def values_of(queries):
    rows = torch.zeros(len(queries), SIZE).log_softmax(1)
    return [each.values for each in reduce_rows(rows, [query.outputs for query in queries])]


def test_a_query_that_waited_while_its_parent_was_dropped_arrives_whole():
    router, replica = Router(), wire.Sequences()
    router.add(0)
    parent = TokenSequence.of([3, 1, 4])

    def arrived() -> list[tuple[int, ...]]:
        packed = wire.packed_queries(router.take(0, 10), 0)
        return [query.token_ids for query in replica.queries(packed)]

    router.assign([Query(0, parent)])
    assert arrived() == [(3, 1, 4)]
    router.finished(0, 0)
    child = TokenSequence((5).to_bytes(4, sys.byteorder), parent)
    router.assign([Query(1, child), Query(2, parent)])  # they wait
    router.release(None, parent.key)
    [dropped] = router.dropped()
    assert router.forget(dropped) == [0]
    assert replica.forget(dropped.number) is not None
    assert arrived() == [(3, 1, 4, 5), (3, 1, 4)]
    # The second one named it again, so the replica has to forget it again.
    assert dropped.is_dropped
    assert router.forget(dropped) == [0]


def test_a_reduction_that_cannot_be_pickled_fails_alone():
    routed = asked(
        (None,), (Constant(threading.Lock()), None), (Constant(2),), (Constant(lambda: 3),)
    )
    replica = wire.Sequences()
    queries = replica.queries(wire.packed_queries(routed, 0))
    assert [query.token_ids for query in queries] == [(1,), (2,), (3,), (4,)]
    row, (refused, other), (two,), (function,) = values_of(queries)
    assert torch.is_tensor(row[0])
    assert torch.is_tensor(other)
    assert two == 2
    assert function() == 3
    assert isinstance(refused, EvaluationError)
    assert "Constant cannot be sent to a replica" in str(refused)
    child = TokenSequence.of([9], queries[1].sequence)  # the replica knows what it was sent
    router = Router()
    router.add(0)
    router.assign([Query(7, child)])
    assert replica.queries(wire.packed_queries(router.take(0, 1), 0))
