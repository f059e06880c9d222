"""The checks describe the fault of a broken engine; `tests/mutants/` has correct ones."""

from __future__ import annotations

import pytest
import torch
from scripted import oracle_row
from scripted_target import VOCAB_SIZE, CertifiedEngine, scripted_target

from genlm import Query
from genlm.testing import QUICK, CheckFailure, EngineFixture
from genlm.testing.diagnosis import diagnose_row
from genlm.testing.report import describe

from .conftest import RunCheck


def test_a_wrong_row_is_reported_with_the_smallest_example(run_check: RunCheck) -> None:
    class LastRowFirst(CertifiedEngine):
        def evaluate(self, queries):
            return super().evaluate(queries).flip(0)

    target = scripted_target(build=LastRowFirst)
    outcome = run_check("batch-equals-map", target)
    assert outcome.status == "failed"
    assert outcome.expected.startswith("the row of (")
    assert "instead of" in outcome.found
    assert len(eval(outcome.example["batch"])) == 2


class Sorted(CertifiedEngine):
    def evaluate(self, queries):
        return super().evaluate(sorted(queries, key=len))


class OtherAdapter(CertifiedEngine):
    def evaluate(self, queries):
        names = {"red": "blue", "blue": "red", None: None}
        return super().evaluate(
            [Query(q.query_id, q.token_ids, names[q.adapter]) for q in queries]
        )


class WithoutTheLast(CertifiedEngine):
    def evaluate(self, queries):
        return super().evaluate([Query(q.query_id, q.token_ids[:-1] or (0,)) for q in queries])


class LastFourOnly(CertifiedEngine):
    def evaluate(self, queries):
        return super().evaluate([Query(q.query_id, q.token_ids[-4:]) for q in queries])


class Shifted(CertifiedEngine):
    def evaluate(self, queries):
        return super().evaluate(queries) + 5e-4


@pytest.mark.parametrize(
    ("engine", "check_id", "hint"),
    [
        (Sorted, "batch-equals-map", "another sequence of the same example"),
        (WithoutTheLast, "rows-are-right", "without the last token"),
        (LastFourOnly, "rows-are-right", "without the first "),
        (OtherAdapter, "adapters-answer-as-themselves", "as another adapter computes it"),
        (Shifted, "rows-are-right", "every log-probability is off by 0.0005"),
    ],
)
def test_a_row_of_other_ids_is_recognised(
    run_check: RunCheck, engine: type[CertifiedEngine], check_id: str, hint: str
) -> None:
    outcome = run_check(check_id, scripted_target(build=engine))
    assert outcome.status == "failed"
    assert hint in outcome.hint
    assert f"  hint      {outcome.hint}" in describe(outcome)


def test_a_row_after_the_state_of_other_ids_is_recognised() -> None:
    hint = diagnose_row(
        oracle_row((4, 5, 3), None, VOCAB_SIZE),
        (1, 2, 3),
        None,
        others=[(4, 5), (1, 2, 3)],
        adapters=(),
        oracle=lambda ids, adapter: oracle_row(ids, adapter, VOCAB_SIZE).double(),
        limit=1e-4,
    )
    assert hint == "it is the row of (4, 5, 3), the last token after the state of other tokens"


def test_of_many_scores_the_worst_is_shown() -> None:
    fixture = EngineFixture(scripted_target(), QUICK, 0)
    scores = -torch.arange(1.0, 9.0)
    expected = scores + torch.tensor([0, 0, 0.5, 0, 0, 2, 0, 0])
    with pytest.raises(CheckFailure) as failure:
        fixture.check_logprobs(scores, expected)
    assert failure.value.expected == "8 log-probabilities, every log-probability within 0.0001"
    assert failure.value.found.startswith("-6 instead of -4 at position 5, 2 of 8 positions")
    with pytest.raises(CheckFailure) as failure:
        fixture.check_logprobs(scores[:3], expected[:3])
    assert failure.value.found == "[-1.0, -2.0, -3.0]"


def test_a_row_of_no_other_ids_has_no_hint(run_check: RunCheck) -> None:
    class Mixed(CertifiedEngine):
        def evaluate(self, queries):
            rows = super().evaluate(queries)
            return rows.roll(1, -1)

    outcome = run_check("rows-are-right", scripted_target(build=Mixed))
    assert (outcome.status, outcome.hint) == ("failed", "")


def test_a_check_that_raises_is_reported_with_its_traceback(run_check: RunCheck) -> None:
    class NoRows(CertifiedEngine):
        def evaluate(self, queries):
            raise ArithmeticError("no rows today")

    outcome = run_check("rows-are-right", scripted_target(build=NoRows))
    assert outcome.status == "failed"
    assert "no rows today" in outcome.found
    assert "evaluate" in outcome.details
    outcome = run_check("rows-are-distributions", scripted_target(build=NoRows))
    assert outcome.details.count("batch=[(0,)]") == 1


def test_a_request_that_never_ends_is_a_failure_within_the_time_limit(
    run_check: RunCheck,
) -> None:
    class Silent(CertifiedEngine):
        def step(self):
            if self._pending:
                self._pending.take(lambda queries: queries, "Silent")
            return []

    target = scripted_target(build=Silent, timeout_s=0.5)
    outcome = run_check("rows-are-right", target)
    assert (outcome.status, outcome.expected) == ("failed", "every request to end")
    assert "did not end within 0.5 s" in outcome.found
    assert "with the query_id of the query" in outcome.hint


def test_an_oracle_without_a_log_probability_for_each_id_is_named(run_check: RunCheck) -> None:
    outcome = run_check("rows-are-right", scripted_target(oracle=lambda *_: None))
    assert outcome.found.endswith(
        "oracle returned None; expected an array of log-probabilities"
    )
    outcome = run_check("rows-are-right", scripted_target(oracle=lambda *_: [0.0] * 3))
    assert outcome.found == "shape (16,); by the oracle it is (3,)"


def test_a_check_fails_if_its_interesting_case_never_occurred(run_check: RunCheck) -> None:
    outcome = run_check("batch-equals-map", scripted_target(token_ids=[3], max_length=1))
    assert outcome.status == "failed"
    assert outcome.expected == "every case that the check must cover to occur"
    assert outcome.found == "none of: ragged batch, another order"


def test_a_target_with_too_few_sequences_fails_and_does_not_hang(run_check: RunCheck) -> None:
    target = scripted_target(token_ids=[0], max_length=6)
    outcome = run_check("concurrent-requests-share-steps", target)
    assert outcome.status == "failed"
    assert outcome.expected.startswith("a target with at least 16 sequences of `token_ids`")
    assert outcome.found == "3"


def test_the_same_seed_finds_the_same_example(run_check: RunCheck) -> None:
    class Rounded(CertifiedEngine):
        def evaluate(self, queries):
            return super().evaluate(queries).to(torch.float16).float()

    target = scripted_target(build=Rounded)
    first, second = (run_check("batch-equals-map", target, seed=5) for _ in range(2))
    assert first.example == second.example


@pytest.mark.parametrize(
    ("check_id", "call"),
    [("batch-equals-map", 9), ("random-programs-agree-with-the-oracle", 80)],
)
def test_a_fault_that_comes_and_goes_is_reported_as_the_violated_property(
    run_check: RunCheck, check_id: str, call: int
) -> None:
    class WrongAtTimes(CertifiedEngine):
        calls = 0

        def evaluate(self, queries):
            WrongAtTimes.calls += 1
            rows = super().evaluate(queries)
            # More than once, because all requests of a batch may be cancelled.
            return rows if WrongAtTimes.calls % call else rows.flip(1)

    outcome = run_check(check_id, scripted_target(build=WrongAtTimes))
    assert outcome.status == "failed"
    assert outcome.expected.startswith("the row of (")


def test_an_error_that_comes_and_goes_is_reported_without_the_group_of_hypothesis(
    run_check: RunCheck,
) -> None:
    class NoRowsOnce(CertifiedEngine):
        calls = 0

        def evaluate(self, queries):
            NoRowsOnce.calls += 1
            if NoRowsOnce.calls == 9:
                raise ArithmeticError("no rows today")
            return super().evaluate(queries[:0] if NoRowsOnce.calls == 10 else queries)

    outcome = run_check("rows-are-right", scripted_target(build=NoRowsOnce))
    assert (outcome.status, outcome.expected) == ("failed", "no exception")
    assert outcome.found == "EvaluationError: the engine raised ArithmeticError: no rows today"


def test_an_error_that_no_request_waits_for_is_a_failure(run_check: RunCheck) -> None:
    class RaisesInWake(CertifiedEngine):
        def wake(self):
            raise ArithmeticError("no wake today")

    outcome = run_check("rows-are-right", scripted_target(build=RaisesInWake))
    assert (outcome.status, outcome.expected) == ("failed", "no error in the log")
    assert "waking the engine raised: ArithmeticError: no wake today" in outcome.found


def test_another_seed_makes_other_examples(run_check: RunCheck) -> None:
    token_ids_by_run: list[set[tuple[int, ...]]] = []

    class Watched(CertifiedEngine):
        def evaluate(self, queries):
            token_ids_by_run[-1].update(query.token_ids for query in queries)
            return super().evaluate(queries)

    for seed in (0, 0, 1):
        token_ids_by_run.append(set())
        run_check("batch-equals-map", scripted_target(build=Watched), seed=seed)
    assert token_ids_by_run[0] == token_ids_by_run[1] != token_ids_by_run[2]
