"""Requested outputs and answers arrive in another process as they were sent."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from genlm.core.rows.masks import Mask
from genlm.core.rows.reductions import Draw, DrawnToken, TopK, TopTokens
from genlm.core.rows.row_functions import ReductionOfFunction
from genlm.core.rows.shared_reduction import SharedReduction
from genlm.plugin import (
    Completion,
    EvaluationError,
    GroupReduction,
    GroupResult,
    PackedCompletions,
    Reduced,
    Reduction,
    TokenScores,
    Transport,
)

SIZE = 7

TRANSPORT = Transport("a worker")


@dataclass(frozen=True)
class Constant(Reduction):
    """Holds anything, and returns it."""

    value: Any

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Constant]) -> Sequence[Any]:
        return [request.value for request in requests]


@dataclass(frozen=True)
class GroupConstant(GroupReduction):
    value: Any

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (torch.full((len(members),), self.value),)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that can be taken away, as if it was missing in the other process."""
    module: Any = types.ModuleType("only_in_one_process")
    module.Constant, module.GroupConstant = Constant, GroupConstant
    code = "class Odd(Constant): pass\nclass OddGroup(GroupConstant): pass\nclass Thing: pass"
    code += "\ndef odd(rows): return rows[:, 0]"
    exec(f"{code}\nclass Unreadable(Exception): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def returned(*completions: Completion) -> list[Completion]:
    return TRANSPORT.unpack_completions(TRANSPORT.pack_completions(completions, SIZE))


def values_returned(*values: Any) -> tuple[Any, ...]:
    [completion] = returned(Completion(0, Reduced(values)))
    assert isinstance(completion.result, Reduced)
    return completion.result.values


def outputs_sent(*outputs: Any, by: Transport = TRANSPORT) -> list[Any]:
    return by.unpack_outputs(by.pack_outputs(outputs))


def computed(reduction: Any) -> Any:
    """Return the result of a reduction or its error."""
    try:
        [value] = type(reduction).compute(torch.zeros(1, SIZE), [reduction])
    except EvaluationError as error:
        return error
    return value


# -- what queries ask for -------------------------------------------------------------


def test_outputs_arrive_equal_with_masks_as_bits() -> None:
    mask = Mask(range(0, 128_000, 3), 128_000)
    outputs = [Draw(0.25, 0.5, mask), None, TopK(4)]
    packed = TRANSPORT.pack_outputs(outputs)
    assert TRANSPORT.unpack_outputs(packed) == outputs
    assert len(pickle.dumps(packed)) <= 16_000 + 450


def test_large_arrays_are_sent_without_a_copy_and_arrive_writable() -> None:
    values = torch.arange(2**20, dtype=torch.float32)
    arrays: list[pickle.PickleBuffer] = []
    packed = TRANSPORT.pack_outputs([Constant(values)])
    data = pickle.dumps(packed, 5, buffer_callback=arrays.append)
    [array] = arrays
    assert np.shares_memory(np.frombuffer(array, np.uint8), values.numpy())
    assert len(data) < 1000
    mapped = pickle.loads(data, buffers=[array.raw().tobytes()])  # read-only, as Ray maps it
    [output] = TRANSPORT.unpack_outputs(mapped)
    assert torch.equal(output.value.add_(1), values + 1)


def test_what_outputs_share_is_sent_once() -> None:
    shared = torch.arange(3)
    first, second = outputs_sent(Constant(shared), Constant(shared))
    assert first.value is second.value
    assert torch.equal(first.value, shared)


def test_a_reduction_that_cannot_be_pickled_fails_alone() -> None:
    refused, none, two = outputs_sent(Constant(threading.Lock()), None, Constant(2))
    assert (none, two) == (None, Constant(2))
    error = computed(refused)
    assert isinstance(error, EvaluationError)
    assert "Constant cannot be sent to a worker: TypeError" in str(error)
    [group] = outputs_sent(GroupConstant(threading.Lock()))
    with pytest.raises(EvaluationError, match="GroupConstant cannot be sent to a worker"):
        group.compute(torch.zeros(1, SIZE), torch.zeros(1), torch.zeros(1))


def first_entries(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, 0]


def test_classes_and_functions_of_the_main_module_are_sent_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for named in (Constant, GroupConstant, first_entries):
        monkeypatch.setattr(named, "__module__", "__main__")
    by_value = Transport("a worker", pytest.importorskip("cloudpickle").dumps)
    outputs = [Constant(lambda: 3), GroupConstant(2), ReductionOfFunction(first_entries)]
    with monkeypatch.context() as here:
        here.setattr(sys.modules["__main__"], "first_entries", first_entries, raising=False)
        packed = by_value.pack_outputs(outputs)
    function, positions, entries = by_value.unpack_outputs(packed)
    assert computed(function)() == 3
    assert positions.value == 2
    assert computed(entries) == 0


def test_a_reduction_that_cannot_be_loaded_fails_alone(
    elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [
        elsewhere.Odd(1),
        TopK(3),
        elsewhere.OddGroup(1),
        SharedReduction(elsewhere.Odd(1)),
        ReductionOfFunction(elsewhere.odd),
        GroupConstant(2),
    ]
    packed = TRANSPORT.pack_outputs(outputs)
    monkeypatch.delitem(sys.modules, elsewhere.__name__)
    odd, top, group, shared, function, known = TRANSPORT.unpack_outputs(packed)
    assert top == TopK(3)
    assert known.value == 2
    for single in (odd, function):
        assert "cannot be loaded in a worker, where its module" in str(computed(single))
    for reduction in (group, shared):
        with pytest.raises(EvaluationError, match="cannot be loaded in a worker"):
            reduction.compute(torch.zeros(1, SIZE), torch.zeros(1), torch.zeros(1))


class PickledAsText(TopK):
    """A reduction that arrives as something else."""

    def __reduce__(self) -> Any:
        return str, ("text",)


def test_what_arrives_as_no_reduction_fails_alone() -> None:
    broken, sound = outputs_sent(PickledAsText(2), TopK(2))
    assert sound == TopK(2)
    assert "pickled as str" in str(computed(broken))


# -- answers --------------------------------------------------------------------------


def test_rows_and_tensors_of_any_shape_and_dtype_arrive_as_they_were() -> None:
    row, other = torch.randn(SIZE).log_softmax(0), torch.randn(SIZE).log_softmax(0)
    few, ids = torch.randn(3), torch.tensor([5, 2**40])
    wide, flags = torch.randn(SIZE, dtype=torch.float64), torch.tensor([True, False])
    scores = TokenScores(torch.randn(2), flags)
    completions = returned(
        Completion(0, row),
        Completion(1, Reduced((few, other, ids))),
        Completion(2, Reduced((wide, 0.5, EvaluationError("no room")))),
        Completion(3, scores),
        Completion(4, error=EvaluationError("too long")),
        Completion(5, [3, 1, 4]),
        Completion(6, Reduced(())),
    )
    results: list[Any] = [completion.result for completion in completions]
    assert [completion.query_id for completion in completions] == list(range(7))
    pairs = [(results[0], row), (results[3].logprobs, scores.logprobs)]
    pairs += zip(results[1].values, (few, other, ids), strict=True)
    pairs += [(results[2].values[0], wide), (results[3].is_top, flags)]
    for value, expected in pairs:
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
    assert results[2].values[1] == 0.5
    assert isinstance(results[2].values[2], EvaluationError)
    assert str(completions[4].error) == "too long"
    assert results[5:] == [[3, 1, 4], Reduced(())]
    results[0].add_(1)  # rows belong to their receivers


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_tensors_arrive_as_the_callers_own(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).view(3, 4)
    [values] = values_returned(tensor[1:])
    assert values.dtype == dtype
    assert torch.equal(values, tensor[1:])
    values.fill_(0)
    assert values.untyped_storage().nbytes() == values.nbytes


def test_tensors_take_few_more_bytes_than_their_values() -> None:
    tokens = TopTokens(torch.randn(10), torch.arange(10))
    completion = Completion(0, Reduced((tokens,)))
    assert len(TRANSPORT.pack_completions([completion], SIZE).data) <= 120 + 550
    [values] = values_returned(tokens)
    assert isinstance(values, TopTokens)
    assert torch.equal(values.logprobs, tokens.logprobs)


def test_the_rows_of_populations_are_sent_as_rows() -> None:
    columns = torch.randn(3, SIZE)
    group = GroupResult((columns,), {1: ValueError("no row")})
    packed = TRANSPORT.pack_completions([Completion(0, group)], SIZE)
    assert packed.rows is not None
    assert packed.rows.ctypes.data == columns.data_ptr()
    row, several = torch.randn(SIZE), GroupResult((columns, columns + 1), {})
    other = GroupResult((columns[:, :2],), {})
    sent = [Completion(i, each) for i, each in enumerate((row, group, several, other))]
    packed = TRANSPORT.pack_completions(sent, SIZE)
    packed.rows.setflags(write=False)  # type: ignore[union-attr]
    results: list[Any] = [each.result for each in TRANSPORT.unpack_completions(packed)]
    assert torch.equal(results[0], row)
    assert [str(error) for error in results[1].errors.values()] == ["no row"]
    for found, right in zip(results[1:], (group, several, other), strict=True):
        for column, expected in zip(found.columns, right.columns, strict=True):
            assert torch.equal(column, expected)
            column.zero_()


def test_results_that_cannot_be_sent_or_loaded_fail_alone(
    elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = torch.randn(SIZE).log_softmax(0)
    half = torch.tensor([1.5, -2.0]).bfloat16()
    generator: Any = (completion for completion in range(3))
    drawn = DrawnToken(5, -1.0, 0.0, -1.0)
    sent = [
        Completion(0, row),
        Completion(1, Reduced((generator, 0.5))),
        Completion(2, Reduced((elsewhere.Thing(), half))),
        Completion(3, generator),
        Completion(4, error=elsewhere.Unreadable("gone")),
        Completion(5, Reduced((None, [1, half], drawn))),
    ]
    packed = TRANSPORT.pack_completions(sent, SIZE)
    monkeypatch.delitem(sys.modules, elsewhere.__name__)
    completions = TRANSPORT.unpack_completions(packed)
    results: list[Any] = [completion.result for completion in completions]
    assert [completion.query_id for completion in completions] == list(range(6))
    assert torch.equal(results[0], row)
    assert "type generator cannot be returned from a worker" in str(results[1].values[0])
    assert results[1].values[1] == 0.5
    assert "a result cannot be loaded from a worker" in str(results[2].values[0])
    assert torch.equal(results[2].values[1], half)
    assert "generator" in str(completions[3].error)
    assert results[3] is None
    assert isinstance(completions[4].error, EvaluationError)
    assert results[5].values[0] is None
    assert torch.equal(results[5].values[1][1], half)
    assert results[5].values[2] == drawn


class NeedsTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def test_errors_that_cannot_be_made_again_arrive_as_evaluation_errors() -> None:
    columns = (torch.arange(2),)
    group, alone = returned(
        Completion(0, GroupResult(columns, {1: NeedsTwo(1, 2)})),
        Completion(1, error=NeedsTwo(1, 2)),
    )
    assert isinstance(group.result, GroupResult)
    assert torch.equal(group.result.columns[0], columns[0])
    for error in (group.result.errors[1], alone.error):
        assert type(error) is EvaluationError
        assert str(error) == "NeedsTwo: 3"


def test_tensors_of_the_size_of_rows_that_are_no_rows_are_sent_or_fail_alone() -> None:
    row = torch.randn(SIZE).log_softmax(0)
    first, lost, third, sparse = returned(
        Completion(0, row),
        Completion(1, torch.empty(SIZE, device="meta")),  # which cannot be copied
        Completion(2, Reduced((0.5, row))),
        Completion(3, Reduced((row.to_sparse(),))),
    )
    assert isinstance(first.result, torch.Tensor)
    assert torch.equal(first.result, row)
    assert isinstance(third.result, Reduced)
    assert torch.equal(third.result.values[1], row)
    assert lost.query_id == 1
    assert "a result of type Tensor cannot be returned from a worker" in str(lost.error)
    assert isinstance(sparse.result, Reduced)
    assert torch.equal(sparse.result.values[0].to_dense(), row)


def test_packed_answers_are_two_plain_parts() -> None:
    packed = TRANSPORT.pack_completions([Completion(0, [1, 2])], SIZE)
    assert packed.rows is None
    again = PackedCompletions(*pickle.loads(pickle.dumps(tuple(packed))))
    assert TRANSPORT.unpack_completions(again) == [Completion(0, [1, 2])]


def test_rows_that_the_other_process_has_checked_are_not_checked_again() -> None:
    row = torch.zeros(SIZE).log_softmax(0)
    sent = Completion(1, row, is_checked=True), Completion(2, row)
    assert [completion.is_checked for completion in returned(*sent)] == [True, False]
