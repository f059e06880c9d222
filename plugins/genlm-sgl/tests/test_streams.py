"""Answers follow SGLang's passes on another stream; no copy waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_streams import RecordedStreams
from torch.overrides import TorchFunctionMode

from genlm import Query, SamplingParams
from genlm.core.rows.reductions import TopK
from genlm.plugin import draw_tokens, stream_uniform
from genlm_sgl.lifecycle import separate_streams
from genlm_sgl.population_api import PopulationApi
from genlm_sgl.requests import Requests
from genlm_sgl.scheduler_api import FinishedRequest

WIDTH = 8


class Ids:
    """The part of a vocabulary that makes rows."""

    size = 6
    missing_ids = ()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedStreams]:
    streams = RecordedStreams(monkeypatch)
    with streams:
        yield streams
    assert streams.hazards == []


def answer(requests: Requests, rid: str, output_ids: list[int] | None = None) -> Any:
    [completion] = requests.completions([FinishedRequest(rid, output_ids or [], None)])
    assert completion.error is None, completion.error
    return completion.result


def test_rows_and_what_is_asked_of_them_follow_their_pass(streams: RecordedStreams) -> None:
    requests = Requests(Ids())
    outputs = [(None,), (TopK(2), None), (None,)]
    rids = [
        requests.add(Query(i, (1, 2, 3), outputs=each), 0) for i, each in enumerate(outputs)
    ]
    logits = torch.randn(3, WIDTH)
    with streams.on():
        requests.on_logits(rids, [3, 3, 3], streams.on_device(logits.clone()))
    expected = logits[:, : Ids.size].log_softmax(-1)
    with streams.on():
        requests.on_logits([], [], streams.on_device(logits.clone()))  # the next pass runs
    assert torch.allclose(answer(requests, rids[0]).cpu(), expected[0])
    top, row = answer(requests, rids[1]).values
    assert torch.allclose(row.cpu(), expected[1])
    assert torch.allclose(top.logprobs.cpu(), expected[1].topk(2).values)
    assert torch.allclose(answer(requests, rids[2]).cpu(), expected[2])


def test_rows_of_requests_that_stay_follow_their_pass(streams: RecordedStreams) -> None:
    requests = Requests(Ids())
    rid = requests.add(Query(0, (1, 2)), 0)
    logits = torch.randn(1, WIDTH)
    with streams.on():
        requests.on_logits([rid], [2], streams.on_device(logits.clone()))
    completion = requests.take_row(rid)
    assert completion is not None
    row = completion.result
    assert torch.allclose(row.cpu(), logits[0, : Ids.size].log_softmax(-1))


def test_draws_are_checked_after_their_passes(streams: RecordedStreams) -> None:
    requests = Requests(Ids())
    rid = requests.add(Query(0, (1, 2), sampling=SamplingParams(2, 1.0, seed=4)), 2)
    expected = []
    with streams.on():
        for place in range(2):
            logits = torch.randn(1, WIDTH)
            drawn = requests.draw([rid], [2 + place], streams.on_device(logits.clone()))
            rows = logits[:, : Ids.size].log_softmax(-1)
            expected.append(int(draw_tokens(rows, [1.0], [stream_uniform(4, place)])))
            assert int(drawn.cpu()) == expected[-1]
    assert answer(requests, rid, expected) == expected


def test_scores_follow_their_passes(streams: RecordedStreams) -> None:
    requests = Requests(Ids())
    rid = requests.add(Query(0, (1, 2, 3, 4), targets=(3, 4, 5)), 0)
    states = torch.randn(6, 4)
    head = torch.randn(4, WIDTH)
    with streams.on():
        on_device = streams.on_device(head.clone())
        padded = streams.on_device(states.clone())  # as graphs compute them
        requests.on_hidden_states([rid], [0], [4], padded, lambda some: some @ on_device)
    found = answer(requests, rid)
    rows = (states[1:4] @ head)[:, : Ids.size].log_softmax(-1)
    assert torch.allclose(found.logprobs, rows[[0, 1, 2], [3, 4, 5]], atol=1e-5)


class NoListsAsIndices(TorchFunctionMode):
    """Fails where a list or a tensor of another device is an index: both wait for a GPU."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.Tensor.__getitem__, torch.Tensor.__setitem__}:
            tensor, index = args[0], args[1]
            assert not isinstance(index, list)
            assert not isinstance(index, torch.Tensor) or index.device == tensor.device
        return func(*args, **(kwargs or {}))


def test_passes_are_indexed_without_waiting_for_the_device() -> None:
    requests = Requests(Ids())
    row = requests.add(Query(0, (1, 2)), 0)
    drawn = requests.add(Query(1, (1, 2), sampling=SamplingParams(1, 1.0, seed=4)), 1)
    scored = requests.add(Query(2, (1, 2, 3), targets=(3, 4)), 0)
    head = torch.randn(4, WIDTH)
    with NoListsAsIndices():
        requests.on_logits([drawn, row], [2, 2], torch.randn(2, WIDTH))
        requests.draw([row, drawn], [2, 2], torch.randn(2, WIDTH))
        requests.on_hidden_states(
            [scored], [0], [3], torch.randn(3, 4), lambda some: some @ head
        )
    assert (requests.rows_made, requests.tokens_drawn, requests.targets_scored) == (1, 1, 2)


@pytest.mark.parametrize(
    ("device", "overlap", "streams", "expected"),
    [
        ("cuda", True, [7, 7, 8], 8),
        ("cuda", True, [6], 6),
        ("cuda", False, [7], 7),
        ("xpu", True, [7], 7),
    ],
)
def test_the_schedulers_stream_is_not_that_of_the_passes(
    device: str, overlap: bool, streams: list[int], expected: int
) -> None:
    drawn = iter([SimpleNamespace(cuda_stream=number) for number in streams])
    scheduler = SimpleNamespace(
        device=device,
        enable_overlap=overlap,
        schedule_stream=next(drawn),
        forward_stream=SimpleNamespace(cuda_stream=7),
        device_module=SimpleNamespace(Stream=lambda priority: next(drawn)),
    )
    separate_streams(scheduler)
    assert scheduler.schedule_stream.cuda_stream == expected
    assert scheduler._war_barrier_enabled == (device == "cuda")


@pytest.mark.parametrize("overlaps", [True, False])
def test_passes_of_populations_take_turns_with_those_of_sglang(overlaps: bool) -> None:
    order: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            order.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on_forward_stream() -> Iterator[None]:
        order.append("begin")
        yield
        order.append("end")

    scheduler = SimpleNamespace(
        device="cpu",
        enable_overlap=overlaps,
        forward_stream=Stream("forward"),
        forward_stream_ctx=on_forward_stream(),
        schedule_stream=Stream("schedule"),
    )
    api = PopulationApi(scheduler, contextlib.nullcontext, lambda logits: logits)
    with api._pass_stream():
        order.append("pass")
    waits = ["begin", "forward waits for schedule", "pass", "end", "schedule waits for forward"]
    assert order == (waits if overlaps else ["pass"])
