"""The sampler of both model runners and the reduction of rows, without a model.

The rows are compared with a log-softmax of the logits that the request had.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_streams import RecordedStreams

from genlm.core.rows.reductions import TopK
from genlm.plugin import Completion, EvaluationError, Reduced, stream_uniform
from genlm_vllm.processes import TRANSPORT
from genlm_vllm.row_buffer import ROW_BUFFER, VocabularyIds
from genlm_vllm.row_sampler import DRAWN, OWN, RESIDENT, DrawPlan, missing_part, sampler_of
from genlm_vllm.worker import RowWorker
from genlm_vllm.worker_rows import RowPart, StepInputs, StepResults, WorkerRows

SIZE, WIDTH = 5, 8
NAMES = [f"{RESIDENT}1", f"{DRAWN}2", f"{OWN}3", "other"]


@pytest.fixture(autouse=True)
def row_buffer() -> Iterator[None]:
    ROW_BUFFER.reset(VocabularyIds(SIZE), active=True)
    yield
    ROW_BUFFER.reset(VocabularyIds(0), active=False)


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


def rows_of(runner: Any, batches: int = 1) -> WorkerRows:
    assert missing_part(runner) is None
    return WorkerRows(sampler_of(runner, batches))


def expected(logits: torch.Tensor) -> torch.Tensor:
    return logits[:SIZE].log_softmax(-1)


def row(query_id: int, name: str, *outputs: Any) -> RowPart:
    return RowPart(query_id, name, outputs or (None,))


def test_rows_are_those_of_the_logits_and_others_are_sampled_by_vllm() -> None:
    runner = Runner1(NAMES)
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(3, 0.0, 4)}))
    logits = torch.randn(4, WIDTH)
    output = runner.sampler(logits=logits.clone())
    assert torch.equal(runner.sampled[0], logits)
    drawn = int(logits[1, :SIZE].argmax())
    assert output.sampled_token_ids[1:, 0].tolist() == [drawn, 7, 7]
    assert runner.discard_request_mask.np.tolist() == [True, False, False, False]
    found = rows.collect(StepResults(rows=[row(1, NAMES[2]), row(2, NAMES[0], TopK(2), None)]))
    assert torch.allclose(found[0].result, expected(logits[2]))
    assert found[0].result.untyped_storage().nbytes() == 4 * SIZE
    top, whole = found[1].result.values
    assert torch.allclose(whole, expected(logits[0]))
    assert torch.allclose(top.logprobs, expected(logits[0]).topk(2).values)
    assert len(rows) == 1  # the plan
    [missing] = rows.collect(StepResults(rows=[row(3, NAMES[2])]))
    assert isinstance(missing.error, EvaluationError)


def test_a_missing_part_of_a_runner_is_named() -> None:
    runner = Runner1(NAMES)
    del runner.input_batch.is_token_ids
    assert missing_part(runner) == "this vLLM's input_batch has no is_token_ids"
    assert missing_part(SimpleNamespace(req_states=1)) == (
        "this vLLM's req_states has no req_id_to_index"
    )


def test_vllm_samples_nothing_where_all_requests_are_this_librarys() -> None:
    runner = Runner1(NAMES[:3])
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(3, 0.0, 4)}))
    output = runner.sampler(logits=torch.randn(3, WIDTH))
    assert not runner.sampled
    assert output.sampled_token_ids.shape == (3, 1)


def test_a_fed_token_is_written_where_the_runner_keeps_its_own() -> None:
    runner = Runner1(NAMES)
    absent = f"{RESIDENT}absent"
    runner.requests[absent] = SimpleNamespace(output_token_ids=[])
    rows_of(runner).prepare(StepInputs([NAMES[0], absent], [6, 7]))
    assert runner.requests[NAMES[0]].output_token_ids == [6]
    assert runner.requests[absent].output_token_ids == [7]
    assert runner.input_batch.token_ids_cpu[0, 4] == 6
    assert runner.input_batch.num_tokens_no_spec.tolist() == [5, 4, 4, 4]


def test_tokens_are_drawn_by_place() -> None:
    runner = Runner1([NAMES[1]])
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(3, 1.0, 4)}))
    outputs = runner.requests[NAMES[1]].output_token_ids
    for place in range(20):
        logits = torch.randn(1, WIDTH)
        found = int(runner.sampler(logits=logits).sampled_token_ids)
        cumulative = expected(logits[0]).double().exp().cumsum(-1)
        assert found == int(
            torch.searchsorted(cumulative, stream_uniform(3, place), right=True)
        )
        outputs.append(found)
    assert rows.collect(StepResults(drawn=[(9, NAMES[1])])) == []
    assert not rows.sampler.plans


def test_a_draw_from_nan_is_the_first_id_and_an_error() -> None:
    names = [f"{DRAWN}{i}" for i in range(3)]
    runner = Runner1(names)
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans=dict.fromkeys(names, DrawPlan(3, 1.0, 4))))
    for place in range(150):
        logits = torch.randn(3, WIDTH)
        if place == 40:
            logits[[1, 2], 2] = torch.nan
        found = runner.sampler(logits=logits).sampled_token_ids[:, 0].tolist()
        if place == 40:
            assert found[1:] == [0, 0]
    rows.prepare(StepInputs(dropped=[names[2]]))
    [completion] = rows.collect(StepResults(drawn=[(7, names[0]), (8, names[1])]))
    assert completion.query_id == 8
    assert isinstance(completion.error, EvaluationError)
    assert len(rows) == 0


def test_missing_ids_have_no_probability_and_are_not_drawn() -> None:
    ROW_BUFFER.reset(VocabularyIds(SIZE, (0, 3)), active=True)
    runner = Runner1(NAMES[:2])
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(0, 0.0, 1)}))
    logits = torch.zeros(2, WIDTH)
    logits[:, [0, 3, 6]] = 10.0
    logits[:, 2] = 1.0
    assert int(runner.sampler(logits=logits).sampled_token_ids[1]) == 2
    [found] = rows.collect(StepResults(rows=[row(1, NAMES[0])]))
    assert found.result.isneginf().tolist() == [True, False, False, True, False]


def test_only_one_rank_returns_rows_but_all_of_them_draw() -> None:
    ROW_BUFFER.reset(VocabularyIds(SIZE), active=False)
    runner = Runner1(NAMES[:2])
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(0, 0.0, 1)}))
    logits = torch.randn(2, WIDTH)
    drawn = runner.sampler(logits=logits.clone()).sampled_token_ids
    assert int(drawn[1]) == int(logits[1, :SIZE].argmax())
    assert rows.collect(StepResults(rows=[row(1, NAMES[0])])) == []


def test_batches_of_a_pipeline_are_kept_until_their_rows_are_taken() -> None:
    runner = Runner1([f"{OWN}1"])
    rows = rows_of(runner, batches=2)
    first, second = torch.randn(2, 1, WIDTH)
    runner.sampler(logits=first)
    runner.input_batch.req_ids = [f"{OWN}2"]
    runner.sampler(logits=second)
    for logits, name in ((first, f"{OWN}1"), (second, f"{OWN}2")):
        [found] = rows.collect(StepResults(rows=[row(1, name)]))
        assert torch.allclose(found.result, expected(logits[0]))


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("name", ["row_sampler.draw_tokens", "worker_rows.reduce_logits"])
def test_out_of_memory_fails_the_queries_and_not_vllm(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runner = Runner1(NAMES)
    rows = rows_of(runner)
    rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(3, 1.0, 4)}))
    monkeypatch.setattr(f"genlm_vllm.{name}", out_of_memory)
    output = runner.sampler(logits=torch.randn(4, WIDTH))
    assert int(output.sampled_token_ids[3]) == 7
    found = rows.collect(StepResults(rows=[row(1, NAMES[0])], drawn=[(2, NAMES[1])]))
    errors = {each.query_id: each.error for each in found if each.error}
    assert list(errors) == [2 if name.endswith("draw_tokens") else 1]
    for error in errors.values():
        assert isinstance(error, torch.OutOfMemoryError)
        assert error.__traceback__ is None  # whose frames have the logits
    assert len(rows) == 0


def test_an_error_of_one_of_several_ranks_is_raised_where_others_draw_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ROW_BUFFER.reset(VocabularyIds(SIZE), active=True, alone=False)
    runner = Runner1(NAMES)
    rows_of(runner).prepare(StepInputs(plans={NAMES[1]: DrawPlan(3, 1.0, 4)}))
    monkeypatch.setattr("genlm_vllm.row_sampler.draw_tokens", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        runner.sampler(logits=torch.randn(4, WIDTH))


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


def batch_of(names: list[str], lengths: list[int]) -> Any:
    return SimpleNamespace(req_ids=names, seq_lens_cpu_upper_bound=torch.tensor(lengths))


@pytest.mark.newer
def test_the_second_runner_draws_by_length_and_hides_residents() -> None:
    runner = Runner2(NAMES)
    rows = rows_of(runner)
    rows.prepare(StepInputs([NAMES[0]], [6], {NAMES[1]: DrawPlan(11, 1.0, 6)}))
    assert runner.req_states.last_sampled_tokens[:, 0].tolist() == [6] + [0] * 7
    for place in range(10):
        logits = torch.randn(4, WIDTH)
        output = runner.sampler(logits.clone(), batch_of(NAMES, [9, 6 + place, 3, 3]))
        cumulative = expected(logits[1]).double().exp().cumsum(-1)
        token = int(torch.searchsorted(cumulative, stream_uniform(11, place), right=True))
        assert int(output.sampled_token_ids[1]) == token
        assert output.num_sampled.tolist() == [0, 1, 1, 1]


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
    runner = Runner1(NAMES[:3])
    worker = SimpleNamespace(device=torch.device("cuda", 0), _rows=rows_of(runner))
    worker._rows.prepare(StepInputs(plans={NAMES[1]: DrawPlan(3, 0.0, 4)}))
    logits = torch.randn(3, WIDTH)
    with streams.on():
        runner.sampler(logits=streams.on_device(logits.clone()))
        wanted = StepResults(rows=[row(1, NAMES[0]), row(2, NAMES[2], TopK(2))])
        problem, found = RowWorker.genlm_collect(worker, wanted, False)
    assert problem is None
    assert streams.is_on_device(found[0].result)
    with streams.on(streams.default):  # where callers read rows
        assert torch.allclose(found[0].result.cpu(), expected(logits[0]))
    assert torch.allclose(
        found[1].result.values[0].logprobs, expected(logits[2]).topk(2).values
    )


def test_a_value_on_a_device_is_returned_to_another_process_as_one_of_the_cpu(
    streams: RecordedStreams,
) -> None:
    value = streams.on_device(torch.arange(3.0))
    packed = TRANSPORT.pack_completions([Completion(1, Reduced((value,)))], SIZE)
    [[found]] = [each.result.values for each in TRANSPORT.unpack_completions(packed)]
    assert not streams.is_on_device(found)
    assert found.tolist() == [0.0, 1.0, 2.0]
