"""Queries and completions are plain values: equal by content and picklable."""

from __future__ import annotations

import pickle

import pytest

from genlm.core.queries.query import Completion, Query

QUERY = Query(3, (1, 2), "adapter", targets=(7, 11))


def test_a_query_asks_for_a_row_of_the_base_model_unless_told_otherwise() -> None:
    assert Query(0, (1,)) == Query(0, (1,), adapter=None, targets=())


def test_queries_with_the_same_content_are_one_key() -> None:
    same = Query(3, (1, 2), "adapter", targets=(7, 11))
    assert len({QUERY, same, Query(3, (2, 1), "adapter", targets=(7, 11))}) == 2
    assert same != Query(3, (1, 2), "adapter", targets=(7, 12))
    assert same != "query"


def test_completions_cannot_be_changed_or_extended() -> None:
    for name in ("query_id", "seed"):
        with pytest.raises(AttributeError):
            setattr(Completion(3), name, 0)


def test_a_query_crosses_process_boundaries() -> None:
    assert pickle.loads(pickle.dumps(QUERY)) == QUERY


def test_the_representation_of_a_long_query_is_short() -> None:
    assert repr(Query(3, (1, 2))) == "Query(query_id=3, token_ids=(1, 2), adapter=None)"
    assert len(repr(Query(3, tuple(range(100_000))))) < 200
