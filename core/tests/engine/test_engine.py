"""`BatchEngine` answers what it chose, fails only those at fault, and gives rows away."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, oracle_row

from genlm.core.base.error_handling import errors_of
from genlm.core.base.errors import EvaluationError
from genlm.core.engine.batch_engine import BatchEngine
from genlm.core.engine.engine import Engine, LoraEngine, PrefixCacheEngine
from genlm.core.model.lm import AsyncLM
from genlm.core.queries.query import Completion, GroupValues, Query
from genlm.core.vocab import Token, Vocabulary

VOCAB_SIZE = 8
POISON = 5


def submitted(engine: BatchEngine, sequences: Sequence[Sequence[int]]) -> list[Query]:
    queries = [Query(100 + i, tuple(ids)) for i, ids in enumerate(sequences)]
    for query in queries:
        engine.submit(query)
    return queries


def row_of(completion: Completion) -> torch.Tensor:
    assert isinstance(completion.result, torch.Tensor), completion
    return completion.result


class FunctionEngine(BatchEngine):
    """Evaluates with a function of the batch's size; has no `super().__init__()`."""

    def __init__(self, rows: Callable[[int], torch.Tensor | GroupValues]) -> None:
        tokens = [Token(i, bytes([i])) for i in range(VOCAB_SIZE)]
        self.vocabulary = Vocabulary(None, tokens, list(map(repr, tokens)))
        self.rows = rows
        self.calls = 0

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor | GroupValues:
        self.calls += 1
        return self.rows(len(queries))


# -- halving --------------------------------------------------------------------------


@given(st.integers(1, 40), st.data())
def test_halving_fails_exactly_the_queries_that_raise(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1)))
    engine = ScriptedEngine(VOCAB_SIZE, poison=[POISON])
    sequences = [[i % 4, POISON if i in culprits else 4, i % 3] for i in range(count)]
    queries = submitted(engine, sequences)
    completions = engine.step()
    assert [completion.query_id for completion in completions] == [
        query.query_id for query in queries
    ]
    for index, (query, completion) in enumerate(zip(queries, completions, strict=True)):
        if index in culprits:
            assert completion.result is None
            assert isinstance(completion.error, ArithmeticError)
            assert str(query.token_ids) in str(completion.error)
        else:
            assert completion.error is None
            expected = oracle_row(query.token_ids, None, VOCAB_SIZE)
            assert torch.equal(row_of(completion), expected)
    # Every evaluation that fails above a culprit costs two more, one level further down.
    depth = math.ceil(math.log2(count))
    assert len(engine.batches) <= 1 + 2 * len(culprits) * depth


@pytest.mark.parametrize("position", range(16))
def test_one_culprit_among_sixteen_costs_nine_evaluations(position: int) -> None:
    engine = ScriptedEngine(VOCAB_SIZE, poison=[POISON])
    submitted(engine, [[POISON] if i == position else [i // 4, i % 4] for i in range(16)])
    engine.step()
    assert list(map(len, engine.batches)).count(8) == 2
    assert len(engine.batches) == 1 + 2 * 4


def test_equal_queries_are_evaluated_once_and_get_rows_of_their_own() -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    submitted(engine, [[1, 2], [3], [1, 2]])
    rows = [row_of(completion) for completion in engine.step()]
    assert engine.batches == [[(1, 2), (3,)]]
    for row, ids in zip(rows, [(1, 2), (3,), (1, 2)], strict=True):
        assert torch.equal(row, oracle_row(ids, None, VOCAB_SIZE))
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 3


def test_a_batch_without_culprits_is_evaluated_once() -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    submitted(engine, [[i] for i in range(VOCAB_SIZE)])
    engine.step()
    assert engine.batches == [[(i,) for i in range(VOCAB_SIZE)]]


def test_the_error_of_a_query_is_its_own_and_not_a_chain_of_all_halvings() -> None:
    engine = ScriptedEngine(VOCAB_SIZE, poison=[POISON])
    submitted(engine, [[POISON] if i == 3 else [i] for i in range(5)])
    error = next(
        completion.error for completion in engine.step() if completion.error is not None
    )
    assert error.__cause__ is None
    assert error.__context__ is None


class RaisingEngine(ScriptedEngine):
    """Raises what a function returns for the token ids of a batch, if that is an error."""

    def __init__(self, raised: Callable[[list[tuple[int, ...]]], Exception | None]) -> None:
        super().__init__(VOCAB_SIZE)
        self.raised = raised

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        rows = super().evaluate(queries)
        if (error := self.raised(self.batches[-1])) is not None:
            raise error
        return rows


def test_an_engine_that_always_fails_is_called_a_few_times_however_many_queries() -> None:
    engine = RaisingEngine(lambda _: ArithmeticError("always"))
    queries = submitted(engine, [[i % 8, i // 8 % 8, i // 64] for i in range(500)])
    completions = engine.step()
    assert [completion.query_id for completion in completions] == [
        query.query_id for query in queries
    ]
    assert {str(completion.error) for completion in completions} == {"always"}
    assert len(engine.batches) == 3 + 4  # the batch, its halves, and their ends alone


@given(st.integers(1, 40), st.data())
def test_culprits_that_fail_alike_fail_nobody_else(count: int, data: st.DataObject) -> None:
    inner = range(1, count - 1)
    culprits = data.draw(st.sets(st.sampled_from(inner))) if inner else set()
    sequences = [(i % 8, i // 8) for i in range(count)]
    poison = {sequences[i] for i in culprits}
    engine = RaisingEngine(lambda batch: ValueError("alike") if poison & {*batch} else None)
    submitted(engine, sequences)
    failed = {
        completion.query_id - 100
        for completion in engine.step()
        if completion.error is not None
    }
    assert failed == culprits


def error_of_a_reduction(cause: Exception) -> Exception:
    with pytest.raises(EvaluationError) as raised, errors_of("Reduction.compute"):
        raise cause
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("HIP error: unspecified launch failure"),
        getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal address"),
        error_of_a_reduction(RuntimeError("CUDA error: raised in a reduction")),
    ],
    ids=str,
)
def test_nothing_more_is_evaluated_on_a_device_that_has_failed(error: Exception) -> None:
    engine = RaisingEngine(lambda _: error)
    submitted(engine, [[i % 8, i // 8] for i in range(50)])
    assert [completion.error for completion in engine.step()] == [error] * 50
    assert len(engine.batches) == 1


def test_queries_evaluated_before_the_device_failed_are_answered() -> None:
    def raised(batch: list[tuple[int, ...]]) -> Exception | None:
        if len(batch) > 2:
            return ValueError("too many")
        return RuntimeError("CUDA error: unknown") if (5,) in batch else None

    engine = RaisingEngine(raised)
    submitted(engine, [[i] for i in range(8)])
    completions = engine.step()
    assert [completion.error is None for completion in completions] == [True] * 4 + [False] * 4
    assert {str(completion.error) for completion in completions[4:]} == {"CUDA error: unknown"}


def test_a_batch_for_which_memory_is_short_is_halved() -> None:
    def raised(batch: list[tuple[int, ...]]) -> Exception | None:
        return RuntimeError("CUDA error: out of memory") if len(batch) > 2 else None

    engine = RaisingEngine(raised)
    submitted(engine, [[i] for i in range(8)])
    assert all(completion.error is None for completion in engine.step())


def test_the_tensors_of_a_failed_batch_are_freed_before_smaller_batches() -> None:
    created: list[weakref.ref[torch.Tensor]] = []

    def rows(count: int) -> torch.Tensor:
        assert all(memory() is None for memory in created)
        values = torch.zeros(count, VOCAB_SIZE)
        created.append(weakref.ref(values))
        with errors_of("compute"):
            raise MemoryError(str(count))

    engine = FunctionEngine(rows)
    submitted(engine, [[i] for i in range(8)])
    errors = [completion.error for completion in engine.step()]
    assert len(created) >= 15
    assert all(str(error) == "compute raised MemoryError: 1" for error in errors)


def test_an_error_that_no_query_causes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = RaisingEngine(lambda batch: ValueError("too many") if len(batch) > 2 else None)
    for _ in range(2):
        submitted(engine, [[i] for i in range(8)])
        assert all(each.error is None for each in engine.step())
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "RaisingEngine raised ValueError: too many for a batch of 8" in record.getMessage()


def test_the_error_of_a_query_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(VOCAB_SIZE, poison=[POISON])
    submitted(engine, [[1], [POISON], [2]])
    assert [each.error is None for each in engine.step()] == [True, False, True]
    assert not caplog.records


# -- what a step evaluates ------------------------------------------------------------


class ChoosyEngine(ScriptedEngine):
    """Evaluates what a function picks."""

    def __init__(self, pick: Callable[[Sequence[Query]], Sequence[Query]]) -> None:
        super().__init__(VOCAB_SIZE, poison=[POISON])
        self.pick = pick

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        return self.pick(pending)


def test_what_is_not_chosen_stays_pending_beside_what_arrives() -> None:
    engine = ChoosyEngine(lambda pending: [pending[0], *pending[2:][:1]])
    submitted(engine, [[0], [1], [2], [3]])
    assert [completion.query_id for completion in engine.step()] == [100, 102]
    engine.submit(Query(200, (4,)))
    assert [completion.query_id for completion in engine.step()] == [101, 200]
    assert [completion.query_id for completion in engine.step()] == [103]
    assert engine.step() == []
    assert engine.batches == [[(0,), (2,)], [(1,), (4,)], [(3,)]]


def test_a_later_request_does_not_wait_for_all_queries_of_an_earlier_one() -> None:
    engine = ChoosyEngine(lambda pending: pending[:2])
    for turn in range(8):
        engine.submit(Query(turn, (turn,), turn=turn))
    steps = [engine.step() for _ in range(2)]
    engine.submit(Query(100, (8,)))
    for turn in range(3):
        engine.submit(Query(200 + turn, (9, turn), turn=turn))
    engine.abort(7)
    steps += [engine.step() for _ in range(4)]
    assert [[completion.query_id for completion in step] for step in steps] == [
        *([0, 1], [2, 3]),
        *([100, 200], [4, 201], [5, 202], [6]),
    ]
    assert engine.step() == []


def test_a_query_is_computed_although_later_requests_fill_every_step() -> None:
    engine = ChoosyEngine(lambda pending: pending[:2])
    for turn in range(6):
        engine.submit(Query(turn, (turn,), turn=turn))
    computed: list[int] = []
    for step in range(14):
        for number in range(2):
            engine.submit(Query(100 + 2 * step + number, (6, step, number)))
        computed += [completion.query_id for completion in engine.step()]
    assert [query_id for query_id in computed if query_id < 100] == list(range(6))


def test_a_request_waits_for_two_turns_of_each_earlier_request() -> None:
    engine = ChoosyEngine(lambda pending: pending[:1])
    for turn in range(40):
        for request in range(4):
            engine.submit(Query(100 * request + turn, (request, turn), turn=turn))
    for _ in range(80):
        engine.step()
    engine.submit(Query(1000, (9,)))
    computed = [completion.query_id for _ in range(8) for completion in engine.step()]
    assert 1000 in computed


def test_a_query_aborted_before_it_is_chosen_is_never_evaluated() -> None:
    engine = ChoosyEngine(lambda pending: pending[:1])
    submitted(engine, [[0], [1], [2]])
    engine.step()
    engine.abort(101)
    assert [completion.query_id for completion in engine.step()] == [102]
    assert engine.step() == []
    assert engine.batches == [[(0,)], [(2,)]]


def test_halving_is_of_what_was_chosen() -> None:
    engine = ChoosyEngine(lambda pending: pending[:2])
    queries = submitted(engine, [[0], [POISON], [POISON, 1], [2]])
    for first in (0, 2):
        completions = engine.step()
        assert [completion.query_id for completion in completions] == [100 + first, 101 + first]
        for completion, query in zip(completions, queries[first:], strict=False):
            failed = isinstance(completion.error, ArithmeticError)
            assert failed == (POISON in query.token_ids)
    assert list(map(len, engine.batches)) == [2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda pending: [], "ChoosyEngine.choose returned none of 2 pending queries"),
        (lambda pending: None, "ChoosyEngine.choose returned none of 2 pending queries"),
        (lambda pending: [Query(7, (1,))], "returned query 7, which is not pending"),
        (lambda pending: [pending[1], pending[1]], "query 101, .* or returned it twice"),
        (lambda pending: pending[1:], "1 of 2 pending queries without the first"),
    ],
)
def test_a_choice_that_cannot_be_evaluated_is_an_error(
    pick: Callable[[Sequence[Query]], Sequence[Query]], message: str
) -> None:
    engine = ChoosyEngine(pick)
    submitted(engine, [[0], [1]])
    with pytest.raises(EvaluationError, match=message):
        engine.step()
    assert engine.batches == []


@pytest.mark.parametrize("pick", [lambda _: None, lambda _: [], lambda groups: [*groups] * 2])
def test_a_choice_of_groups_that_cannot_be_computed_is_an_error(pick: Callable) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    engine.choose_groups = pick
    message = (
        r"ScriptedEngine.choose_groups returned the groups \[.*\] of the pending \[\d+\]; "
        "return at least one of them, without repetition"
    )
    with AsyncLM(lambda: engine) as llm, pytest.raises(EvaluationError, match=message):
        llm.population([[1], [2]]).next_token_logprobs_sync()
    assert engine.batches == []


# -- what `evaluate` returns ----------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(VOCAB_SIZE,), (1, VOCAB_SIZE + 1), (2, VOCAB_SIZE), (1, 1, VOCAB_SIZE), ()]
)
def test_a_wrong_shape_is_an_error_naming_both_shapes(shape: tuple[int, ...]) -> None:
    engine = FunctionEngine(lambda count: torch.zeros(shape))
    submitted(engine, [[1]])
    [completion] = engine.step()
    assert completion.result is None
    assert isinstance(completion.error, EvaluationError)
    message = str(completion.error)
    assert "FunctionEngine.evaluate" in message
    assert f"returned rows of shape {shape}, torch.float32, for 1 sequences" in message
    assert f"expected (1, {VOCAB_SIZE})" in message


def test_rows_of_another_dtype_are_an_error_naming_both() -> None:
    engine = FunctionEngine(lambda count: torch.zeros(count, VOCAB_SIZE, dtype=torch.float64))
    submitted(engine, [[1]])
    [completion] = engine.step()
    assert isinstance(completion.error, EvaluationError)
    assert "torch.float64" in str(completion.error)
    assert "torch.float32" in str(completion.error)


@pytest.mark.parametrize("rows", [[torch.zeros(VOCAB_SIZE)], np.zeros((1, VOCAB_SIZE)), None])
def test_rows_that_are_no_tensor_are_an_error_that_says_so(rows: object) -> None:
    engine = FunctionEngine(lambda count: rows)  # type: ignore[arg-type, return-value]
    submitted(engine, [[1]])
    [completion] = engine.step()
    assert isinstance(completion.error, EvaluationError)
    found = f"FunctionEngine.evaluate returned {type(rows).__name__}; expected a torch.Tensor"
    assert found in str(completion.error)


LOGPROB = -math.log(VOCAB_SIZE)


def equal_rows(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.full(shape, LOGPROB, requires_grad=requires_grad)


ROWS: dict[str, Callable[[int], torch.Tensor | GroupValues]] = {
    "fresh": lambda count: equal_rows(count, VOCAB_SIZE),
    "with a graph": lambda count: equal_rows(count, VOCAB_SIZE, requires_grad=True) * 1,
    "a leaf of a graph": lambda count: equal_rows(count, VOCAB_SIZE, requires_grad=True),
    "last of each sequence": lambda count: equal_rows(count, 7, VOCAB_SIZE)[:, -1],
    "cut from padded ones": lambda count: equal_rows(count, VOCAB_SIZE + 5)[:, :VOCAB_SIZE],
    "expanded": lambda count: equal_rows(1, 1).expand(count, VOCAB_SIZE),
    "transposed": lambda count: equal_rows(VOCAB_SIZE, count).T,
    "inference": torch.inference_mode()(lambda count: equal_rows(count, VOCAB_SIZE)),
    "logits": lambda count: GroupValues(torch.ones(count, VOCAB_SIZE + 5), are_logits=True),
    "inference logits": torch.inference_mode()(
        lambda count: GroupValues(torch.ones(count, VOCAB_SIZE), are_logits=True)
    ),
    "logits with a graph": lambda count: GroupValues(
        torch.ones(count, VOCAB_SIZE, requires_grad=True), are_logits=True
    ),
    "logits in half precision": lambda count: GroupValues(
        torch.ones(count, VOCAB_SIZE).half(), are_logits=True
    ),
}


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ROWS)
def test_every_row_owns_exactly_its_memory_and_can_be_changed(kind: str, count: int) -> None:
    engine = FunctionEngine(ROWS[kind])
    submitted(engine, [[i] for i in range(count)])
    rows = [row_of(completion) for completion in engine.step()]
    for index, row in enumerate(rows):
        assert row.shape == (VOCAB_SIZE,)
        assert row.is_contiguous()
        assert row.untyped_storage().nbytes() == row.nbytes
        assert not row.requires_grad
        row.add_(torch.arange(VOCAB_SIZE) + index)
    for index, row in enumerate(rows):
        expected = torch.arange(VOCAB_SIZE) + index + LOGPROB
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)


def test_an_engine_may_reuse_the_memory_of_rows() -> None:
    memory = equal_rows(1, VOCAB_SIZE)
    engine = FunctionEngine(lambda count: memory)
    submitted(engine, [[1]])
    row = row_of(engine.step()[0])
    memory.zero_()
    assert torch.equal(row, equal_rows(1, VOCAB_SIZE)[0])


# -- the protocol ---------------------------------------------------------------------


def test_a_step_without_queries_evaluates_nothing() -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    assert engine.step() == []
    submitted(engine, [[1]])
    engine.step()
    assert engine.step() == []
    assert len(engine.batches) == 1


def test_an_aborted_query_is_not_evaluated() -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    queries = submitted(engine, [[1], [2], [3]])
    engine.abort(queries[1].query_id)
    engine.abort(queries[1].query_id)
    engine.abort(12345)
    assert [completion.query_id for completion in engine.step()] == [100, 102]
    assert engine.batches == [[(1,), (3,)]]


def test_a_subclass_needs_neither_init_nor_statistics_nor_close() -> None:
    first = FunctionEngine(ROWS["fresh"])
    second = FunctionEngine(ROWS["fresh"])
    submitted(first, [[1]])
    assert second.step() == []  # what is pending belongs to one engine
    assert len(first.step()) == 1
    assert first.statistics() == {}
    assert first.max_context is None
    assert first.capabilities == frozenset()
    first.close()


def test_a_batch_engine_is_an_engine_and_no_more_than_it_implements() -> None:
    plain = FunctionEngine(ROWS["fresh"])
    assert isinstance(plain, Engine)
    assert not isinstance(plain, LoraEngine | PrefixCacheEngine)
    assert isinstance(ScriptedEngine(), LoraEngine)


@pytest.mark.parametrize(
    ("attribute", "value", "error", "message"),
    [
        ("vocabulary", [b"a"], TypeError, "is list; expected a genlm.Vocabulary"),
        ("max_context", "5", TypeError, "FunctionEngine.max_context='5'; expected an integer"),
        ("max_context", 0, ValueError, "FunctionEngine.max_context=0; it must be 1 or more"),
        ("capabilities", None, TypeError, "FunctionEngine.capabilities is None; expected a"),
        (
            "capabilities",
            "lora",
            TypeError,
            "FunctionEngine.capabilities is 'lora'; expected a",
        ),
        ("capabilities", {"loras"}, TypeError, "'loras'}; expected .* which are lora, prefix"),
    ],
)
def test_an_engine_with_a_wrong_attribute_is_refused_at_its_creation(
    attribute: str, value: object, error: type[Exception], message: str
) -> None:
    engine = FunctionEngine(ROWS["fresh"])
    setattr(engine, attribute, value)
    with pytest.raises(error, match=message):
        AsyncLM(lambda: engine)


def test_the_names_of_capabilities_are_capabilities() -> None:
    engine = ScriptedEngine()
    engine.capabilities = {"lora"}  # type: ignore[assignment]
    with AsyncLM(lambda: engine) as llm:
        llm.load_lora("folder", "red")


def test_an_engine_without_evaluate_cannot_be_made() -> None:
    class Unfinished(BatchEngine):
        pass

    with pytest.raises(TypeError, match="evaluate"):
        Unfinished()  # type: ignore[abstract]
