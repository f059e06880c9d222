"""Queries and answers arrive as they were."""

from __future__ import annotations

import sys

import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    Query,
    Reduced,
    TokenScores,
    TokenSequence,
)
from genlm_ray import wire
from genlm_ray.router import Router

SIZE = 7


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
    found = wire.completions(wire.packed_answers(sent, {}, SIZE))
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
        return [query.token_ids for query in replica.queries(wire.Questions(*packed))[0]]

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
