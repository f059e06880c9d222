"""The sampler of both model runners and the reduction of rows, without a model.

The rows are compared with a log-softmax of the logits that the request had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_streams import RecordedStreams

from genlm.core.rows.group_reductions import DrawColumns
from genlm.core.rows.reductions import TopK
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowWeights
from genlm.plugin import Completion, EvaluationError, GroupResult, Reduced, TokenScores
from genlm_vllm import worker as worker_module
from genlm_vllm.messages import (
    TRANSPORT,
    ComputedPart,
    NewQuery,
    Outputs,
    StepInputs,
    VocabularyIds,
)
from genlm_vllm.row_sampler import REQUEST_PREFIX, replace_sampler
from genlm_vllm.scores import ScoreStore
from genlm_vllm.worker import RowWorker
from genlm_vllm.worker_rows import WorkerRows

SIZE, WIDTH = 5, 8
NAMES = [f"{REQUEST_PREFIX}1", f"{REQUEST_PREFIX}2", "other"]


class Runner1:
    """The parts of the first model runner that the sampler uses."""

    def __init__(self, names: list[str]) -> None:
        self.sampled: list[torch.Tensor] = []
        self.sampler: Any = self._sample
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(names), bool))
        self.requests = {name: SimpleNamespace(output_token_ids=[]) for name in names}
        self.input_batch = SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            token_ids_cpu=np.zeros((len(names), 9), np.int32),
            is_token_ids=np.zeros((len(names), 9), bool),
            num_tokens_no_spec=np.full(len(names), 4),
        )

    def _sample(self, logits: torch.Tensor, **_options: Any) -> Any:
        self.sampled.append(logits.clone())
        logits.fill_(torch.nan)  # vLLM may change them
        return SimpleNamespace(sampled_token_ids=torch.full((len(logits), 1), 7))


def rows_of(
    runner: Any, batches: int = 1, missing_ids: tuple[int, ...] = (), *, is_active: bool = True
) -> WorkerRows:
    ids: Any = VocabularyIds(SIZE, missing_ids)
    scores = ScoreStore(ids, is_active=is_active, is_alone=True)
    return WorkerRows(replace_sampler(runner, batches), scores)


def expected(logits: torch.Tensor) -> torch.Tensor:
    return logits[:SIZE].log_softmax(-1)


def row(rows: WorkerRows, query_id: int, name: str, *outputs: Any) -> ComputedPart:
    """Announce a query for a row, and return the part that says it was computed."""
    inputs = StepInputs()
    inputs.add(NewQuery(query_id, Outputs(outputs or (None,))))
    rows.prepare(inputs)
    return ComputedPart(query_id, [name], [0], is_last=True)


def test_rows_are_those_of_the_logits_and_others_are_sampled_by_vllm() -> None:
    runner = Runner1(NAMES)
    rows = rows_of(runner)
    logits = torch.randn(3, WIDTH)
    output = runner.sampler(logits=logits.clone())
    assert torch.equal(runner.sampled[0], logits)
    assert output.sampled_token_ids.tolist() == [[7]] * 3
    assert runner.discard_request_mask.np.tolist() == [True, True, False]
    completions = rows.collect([row(rows, 1, NAMES[1]), row(rows, 2, NAMES[0], TopK(2), None)])
    assert torch.allclose(completions[0].result, expected(logits[1]))
    assert completions[0].result.untyped_storage().nbytes() == 4 * SIZE
    top, whole = completions[1].result.values
    assert torch.allclose(whole, expected(logits[0]))
    assert torch.allclose(top.logprobs, expected(logits[0]).topk(2).values)
    [missing] = rows.collect([row(rows, 3, NAMES[1])])
    assert isinstance(missing.error, EvaluationError)


def test_vllm_samples_nothing_where_all_requests_are_this_librarys() -> None:
    runner = Runner1(NAMES[:2])
    rows_of(runner)
    output = runner.sampler(logits=torch.randn(2, WIDTH))
    assert not runner.sampled
    assert output.sampled_token_ids.shape == (2, 1)


def test_a_fed_token_is_written_where_the_runner_keeps_its_own() -> None:
    runner = Runner1(NAMES)
    absent = f"{REQUEST_PREFIX}absent"
    runner.requests[absent] = SimpleNamespace(output_token_ids=[])
    rows_of(runner).prepare(StepInputs({NAMES[0]: 6, absent: 7}))
    assert runner.requests[NAMES[0]].output_token_ids == [6]
    assert runner.requests[absent].output_token_ids == [7]
    assert runner.input_batch.token_ids_cpu[0, 4] == 6
    assert runner.input_batch.num_tokens_no_spec.tolist() == [5, 4, 4]


def test_missing_ids_have_no_probability() -> None:
    runner = Runner1(NAMES[:1])
    rows = rows_of(runner, missing_ids=(0, 3))
    runner.sampler(logits=torch.zeros(1, WIDTH))
    [completion] = rows.collect([row(rows, 1, NAMES[0])])
    assert completion.result.isneginf().tolist() == [True, False, False, True, False]


def test_only_one_rank_returns_rows() -> None:
    runner = Runner1(NAMES[:2])
    rows = rows_of(runner, is_active=False)
    runner.sampler(logits=torch.randn(2, WIDTH))
    assert rows.collect([row(rows, 1, NAMES[0])]) == []
    assert not rows._works


def test_batches_of_a_pipeline_are_kept_until_their_rows_are_taken() -> None:
    runner = Runner1([f"{REQUEST_PREFIX}1"])
    rows = rows_of(runner, batches=2)
    first, second = torch.randn(2, 1, WIDTH)
    runner.sampler(logits=first)
    runner.input_batch.req_ids = [f"{REQUEST_PREFIX}2"]
    runner.sampler(logits=second)
    for logits, name in ((first, f"{REQUEST_PREFIX}1"), (second, f"{REQUEST_PREFIX}2")):
        [completion] = rows.collect([row(rows, 1, name)])
        assert torch.allclose(completion.result, expected(logits[0]))


def draws(rows: WorkerRows, query_id: int, count: int, masks: Any = None) -> DrawColumns:
    """Announce the draws of a group of different sequences."""
    uniforms = np.random.default_rng(query_id).random(count)
    columns = DrawColumns(RowWeights((count, SIZE), masks), uniforms)
    inputs = StepInputs()
    inputs.add(NewQuery(query_id, Outputs((columns,)), np.arange(count), count))
    rows.prepare(inputs)
    return columns


def drawn_alone(columns: DrawColumns, logits: torch.Tensor) -> list[torch.Tensor]:
    logprobs = torch.stack([expected(row) for row in logits])
    members = torch.arange(len(logits))
    return list(columns.compute(logprobs, members, members))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of members whose draws were computed at once."""
    counts: list[int] = []
    compute = DrawColumns.compute_from_logits

    def record(self: DrawColumns, logits: Any, row_of: Any, members: Any) -> Any:
        counts.append(len(members))
        return compute(self, logits, row_of, members)

    monkeypatch.setattr(DrawColumns, "compute_from_logits", record)
    return counts


def test_draws_of_whole_groups_are_computed_together(computed: list[int]) -> None:
    names = [f"{REQUEST_PREFIX}{name}" for name in ("b1", "a2", "a0", "c0", "b0", "c1", "a1")]
    by_name = dict(zip(names, torch.randn(7, WIDTH), strict=True))
    runner = Runner1(names)
    rows = rows_of(runner)
    runner.sampler(logits=torch.stack([*by_name.values()]))
    alone = [draws(rows, query_id, count) for query_id, count in enumerate((3, 2, 3))]

    def part(query_id: int, letter: str, places: list[int]) -> ComputedPart:
        requests = [f"{REQUEST_PREFIX}{letter}{place}" for place in places]
        return ComputedPart(query_id, requests, places, is_last=letter != "c")

    parts = [part(0, "a", [2, 0, 1]), part(1, "b", [0, 1]), part(2, "c", [0, 1])]
    completions = {each.query_id: each.result for each in rows.collect(parts)}
    assert sorted(computed) == [2, 5]
    assert sorted(completions) == [0, 1]  # the third sequence of c follows in another step
    for query_id, letter in enumerate("ab"):
        logits = [by_name[f"{REQUEST_PREFIX}{letter}{i}"] for i in range(3 - query_id)]
        own = drawn_alone(alone[query_id], torch.stack(logits))
        for column, goal in zip(completions[query_id].columns, own, strict=True):
            torch.testing.assert_close(column, goal)


@pytest.mark.parametrize("cause", ["masks", "missing rows"])
def test_a_group_that_fails_does_not_fail_those_of_its_step(cause: str) -> None:
    names = [f"{REQUEST_PREFIX}{number}" for number in range(4)]
    runner, logits = Runner1(names), torch.randn(4, WIDTH)
    rows = rows_of(runner)
    runner.sampler(logits=logits.clone())
    alone = draws(rows, 0, 2)
    if cause == "masks":
        draws(rows, 1, 2, RowMasks.deferred(lambda: RowMasks(out_of_memory(), 2, SIZE), 2))
    else:
        draws(rows, 1, 2)
        names[2:] = [f"{REQUEST_PREFIX}absent"] * 2
    parts = [ComputedPart(i, names[2 * i : 2 * i + 2], [0, 1], is_last=True) for i in (0, 1)]
    right, wrong = sorted(rows.collect(parts), key=lambda completion: completion.query_id)
    assert right.result.errors == {}
    assert torch.equal(right.result.columns[0], drawn_alone(alone, logits[:2])[0])
    assert sorted(wrong.result.errors) == [0, 1]
    message = "out of memory" if cause == "masks" else "without computing its row"
    assert all(message in str(error) for error in wrong.result.errors.values())


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def test_out_of_memory_fails_the_queries_and_not_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner1(NAMES)
    rows = rows_of(runner)
    monkeypatch.setattr("genlm_vllm.worker_rows.reduce_logits", out_of_memory)
    runner.sampler(logits=torch.randn(3, WIDTH))
    [completion] = rows.collect([row(rows, 1, NAMES[0])])
    assert isinstance(completion.error, torch.OutOfMemoryError)
    assert completion.error.__traceback__ is None  # whose frames have the logits


@pytest.mark.parametrize("rows_in_a_reply", [0.5, 2, 9])
def test_results_for_another_process_are_divided_into_replies(
    monkeypatch: pytest.MonkeyPatch, rows_in_a_reply: float
) -> None:
    monkeypatch.setattr(worker_module, "_MAX_REPLY_BYTES", int(rows_in_a_reply * 4 * SIZE))
    names = [f"{REQUEST_PREFIX}{number}" for number in range(5)]
    runner, worker = Runner1(names), RowWorker()
    worker.device, worker._sends_results = torch.device("cpu"), True
    worker._rows = rows_of(runner)
    logits = torch.randn(5, WIDTH)
    runner.sampler(logits=logits)
    parts = [row(worker._rows, number, name) for number, name in enumerate(names)]
    replies: list[list[Completion]] = []
    has_more = True
    while has_more:
        problem, (packed, has_more) = worker.genlm_collect([] if replies else parts)
        assert problem is None
        replies.append(TRANSPORT.unpack_completions(packed))
    limit = max(1, int(rows_in_a_reply))
    assert list(map(len, replies)) == [limit] * (5 // limit) + [5 % limit] * bool(5 % limit)
    for completion in itertools.chain(*replies):
        assert torch.allclose(completion.result, expected(logits[completion.query_id]))


@pytest.mark.parametrize(
    "result",
    [
        torch.zeros(3, 4),
        Reduced((torch.zeros(2, 4), 0.5, (torch.zeros(4),))),
        GroupResult((torch.zeros(2, 4), torch.zeros(2, 2)), {1: ValueError()}),
        TokenScores(torch.zeros(8), torch.zeros(8, dtype=torch.int16)),
    ],
)
def test_the_size_of_a_reply_is_that_of_all_tensors(result: Any) -> None:
    assert worker_module._tensor_bytes(Completion(1, result)) == 48


# -- the second model runner ----------------------------------------------------------


class Runner2:
    """The parts of the second model runner that the sampler uses."""

    def __init__(self, names: list[str]) -> None:
        self.sampler: Any = lambda logits, _batch: SimpleNamespace(
            sampled_token_ids=torch.full((len(logits), 1), 7),
            num_sampled=torch.ones(len(logits), dtype=torch.int32),
        )
        self.req_states = SimpleNamespace(
            req_id_to_index={name: 2 * row for row, name in enumerate(names)},
            last_sampled_tokens=torch.zeros(2 * len(names), 1, dtype=torch.int64),
        )


def test_the_second_runner_hides_own_requests() -> None:
    runner = Runner2(NAMES)
    rows = rows_of(runner)
    rows.prepare(StepInputs({NAMES[0]: 6}))
    assert runner.req_states.last_sampled_tokens[:, 0].tolist() == [6] + [0] * 5
    logits = torch.randn(3, WIDTH)
    output = runner.sampler(logits.clone(), SimpleNamespace(req_ids=NAMES))
    assert output.num_sampled.tolist() == [0, 0, 1]
    [completion] = rows.collect([row(rows, 1, NAMES[1])])
    assert torch.allclose(completion.result, expected(logits[1]))


# -- on a GPU -------------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedStreams]:
    streams = RecordedStreams(monkeypatch)
    with streams:
        yield streams
    assert streams.hazards == []


def test_results_are_ordered_after_the_step_on_the_stream_of_callers(
    streams: RecordedStreams,
) -> None:
    runner = Runner1(NAMES[:2])
    worker = RowWorker()
    worker.device, worker._rows = torch.device("cuda", 0), rows_of(runner)
    logits = torch.randn(2, WIDTH)
    with streams.on():
        runner.sampler(logits=streams.on_device(logits.clone()))
        parts = [row(worker._rows, 1, NAMES[0]), row(worker._rows, 2, NAMES[1], TopK(2))]
        problem, (completions, _) = worker.genlm_collect(parts)
    assert problem is None
    assert streams.is_on_device(completions[0].result)
    with streams.on(streams.default):  # where callers read rows
        assert torch.allclose(completions[0].result.cpu(), expected(logits[0]))
    assert torch.allclose(
        completions[1].result.values[0].logprobs, expected(logits[1]).topk(2).values
    )


def test_a_value_on_a_device_is_returned_to_another_process_as_one_of_the_cpu(
    streams: RecordedStreams,
) -> None:
    value = streams.on_device(torch.arange(3.0))
    packed = TRANSPORT.pack_completions([Completion(1, Reduced((value,)))], SIZE)
    [completion] = TRANSPORT.unpack_completions(packed)
    [unpacked] = completion.result.values
    assert not streams.is_on_device(unpacked)
    assert unpacked.tolist() == [0.0, 1.0, 2.0]
