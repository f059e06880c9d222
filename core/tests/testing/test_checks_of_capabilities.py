"""Declared capabilities must work and undeclared ones must be refused."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from scripted import oracle_row
from scripted_target import VOCAB_SIZE, CertifiedEngine, scripted_target

from genlm import AsyncLM, Capability
from genlm.plugin import TokenScores
from genlm.testing import all_checks

from .conftest import RunCheck

OF_CAPABILITIES = [c.id for c in all_checks("engine") if c.needs]


class AbleEngine(CertifiedEngine):
    """Declares everything, and keeps prefixes, of no use to it."""

    capabilities = frozenset(Capability)

    def __init__(self):
        super().__init__()
        self.prefixes = set()
        self.shift = 0

    def evaluate(self, queries):
        return super().evaluate(queries).roll(self.shift, 1)

    def update_weights(self, weights):
        if weights is not None:
            self.shift = int(weights["shift"])

    def score(self, queries):
        return [self._scored(query) for query in queries]

    def _scored(self, query):
        first = len(query) - len(query.targets) + 1
        ends = (query.token_ids[: first + place] for place in range(len(query.targets)))
        rows = torch.stack([oracle_row(end, query.adapter, VOCAB_SIZE) for end in ends])
        logprobs = rows.gather(1, torch.tensor(query.targets)[:, None])[:, 0]
        return TokenScores(logprobs, logprobs >= rows.amax(-1))

    def cache_prefix(self, token_ids, adapter):
        self.prefixes.add((tuple(token_ids), adapter))

    def clear_prefix_cache(self):
        self.prefixes.clear()


def able_target():
    def shifted_row(ids, adapter):
        return oracle_row(ids, adapter, VOCAB_SIZE).roll(1, 0)

    first = scripted_target(build=AbleEngine)
    weights = [
        (lambda: {"shift": torch.tensor(0)}, first.oracle),
        (lambda: {"shift": torch.tensor(1)}, shifted_row),
    ]
    return dataclasses.replace(first, weights=weights)


class BareEngine(CertifiedEngine):
    """Declares nothing."""

    capabilities = frozenset()


@pytest.mark.parametrize("check_id", OF_CAPABILITIES)
@pytest.mark.parametrize(
    ("target", "status"),
    [(able_target(), "passed"), (scripted_target(build=BareEngine), "not applicable")],
    ids=["able", "bare"],
)
def test_a_right_engine_passes_whatever_it_declares(
    run_check: RunCheck, check_id, target, status
):
    outcome = run_check(check_id, target)
    assert outcome.status == status, outcome


def test_a_declared_capability_without_its_methods_fails(run_check: RunCheck) -> None:
    class Promises(BareEngine):
        capabilities = frozenset({Capability.PREFIX_CACHE})

    for check in ("capabilities-are-implemented", "kept-prefixes-change-nothing"):
        outcome = run_check(check, scripted_target(build=Promises))
        assert outcome.status == "failed"
        assert "cache_prefix" in outcome.expected + outcome.found


def test_declared_adapters_that_the_target_does_not_bring_fail(run_check: RunCheck) -> None:
    target = scripted_target(adapters={"red": "folder/red"})
    outcome = run_check("adapters-answer-as-themselves", target)
    assert (outcome.status, outcome.found) == ("failed", "1")


def test_new_weights_are_checked_without_adapters_if_the_engine_has_none(
    run_check: RunCheck,
) -> None:
    class OnlyWeights(AbleEngine):
        capabilities = frozenset({Capability.WEIGHTS})

    target = dataclasses.replace(able_target(), build=OnlyWeights)
    outcome = run_check("new-weights-are-used", target)
    assert outcome.status == "passed", outcome


def test_a_model_without_an_oracle_and_adapters_has_their_checks_skipped(
    run_check: RunCheck,
) -> None:
    target = scripted_target(oracle=None, adapters={})
    assert run_check("adapters-answer-as-themselves", target).status == "skipped"
    assert run_check("batch-equals-map", target).status == "passed"


def test_the_check_of_texts_does_not_apply_without_a_tokenizer(run_check: RunCheck) -> None:
    target = scripted_target(texts=("a text",))
    assert run_check("texts-are-encoded-and-decoded", target).status == "not applicable"


def test_what_a_target_leaves_out_is_skipped_not_passed_over(run_check: RunCheck) -> None:
    assert run_check("texts-are-encoded-and-decoded", scripted_target()).status == "skipped"
    target = scripted_target(build=AbleEngine, tight_options=())
    for check in ("tight-budgets-change-nothing", "new-weights-are-used"):
        assert run_check(check, target).status == "skipped"


def test_an_error_that_only_the_event_loop_sees_is_a_failure(
    run_check: RunCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = AsyncLM.next_token_logprobs

    async def careless(self, token_ids, **options):
        def raise_later():
            raise ArithmeticError("unhandled")

        asyncio.get_running_loop().call_soon(raise_later)
        return await answer(self, token_ids, **options)

    monkeypatch.setattr(AsyncLM, "next_token_logprobs", careless)
    outcome = run_check("rows-are-right", scripted_target())
    assert outcome.status == "failed"
    assert "ArithmeticError: unhandled" in outcome.found


def test_a_failing_program_is_shown_as_the_calls_that_lead_to_it(
    run_check: RunCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.core.model.cached_results.entry_copy", lambda entry: entry[0])
    outcome = run_check("random-programs-agree-with-the-oracle", scripted_target())
    assert outcome.status == "failed"
    program = eval(outcome.example["program"])
    assert len(program) <= 4
    assert any(call.startswith("spoil(") for call in program)
