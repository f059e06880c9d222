"""Queries and completions are plain values: equal by content and picklable."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from genlm.core.queries.query import Completion, Query, SamplingParams

QUERY = Query(3, (1, 2), "adapter", SamplingParams(5, 0.5, frozenset({7}), 11))


def test_a_query_asks_for_a_row_of_the_base_model_unless_told_otherwise() -> None:
    assert Query(0, (1,)) == Query(0, (1,), adapter=None, sampling=None)


def test_sampling_draws_from_the_model_itself_unless_told_otherwise() -> None:
    assert SamplingParams(1) == SamplingParams(1, 1.0, frozenset(), None)


def test_queries_with_the_same_content_are_one_key() -> None:
    same = Query(3, (1, 2), "adapter", SamplingParams(5, 0.5, frozenset({7}), 11))
    assert len({QUERY, same, Query(3, (2, 1), "adapter", QUERY.sampling)}) == 2


@pytest.mark.parametrize("value", [QUERY.sampling, Completion(3, [1])])
def test_values_cannot_be_changed_or_extended(value: object) -> None:
    for name in ("query_id", "seed"):
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            setattr(value, name, 0)


def test_a_query_crosses_process_boundaries() -> None:
    assert pickle.loads(pickle.dumps(QUERY)) == QUERY
