"""Snapshots are read as tables, and subtracted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from genlm import Statistics
from genlm.plugin import Count

EMPTY = Statistics(
    joined=0, dispatched=0, answered=0, failed=0, abandoned=0, batches=0, batch_sizes={},
    queue_seconds=0.0, pending=0, waiting=0, requests=0, cache_hits=0, tokens_requested=0,
    cache_entries=0, cache_bytes=0, seconds=0.0, engine={},
)  # fmt: skip
BUSY = Statistics(
    joined=100, dispatched=1000, answered=990, failed=7, abandoned=3, batches=25,
    batch_sizes={40: 24, 37: 1}, queue_seconds=2.0, pending=1, waiting=2, requests=4000,
    cache_hits=2900, tokens_requested=123_456, cache_entries=990, cache_bytes=5 * 2**20,
    seconds=8.0,
    engine={"tokens_evaluated": Count(1000), "tokens_computed": Count(250), "path": "a<b"},
)  # fmt: skip


def lines(statistics: Statistics) -> dict[str, str]:
    split = (
        re.split(r"  +", line.strip(), maxsplit=1) for line in str(statistics).splitlines()
    )
    return {label: " ".join(cells[0].split()) for label, *cells in split}


def test_a_table_has_a_line_for_each_figure() -> None:
    assert lines(BUSY) == {
        "requests": "4,000 500.0 a second over 8.0 s",
        "from the output cache": "2,900 72.5%",
        "joined a pending one": "100 2.5%",
        "tokens requested": "123,456",
        "evaluations answered": "990",
        "failed": "7",
        "abandoned": "3",
        "pending now": "1 2 more waiting",
        "mean time in the queue": "2.00 ms",
        "batches": "25 of 39.9 on average, 40 at most",
        "rows in the output cache": "990 5.0 MiB",
        "tokens reused by engine": "75.0%",
        "engine: tokens_evaluated": "1,000",
        "engine: tokens_computed": "250",
        "engine: path": "a<b",
    }
    assert max(map(len, str(BUSY).splitlines())) < 80


def test_notebooks_get_the_same_cells_escaped() -> None:
    page = BUSY._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") == len(lines(BUSY))
    assert "72.5%" in page
    assert "a&lt;b" in page


def test_nothing_is_divided_by_zero() -> None:
    assert lines(EMPTY)["requests"] == "0 0.0 a second over 0.0 s"
    assert (EMPTY.mean_queue_s, EMPTY.mean_batch_size, EMPTY.cache_hit_ratio) == (0, 0, 0)
    assert "tokens reused by engine" not in lines(EMPTY)


@pytest.mark.parametrize(
    "engine", [{}, {"tokens_computed": 3}, {"tokens_computed": "3", "tokens_evaluated": 4}]
)
def test_an_engine_that_does_not_count_both_reuses_an_unknown_share(engine: Any) -> None:
    assert replace(BUSY, engine=engine).tokens_reused_ratio is None


def test_a_difference_has_the_counts_between_and_the_sizes_of_now() -> None:
    later = replace(
        BUSY,
        requests=5000,
        seconds=10.0,
        dispatched=1010,
        queue_seconds=3.0,
        batches=27,
        batch_sizes={40: 24, 37: 2, 2: 1},
        pending=0,
        cache_entries=7,
        engine={"tokens_evaluated": Count(1100), "tokens_computed": Count(300), "path": "c"}
        | {"replica 1: forwards": Count(5), "contexts_resident": 4},
    )
    earlier = {"replica 1: forwards": Count(4), "contexts_resident": 3}
    between = later - replace(BUSY, engine=BUSY.engine | earlier)
    assert (between.requests, between.answered, between.seconds) == (1000, 0, 2.0)
    assert between.requests_per_s == 500
    assert between.mean_queue_s == 0.1
    assert between.batch_sizes == {37: 1, 2: 1}
    assert between.mean_batch_size == 39 / 2
    assert (between.pending, between.cache_entries) == (0, 7)
    assert between.engine == {"tokens_evaluated": 100, "tokens_computed": 50, "path": "c"} | {
        "replica 1: forwards": 1,
        "contexts_resident": 4,
    }
    assert between.tokens_reused_ratio == 0.5
    with pytest.raises(TypeError):
        later - 3  # type: ignore[operator]
