"""A run of a few hundred requests detects broken engines and a broken core."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm import Completion, Query
from genlm.core.model.requests import Requests
from genlm.core.reference.engine import ReferenceEngine
from genlm.core.rows.draws import batch_draw
from genlm.core.rows.output_cache import entry_value
from genlm.core.scheduler.request_table import Evaluation, RequestTable
from genlm.testing import EngineTarget
from genlm.testing.check import CheckFailure, CheckTimeout
from genlm.testing.run import find, targets_of

from .chaos import Report, Settings, run_chaos

REQUESTS = 600
TIMEOUT_S = 1.5  # a request that is lost; the others take a thousandth of it


def run(
    folder: Path,
    broken: Callable[..., Any] | None = None,
    *,
    requests: int = REQUESTS,
    timeout_s: float | None = None,
    seed: int = 0,
) -> Report:
    """A run of the reference engine, or of one derived from it."""
    target = targets_of(find("reference"), folder)[0]
    assert isinstance(target, EngineTarget)
    assert isinstance(target.build, functools.partial)
    right = target.build()
    for name, path in target.adapters.items():
        right.add_adapter(name, path)

    def oracle(token_ids: tuple[int, ...], adapter: str | None) -> Any:
        return right.evaluate([Query(0, token_ids, adapter)])[0]  # faster than the formula

    target = dataclasses.replace(target, oracle=oracle)
    if broken is not None:
        build = functools.partial(broken, **target.build.keywords)
        target = dataclasses.replace(target, build=build)
    return run_chaos(target, Settings(requests=requests, timeout_s=timeout_s, seed=seed))


class SwapsRows(ReferenceEngine):
    def evaluate(self, queries):
        rows = super().evaluate(queries)
        if len(rows) > 3:
            rows[[0, 1]] = rows[[1, 0]]
        return rows


class ForgetsAdapters(ReferenceEngine):
    def evaluate(self, queries):
        return super().evaluate([query.replace(adapter=None) for query in queries])


class LosesRequests(ReferenceEngine):
    """Loses every tenth completion, whatever the sizes of its batches are."""

    completed = 0

    def step(self):
        found = super().step()
        first = self.completed
        self.completed += len(found)
        return [each for number, each in enumerate(found, first) if number % 10 != 9]


class FailsARequest(ReferenceEngine):
    steps = 0

    def step(self):
        self.steps += 1
        found = super().step()
        if found and self.steps > 20:
            found[0] = Completion(found[0].query_id, error=MemoryError("no room"))
        return found


class LeaksRows(ReferenceEngine):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.leak: list[torch.Tensor] = []

    def evaluate(self, queries):
        rows = super().evaluate(queries)
        self.leak += [row.clone() for row in rows]
        return rows


def test_rows_of_a_batch_that_are_swapped(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match=r"(?s)the row of \[.*asked"):
        run(tmp_path, SwapsRows)


def test_adapters_that_are_forgotten(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match="with adapter"):
        run(tmp_path, ForgetsAdapters)


def test_a_request_that_is_lost(tmp_path: Path) -> None:
    with pytest.raises(CheckTimeout, match=r"requests, such as .*did not end"):
        run(tmp_path, LosesRequests, timeout_s=TIMEOUT_S)


def test_a_failed_run_closes_its_engine_and_ends_its_callers(tmp_path: Path) -> None:
    closed = []

    class Closing(LosesRequests):
        def close(self):
            super().close()
            closed.append(self)

    before = set(threading.enumerate())
    with pytest.raises(CheckTimeout):
        run(tmp_path, Closing, timeout_s=TIMEOUT_S)
    assert closed
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("chaos"):
            thread.join(30)
            assert not thread.is_alive(), thread.name


def test_a_request_that_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match=r"EvaluationError.*caused by MemoryError"):
        run(tmp_path, FailsARequest)


def test_rows_that_are_kept_for_ever(tmp_path: Path) -> None:
    with pytest.raises(CheckFailure, match="more tensors after"):
        run(tmp_path, LeaksRows)


def test_a_cached_row_that_is_not_copied(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("genlm.core.model.cached_results.entry_copy", entry_value)

    def run_seeds() -> None:
        """A run sees it if a row is asked again after a caller overwrote it: by chance."""
        for seed in range(20):
            folder = tmp_path / str(seed)
            folder.mkdir()
            run(folder, seed=seed)

    with pytest.raises(CheckFailure, match=r"logsumexp|not a distribution|the row of"):
        run_seeds()


def test_a_joined_row_that_is_not_copied(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("genlm.core.scheduler.delivery.copy_result", lambda row: row)
    with pytest.raises(CheckFailure, match="logsumexp"):
        run(tmp_path)


def test_keys_that_are_kept_for_ever(tmp_path: Path, monkeypatch: Any) -> None:
    kept: list[Any] = []
    build_query = Requests.build_query

    def keeping(*arguments: Any) -> Any:
        ids = getattr(arguments[1], "token_ids", arguments[1])
        kept.append([list(ids), build_query(*arguments)])
        return kept[-1][1]

    monkeypatch.setattr(Requests, "build_query", keeping)
    with pytest.raises(CheckFailure, match="more blocks after"):
        run(tmp_path, requests=3000)


def test_requests_that_are_not_counted(tmp_path: Path, monkeypatch: Any) -> None:
    leave = RequestTable.leave

    def uncounted(self: RequestTable, *arguments: Any) -> list[int]:
        abandoned = self._abandoned
        aborts = leave(self, *arguments)
        self._abandoned = abandoned
        return aborts

    monkeypatch.setattr(RequestTable, "leave", uncounted)
    with pytest.raises(CheckFailure, match=r"requests = cache_hits \+ joined"):
        run(tmp_path)


def test_callers_who_leave_and_take_others_with_them(tmp_path: Path, monkeypatch: Any) -> None:
    leave = RequestTable.leave

    def all_leave(self: RequestTable, request: Any) -> list[int]:
        evaluations = [each for each in request.values if isinstance(each, Evaluation)]
        others = [other for each in evaluations for other, _, _ in each.consumers]
        return [query_id for each in [*others, request] for query_id in leave(self, each)]

    monkeypatch.setattr(RequestTable, "leave", all_leave)
    with pytest.raises(CheckTimeout):  # noqa: PT012 - in a slow run, no caller may leave others
        for seed in range(20):
            folder = tmp_path / str(seed)
            folder.mkdir()
            run(folder, timeout_s=TIMEOUT_S, seed=seed)


def test_draws_that_are_not_the_likeliest(tmp_path: Path, monkeypatch: Any) -> None:
    def draw(rows: Any, numbers: Any, weights: Any, **options: Any) -> Any:
        drawn = batch_draw(-rows, numbers, weights, **options)
        return drawn._replace(logprobs=-drawn.logprobs)

    monkeypatch.setattr("genlm.core.rows.group_reductions.batch_draw", draw)
    with pytest.raises(CheckFailure, match=r"the most likely token|token -?\d+ and its mask"):
        run(tmp_path)


def test_what_a_failure_says_is_short(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(CheckFailure) as failure:
        run(tmp_path, SwapsRows)
    assert len(str(failure.value).splitlines()) <= 4
    assert len(str(failure.value)) < 1000
