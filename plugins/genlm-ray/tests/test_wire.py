"""Queries and answers arrive as they were."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    Query,
    Reduced,
    Reduction,
    TokenScores,
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


@pytest.fixture
def elsewhere(monkeypatch):
    """A class in a module that can be taken away, as if it was missing in the other process."""
    module = types.ModuleType("only_in_one_process")
    module.Constant = Constant
    exec("class Odd(Constant): pass\nclass Thing: pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def asked(*outputs):
    """Queries for these outputs, routed to a replica."""
    router = Router()
    router.add(0)
    router.assign([Query(i, (i + 1,), outputs=each) for i, each in enumerate(outputs)])
    return router.take(0, 100)


def values_of(queries):
    rows = torch.zeros(len(queries), SIZE).log_softmax(1)
    return [each.values for each in reduce_rows(rows, [query.outputs for query in queries])]


def test_rows_and_tensors_of_any_shape_and_dtype_arrive_as_they_were():
    row, other = torch.randn(SIZE).log_softmax(0), torch.randn(SIZE).log_softmax(0)
    few, ids = torch.randn(3), torch.tensor([5, 2**40])
    wide, flags = torch.randn(SIZE, dtype=torch.float64), torch.tensor([True, False])
    scores = TokenScores(torch.randn(2), flags)
    sent = [
        Completion(0, row),
        Completion(1, Reduced((few, other, ids))),
        Completion(2, Reduced((wide, 0.5, EvaluationError("no room")))),
        Completion(3, scores),
        Completion(4, error=EvaluationError("too long")),
    ]
    found = wire.completions(wire.packed_response(sent, {}, SIZE))
    assert [each.query_id for each in found] == list(range(5))
    pairs = [(found[0].result, row), (found[3].result.logprobs, scores.logprobs)]
    pairs += zip(found[1].result.values, (few, other, ids), strict=True)
    pairs += [(found[2].result.values[0], wide), (found[3].result.is_top, flags)]
    for value, expected in pairs:
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
    assert found[2].result.values[1] == 0.5
    assert isinstance(found[2].result.values[2], EvaluationError)
    assert isinstance(found[4].error, EvaluationError)
    found[0].result.add_(1)  # rows belong to their receivers


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


def test_a_reduction_that_the_replica_lacks_fails_alone(elsewhere, monkeypatch):
    shared = torch.arange(3)
    routed = asked((elsewhere.Odd(1), None), (Constant(shared),), (Constant(shared),))
    message = wire.packed_queries(routed, 0)
    monkeypatch.delitem(sys.modules, elsewhere.__name__)
    (odd, row), (first,), (second,) = values_of(wire.Sequences().queries(message))
    assert isinstance(odd, EvaluationError)
    assert "cannot be imported at the replica" in str(odd)
    assert torch.is_tensor(row)
    assert torch.equal(first, shared)
    assert first is second  # what queries share travels once


def test_results_that_cannot_be_sent_or_read_fail_alone(elsewhere, monkeypatch):
    row = torch.randn(SIZE).log_softmax(0)
    half = torch.tensor([1.5, -2.0]).bfloat16()
    unreadable = type("Unreadable", (Exception,), {"__module__": elsewhere.__name__})
    elsewhere.Unreadable = unreadable
    sent = [
        Completion(0, row),
        Completion(1, Reduced(((i for i in range(3)), 0.5))),
        Completion(2, Reduced((elsewhere.Thing(), half))),
        Completion(3, (i for i in range(3))),
        Completion(4, error=unreadable("gone")),
        Completion(5, Reduced((None, [1, half]))),
    ]
    answers = wire.packed_response(sent, {}, SIZE)
    monkeypatch.delitem(sys.modules, elsewhere.__name__)
    found = wire.completions(answers)
    assert [each.query_id for each in found] == list(range(6))
    assert torch.equal(found[0].result, row)
    generator, number = found[1].result.values
    assert isinstance(generator, EvaluationError)
    assert "generator" in str(generator)
    assert number == 0.5
    missing, half_found = found[2].result.values
    assert isinstance(missing, EvaluationError)
    assert half_found.dtype == torch.bfloat16
    assert torch.equal(half_found, half)
    assert "generator" in str(found[3].error)
    assert found[3].result is None
    assert isinstance(found[4].error, EvaluationError)
    assert found[5].result.values[0] is None
    assert torch.equal(found[5].result.values[1][1], half)


def test_a_result_that_cannot_be_packed_fails_alone():
    row = torch.randn(SIZE).log_softmax(0)
    sent = [
        Completion(0, row),
        Completion(1, torch.empty(SIZE, device="meta")),  # which no copy can leave
        Completion(2, Reduced((0.5, row))),
    ]
    first, lost, third = wire.completions(wire.packed_response(sent, {"rows": 3}, SIZE))
    assert torch.equal(first.result, row)
    assert torch.equal(third.result.values[1], row)
    assert lost.query_id == 1
    assert "cannot be sent from the replica: packing it raised" in str(lost.error)
