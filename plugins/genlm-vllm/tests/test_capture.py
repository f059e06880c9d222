"""Both interfaces of logits processors: whose row is whose, whatever moves.

vLLM's own classes describe the batches; the rows are compared with a log-softmax of the
logits that the request had.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_streams import RecordedStreams
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from genlm.core.reductions import TopK
from genlm.plugin import (
    Completion,
    EvaluationError,
    PackedCompletions,
    Reduced,
    stream_uniform,
)
from genlm_vllm.capture import ARGUMENT, Capture, CaptureRow, DrawToken
from genlm_vllm.processes import TRANSPORT
from genlm_vllm.row_buffer import ROW_BUFFER, VocabularyIds
from genlm_vllm.worker import RowWorker

SIZE, WIDTH = 5, 8


def unpacked(reply: tuple[bytes, bytes, int]) -> list[Any]:
    """Return the answers that `RowWorker.genlm_take_bytes` sends, by key."""
    rows = np.frombuffer(reply[1], np.float32).reshape(-1, SIZE)
    found = TRANSPORT.unpack_completions(PackedCompletions(reply[0], rows))
    return sorted(found, key=lambda each: each.query_id)


@pytest.fixture(autouse=True)
def row_buffer() -> Iterator[None]:
    ROW_BUFFER.reset(VocabularyIds(SIZE), active=True)
    yield
    ROW_BUFFER.reset(VocabularyIds(0), active=False)


@pytest.fixture
def capture() -> Capture:
    return Capture(None, torch.device("cpu"), False)


def params(request: Any) -> SamplingParams:
    return SamplingParams(extra_args=None if request is None else {ARGUMENT: request})


def update(removed: Any = (), added: Any = (), moved: Any = ()) -> BatchUpdate:
    new = [(i, params(request), [1, 2], outputs) for i, request, outputs in added]
    return BatchUpdate(batch_size=0, removed=list(removed), added=new, moved=list(moved))


def expected(logits: torch.Tensor) -> torch.Tensor:
    return logits[:SIZE].log_softmax(-1)


def test_it_is_called_before_temperature_and_in_greedy_batches(capture: Capture) -> None:
    assert capture.is_argmax_invariant() is False


def test_requests_without_a_capture_request_are_not_changed(capture: Capture) -> None:
    capture.update_state(update(added=[(0, None, []), (1, None, [])]))
    logits = torch.randn(2, WIDTH)
    assert torch.equal(capture.apply(logits.clone()), logits)
    assert len(ROW_BUFFER) == 0


def test_rows_are_stored_and_logits_unchanged(capture: Capture) -> None:
    capture.update_state(update(added=[(0, CaptureRow(7), []), (1, None, []), (2, [9], [])]))
    logits = torch.randn(3, WIDTH)
    assert torch.equal(capture.apply(logits.clone()), logits)
    taken = ROW_BUFFER.take([9, 7], [])
    assert list(taken) == [9, 7]
    for key, row in ((7, 0), (9, 2)):
        assert torch.allclose(taken[key], expected(logits[row]))
        assert taken[key].untyped_storage().nbytes() == 4 * SIZE


def test_the_last_chunk_of_a_prompt_wins(capture: Capture) -> None:
    capture.update_state(update(added=[(0, CaptureRow(1), [])]))
    chunks = torch.randn(3, 1, WIDTH)
    for logits in chunks:
        capture.apply(logits.clone())
        capture.update_state(None)
    assert torch.allclose(ROW_BUFFER.take([1], [])[1], expected(chunks[-1, 0]))


def test_a_step_beyond_the_wanted_one_changes_nothing(capture: Capture) -> None:
    outputs: list[int] = []
    capture.update_state(update(added=[(0, CaptureRow(1), outputs)]))
    logits = torch.randn(1, WIDTH)
    capture.apply(logits.clone())
    outputs.append(-1)  # as asynchronous scheduling marks a token on its way
    capture.apply(torch.randn(1, WIDTH))
    assert torch.allclose(ROW_BUFFER.take([1], [])[1], expected(logits[0]))


def test_a_drawn_token_is_the_only_possible_one(capture: Capture) -> None:
    outputs: list[int] = []
    capture.update_state(update(added=[(0, None, []), (1, DrawToken(7, 3, 1.0, 4), outputs)]))
    for place in range(20):
        logits = torch.randn(2, WIDTH)
        found = capture.apply(logits.clone())
        assert torch.equal(found[0], logits[0])
        cumulative = expected(logits[1]).double().exp().cumsum(-1)
        token = int(torch.searchsorted(cumulative, stream_uniform(3, place), right=True))
        assert found[1].argmax() == token
        assert int(found[1].isfinite().sum()) == 1
        outputs.append(token)


def test_a_draw_from_nan_is_the_first_id_and_an_error(capture: Capture) -> None:
    plans = [DrawToken(key, 3, 1.0, 4) for key in (7, 8, 9)]
    outputs: list[list[int]] = [[], [], []]
    capture.update_state(update(added=list(zip(range(3), plans, outputs, strict=True))))
    for place in range(150):
        logits = torch.randn(3, WIDTH)
        if place == 40:
            logits[[1, 2], 2] = torch.nan
        found = capture.apply(logits).argmax(-1).tolist()
        if place == 40:
            assert found[1:] == [0, 0]
        for tokens, token in zip(outputs, found, strict=True):
            tokens.append(token)
    [(key, error)] = ROW_BUFFER.take([7, 8], [9]).items()
    assert key == 8
    assert isinstance(error, EvaluationError)
    assert len(ROW_BUFFER) == 0


def test_a_slot_is_used_again(capture: Capture) -> None:
    capture.update_state(update(added=[(0, CaptureRow(1), [])]))
    capture.update_state(update(removed=[0], added=[(0, None, [])]))
    capture.apply(torch.randn(1, WIDTH))
    assert len(ROW_BUFFER) == 0
    capture.update_state(update(added=[(0, CaptureRow(2), [])]))  # without removal
    capture.apply(torch.randn(1, WIDTH))
    assert list(ROW_BUFFER.take([1, 2], [])) == [2]


def test_random_comings_goings_and_moves(capture: Capture) -> None:
    generator = random.Random(0)
    batch: dict[int, int | None] = {}  # which key sits where
    keys = iter(range(10**6))
    for _ in range(300):
        removed = [i for i in batch if generator.random() < 0.2]
        for index in removed:
            del batch[index]
        added = []
        for index in range(8):
            if index not in batch and generator.random() < 0.4:
                batch[index] = next(keys) if generator.random() < 0.7 else None
                request = None if batch[index] is None else CaptureRow(batch[index])
                added.append((index, request, []))
        moved = []
        for _ in range(generator.randrange(3)):
            a, b = generator.sample(range(8), 2)
            swap = generator.random() < 0.5
            if a not in batch or (swap and b not in batch):
                continue
            moved.append((a, b, list(MoveDirectionality)[swap]))
            if swap:
                batch[a], batch[b] = batch[b], batch[a]
            else:
                batch[b] = batch.pop(a)
        capture.update_state(update(removed, added, moved))
        logits = torch.randn(8, WIDTH)
        capture.apply(logits.clone())
        wanted = {key: index for index, key in batch.items() if key is not None}
        taken = ROW_BUFFER.take(list(wanted), [])
        assert list(taken) == list(wanted)
        assert len(ROW_BUFFER) == 0  # no other rows
        for key, index in wanted.items():
            assert torch.allclose(taken[key], expected(logits[index]))


def test_abandoned_rows_are_dropped() -> None:
    ROW_BUFFER.put([1, 2, 3, 4], torch.randn(4, WIDTH), [None] * 4)
    assert list(ROW_BUFFER.take([3, 99], [1, 2, 98])) == [3]
    assert list(ROW_BUFFER.take([1, 2, 3, 4], [])) == [4]


def test_only_one_rank_stores_rows(capture: Capture) -> None:
    ROW_BUFFER.reset(VocabularyIds(SIZE), active=False)
    capture.update_state(
        update(added=[(0, CaptureRow(1), []), (1, DrawToken(2, 0, 0.0, 1), [])])
    )
    logits = torch.randn(2, WIDTH)
    found = capture.apply(logits.clone())
    assert len(ROW_BUFFER) == 0
    assert found[1].argmax() == logits[1, :SIZE].argmax()  # but all of them draw


def test_missing_ids_have_no_probability_and_are_not_drawn(capture: Capture) -> None:
    ROW_BUFFER.reset(VocabularyIds(SIZE, (0, 3)), active=True)
    capture.update_state(
        update(added=[(0, CaptureRow(1), []), (1, DrawToken(2, 0, 0.0, 1), [])])
    )
    logits = torch.zeros(2, WIDTH)
    logits[:, [0, 3, 6]] = 10.0
    logits[:, 2] = 1.0
    found = capture.apply(logits.clone())
    row = ROW_BUFFER.take([1], [])[1]
    assert row.isneginf().tolist() == [True, False, False, True, False]
    assert found[1].argmax() == 2


# -- on a GPU -------------------------------------------------------------------------

PLANS = [CaptureRow(1), CaptureRow(2, (TopK(2), None)), DrawToken(3, 5, 1.0, 4), CaptureRow(4)]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedStreams]:
    streams = RecordedStreams(monkeypatch)
    with streams:
        yield streams
    assert streams.hazards == []


def captured(capture: Capture, streams: RecordedStreams) -> torch.Tensor:
    """Capture `PLANS` on the current stream; return the logits, as the host knows them."""
    capture.update_state(update(added=[(i, each, []) for i, each in enumerate(PLANS)]))
    logits = torch.randn(len(PLANS), WIDTH)
    capture.apply(streams.on_device(logits.clone()))
    return logits


def check(logits: torch.Tensor, row: Any, reduced: Any, last: Any) -> None:
    assert torch.allclose(row, expected(logits[0]))
    assert torch.allclose(last, expected(logits[3]))
    top, whole = reduced.values
    assert torch.allclose(whole, expected(logits[1]))
    assert torch.allclose(top.logprobs, expected(logits[1]).topk(2).values)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_results_for_this_process_are_ordered_after_the_step(
    capture: Capture, streams: RecordedStreams, elsewhere: bool
) -> None:
    worker = SimpleNamespace(device=torch.device("cuda", 0))
    with streams.on() as own:
        logits = captured(capture, streams)
        with streams.on(None if elsewhere else own):
            problem, reply = RowWorker.genlm_take(worker, [4, 1, 2, 3], [])
    assert problem is None
    found = reply[0]
    assert list(found) == [4, 1, 2]
    assert all(streams.is_on_device(found[key]) for key in (1, 4))
    with streams.on(streams.default):  # where callers read rows
        check(logits, found[1].cpu(), found[2], found[4].cpu())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_results_for_another_process_are_ordered_after_the_step(
    capture: Capture, streams: RecordedStreams, elsewhere: bool
) -> None:
    with streams.on() as own:
        logits = captured(capture, streams)
        with streams.on(None if elsewhere else own):
            problem, reply = RowWorker.genlm_take_bytes(object(), [1, 2, 3, 4], [])
    assert problem is None
    first, reduced, last = unpacked(reply)
    assert [each.query_id for each in (first, reduced, last)] == [1, 2, 4]
    check(logits, first.result, reduced.result, last.result)


def test_a_value_on_a_device_is_returned_to_another_process_as_one_of_the_cpu(
    streams: RecordedStreams,
) -> None:
    value = streams.on_device(torch.arange(3.0))
    packed = TRANSPORT.pack_completions([Completion(1, Reduced((value,)))], SIZE)
    [[found]] = [each.result.values for each in TRANSPORT.unpack_completions(packed)]
    assert not streams.is_on_device(found)
    assert found.tolist() == [0.0, 1.0, 2.0]


# -- errors, such as out of memory ----------------------------------------------------


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["capture.draw_tokens", "row_buffer.rows_from_logits"])
def test_out_of_memory_fails_the_requests_and_not_vllm(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, name: str, on_device: bool
) -> None:
    streams = RecordedStreams(monkeypatch)
    added = [(i, each, []) for i, each in enumerate([PLANS[0], PLANS[2], PLANS[3], None])]
    capture.update_state(update(added=added))
    monkeypatch.setattr(f"genlm_vllm.{name}", out_of_memory)
    with streams, streams.on():
        logits = torch.randn(4, WIDTH)
        found = capture.apply(
            streams.on_device(logits.clone()) if on_device else logits.clone()
        )
        results = ROW_BUFFER.take([1, 3, 4], [])
    assert torch.equal(found[3], logits[3])
    draws = name.startswith("capture")
    assert {k for k, each in results.items() if isinstance(each, Exception)} == (
        {3} if draws else {1, 4}
    )
    for error in results.values():
        if isinstance(error, Exception):
            assert isinstance(error, torch.OutOfMemoryError)
            assert error.__traceback__ is None  # whose frames have the logits
    assert len(ROW_BUFFER) == 0


@pytest.mark.parametrize("name", ["row_buffer._copies", "row_buffer.reduce_rows"])
def test_out_of_memory_while_results_are_fetched_fails_the_requests(
    capture: Capture, streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows_only = name.endswith("copies")
    with streams.on():
        capture.update_state(update(added=[(0, PLANS[0 if rows_only else 1], [])]))
        capture.apply(streams.on_device(torch.randn(1, WIDTH)))
        monkeypatch.setattr(f"genlm_vllm.{name}", out_of_memory)
        [error] = ROW_BUFFER.take([1, 2], []).values()
    assert isinstance(error, torch.OutOfMemoryError)


def test_out_of_memory_while_rows_are_gathered_fails_those_queries(
    capture: Capture, streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streams.on():
        captured(capture, streams)
        monkeypatch.setattr("torch.stack", out_of_memory)
        problem, reply = RowWorker.genlm_take_bytes(object(), [1, 2, 4], [])
    assert problem is None
    answers = unpacked(reply)
    assert {each.query_id for each in answers} == {1, 2, 4}
    assert all("CUDA out of memory" in str(each.error) for each in answers)


def test_an_error_of_one_of_several_ranks_is_raised_where_others_draw_as_well(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ROW_BUFFER.reset(VocabularyIds(SIZE), active=True, alone=False)
    capture.update_state(update(added=[(0, PLANS[2], [])]))
    monkeypatch.setattr("genlm_vllm.capture.draw_tokens", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        capture.apply(torch.randn(1, WIDTH))


# -- the interface of the second model runner -----------------------------------------


def context(slots: list[int], lengths: list[int]) -> Any:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    values = {
        "idx_mapping_np": np.array(slots, np.int32),
        "seq_lens_upper_bound_np": np.array(lengths, np.int32),
    }
    known = {field.name for field in dataclasses.fields(LogitsContext)}
    assert values.keys() <= known
    return LogitsContext(**dict.fromkeys(known) | values)


@pytest.mark.newer
def test_the_second_runner_accepts_the_processor() -> None:
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

    states = SimpleNamespace(
        device="cpu",
        max_num_reqs=4,
        vocab_size=WIDTH,
        all_token_ids=None,
        prompt_len=None,
        prefill_len=None,
        total_len=None,
    )
    names = ["genlm_vllm.capture:Capture"]
    [capture] = build_custom_logits_processors(None, states, False, names)
    assert isinstance(capture, Capture)
    capture.apply_staged_writes()
    capture.validate_params(params(CaptureRow(1)))


@pytest.mark.newer
def test_the_second_runner_maps_rows_to_slots(capture: Capture) -> None:
    assert capture.add_request(5, params(CaptureRow(1))) is True
    assert capture.add_request(2, params(None)) is False
    capture.add_request(0, params(CaptureRow(2)))
    logits = torch.randn(3, WIDTH)
    capture.apply(logits.clone(), context([2, 5, 0], [4, 9, 3]))
    taken = ROW_BUFFER.take([1, 2], [])
    assert torch.allclose(taken[1], expected(logits[1]))
    assert torch.allclose(taken[2], expected(logits[2]))
    capture.add_request(5, params(None))  # the slot is used again
    capture.apply(logits.clone(), context([5], [4]))
    assert len(ROW_BUFFER) == 0


@pytest.mark.newer
def test_the_second_runner_draws_by_the_length_of_the_sequence(capture: Capture) -> None:
    capture.add_request(3, params(DrawToken(5, 11, 1.0, 6)))
    for place in range(10):
        logits = torch.randn(1, WIDTH)
        found = capture.apply(logits.clone(), context([3], [6 + place]))
        cumulative = expected(logits[0]).double().exp().cumsum(-1)
        token = int(torch.searchsorted(cumulative, stream_uniform(11, place), right=True))
        assert found[0].argmax() == token
