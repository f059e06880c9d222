"""A model may depend on few tokens; a constant model cannot be certified."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from genlm import BatchEngine, Token, Vocabulary
from genlm.testing import EngineTarget, all_checks

from .conftest import RunCheck

SIZE = 8
TABLE = torch.log_softmax(torch.linspace(0, 9, SIZE * SIZE).sin().reshape(SIZE, SIZE) * 3, -1)


class Bigram(BatchEngine):
    """Looks up the row of the last token."""

    table = TABLE

    def __init__(self) -> None:
        tokens = [Token(i, bytes([97 + i])) for i in range(SIZE)]
        self.vocabulary = Vocabulary(None, tokens, [token.decode() for token in tokens])

    def evaluate(self, queries):
        return self.table[[query.token_ids[-1] for query in queries]]


class Constant(Bigram):
    """Has the same row for every sequence."""

    table = TABLE[:1].expand(SIZE, SIZE)


BIGRAM = EngineTarget(
    model="bigram", build=Bigram, oracle=lambda ids, _: TABLE[ids[-1]], texts=()
)


@pytest.mark.parametrize("check_id", [check.id for check in all_checks("engine")])
def test_a_bigram_model_is_certified(run_check: RunCheck, check_id: str) -> None:
    outcome = run_check(check_id, BIGRAM)
    assert outcome.status in {"passed", "not applicable", "skipped"}, outcome


def test_a_model_that_cannot_show_a_mistake_is_not(run_check: RunCheck) -> None:
    constant = dataclasses.replace(BIGRAM, build=Constant, oracle=lambda *_: TABLE[0])
    outcome = run_check("near-misses-are-told-apart", constant)
    assert outcome.status == "failed"
    assert outcome.expected == "every case that the check must cover to occur"
    assert outcome.found == "none of: a near miss with another row"
