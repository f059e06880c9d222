"""Reductions of all positions of a text, on every kind of engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine, oracle_row

from genlm import AsyncLM, Capability, EvaluationError, GroupReduction, Reduction, TokenScores
from genlm.core.queries.query import Completion, Query
from genlm.plugin import TokenIdError
from genlm.prefix import PieceScores

SIZE = 16
MakeModel = Callable[..., AsyncLM]


def rows_of(ids: Sequence[int], start: int, adapter: str | None = None) -> torch.Tensor:
    return torch.stack([oracle_row(ids[:i], adapter, SIZE) for i in range(start, len(ids))])


class Scoring(ScriptedEngine):
    """Computes all positions of texts."""

    capabilities = frozenset({Capability.LORA, Capability.SCORE})

    def __init__(self, **options: Any) -> None:
        super().__init__(SIZE, **options)

    def score(self, queries: Sequence[Query]) -> Any:
        scores = PieceScores(queries, self.vocabulary)
        for query, end in zip(queries, scores.ends, strict=False):
            positions = range(len(query.targets))
            prefixes = [
                Query(0, query.token_ids[: query.first_target + 1 + i], query.adapter)
                for i in positions
            ]
            scores.add(end + np.array(positions), self.evaluate(prefixes))
        return scores.results()


class Rows(ScriptedEngine):
    """Declares nothing of scores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SIZE, **options)


class IgnoresOutputs:
    """An `Engine` that scores, and knows nothing of reductions of texts."""

    max_context = None
    capabilities = frozenset({Capability.SCORE})

    def __init__(self) -> None:
        self.vocabulary = ScriptedEngine(SIZE).vocabulary
        self.pending: list[Query] = []

    def submit(self, query: Query) -> None:
        self.pending.append(query)

    def step(self) -> Iterable[Completion]:
        done, self.pending = self.pending, []
        return [
            Completion(q.query_id, TokenScores(torch.zeros(len(q.targets)), torch.zeros(1)))
            for q in done
        ]

    def abort(self, query_id: int) -> None: ...

    def close(self) -> None: ...

    def statistics(self) -> dict[str, int]:
        return {}


class Chosen(GroupReduction):
    """The log-probability of a token at each position, and the number of the position."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = torch.tensor(token_ids, dtype=torch.long)

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return rows[row_of, self.token_ids[members]], members


class Entropy(Reduction):
    """The same at all positions."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Entropy]) -> Sequence[float]:
        return torch.special.entr(rows.exp()).sum(-1).tolist()  # type: ignore[no-any-return]


class Fails(Reduction):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Fails]) -> Sequence[float]:
        raise ArithmeticError("no result")


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_columns_have_an_entry_for_each_position(engine: type, make_model: MakeModel) -> None:
    llm = make_model(engine())
    generator = np.random.default_rng(0)
    for length, start in ((2, 1), (7, 3), (40, 1), (300, 290)):
        text = generator.integers(0, SIZE, length).tolist()
        targets = generator.integers(0, SIZE, length - start)
        rows = rows_of(text, start)
        columns, places = llm.reduce_text_sync(text, Chosen(targets), start)
        assert columns.dtype == torch.float32
        right = rows[torch.arange(len(rows)), torch.from_numpy(targets)]
        torch.testing.assert_close(columns, right, rtol=0, atol=1e-6)
        assert places.tolist() == list(range(length - start))
        entropies = asyncio.run(llm.reduce_text(llm.context(text), Entropy(), start))
        torch.testing.assert_close(entropies, torch.special.entr(rows.exp()).sum(-1))


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_nothing_is_computed_of_no_position(engine: type, make_model: MakeModel) -> None:
    llm = make_model(engine())
    columns, places = llm.reduce_text_sync([1, 2, 3], Chosen([]), 3)
    assert columns.shape == places.shape == (0,)
    assert llm.reduce_text_sync([1, 2, 3], Entropy(), 3).shape == (0,)
    assert llm.statistics().requests == 0


def test_rows_are_computed_a_part_at_a_time(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.core.engine.batch_engine._GROUP_VALUES", 5 * SIZE)
    engine = Rows()
    llm = make_model(engine)
    text = list(range(SIZE)) * 2
    torch.testing.assert_close(
        llm.reduce_text_sync(text, Entropy()),
        torch.special.entr(rows_of(text, 1).exp()).sum(-1),
    )
    assert max(map(len, engine.batches)) == 5


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_a_reduction_that_raises_fails_its_text_alone(
    engine: type, make_model: MakeModel
) -> None:
    llm = make_model(engine())

    async def ask() -> list[Any]:
        requests = [
            llm.reduce_text([1, 2, 3], reduction)
            for reduction in (Entropy(), Fails(), Entropy())
        ]
        return await asyncio.gather(*requests, return_exceptions=True)

    first, failed, last = asyncio.run(ask())
    assert torch.equal(first, last)
    assert isinstance(failed, EvaluationError)
    assert "no result" in str(failed)


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_a_text_that_the_engine_cannot_compute_is_an_error(
    engine: type, make_model: MakeModel
) -> None:
    llm = make_model(engine(poison={5}))
    with pytest.raises(EvaluationError, match="raised"):
        llm.reduce_text_sync([1, 5, 3], Entropy())


class Halves(Reduction):
    """Returns one tensor for all rows, as many requests as it got."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> torch.Tensor:
        assert len(rows) == len(requests)
        return rows.view(len(rows), 2, -1).exp().sum(-1)


class OneTooFew(Reduction):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> Sequence[Any]:
        del requests
        return rows.amax(-1).tolist()[1:]


class RefusesSome(Reduction):
    """Pairs of numbers, and errors for rows whose most likely token is even."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> Sequence[Any]:
        del requests
        return [
            (float(row.amax()), 0) if int(row.argmax()) % 2 else ValueError("an even token")
            for row in rows
        ]


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_an_error_among_pairs_fails_the_text(engine: type, make_model: MakeModel) -> None:
    text = [*range(SIZE)]
    most_likely = rows_of(text, 1).argmax(-1)
    assert int(most_likely[0]) % 2 == 1
    assert (most_likely % 2 == 0).any()
    with pytest.raises(EvaluationError, match="an even token"):
        make_model(engine()).reduce_text_sync(text, RefusesSome())


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_the_results_of_a_reduction_may_be_one_tensor(
    engine: type, make_model: MakeModel
) -> None:
    text = [1, 2, 3, 4]
    halves = make_model(engine()).reduce_text_sync(text, Halves())
    expected = rows_of(text, 1).exp().view(3, 2, -1).sum(-1)
    torch.testing.assert_close(halves, expected)


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_a_reduction_of_fewer_results_than_rows_is_an_error(
    engine: type, make_model: MakeModel
) -> None:
    with pytest.raises(EvaluationError, match=r"OneTooFew.compute returned \d results"):
        make_model(engine()).reduce_text_sync([1, 2, 3, 4], OneTooFew())


@pytest.mark.parametrize("engine", [Scoring, Rows])
def test_a_function_of_rows_has_the_rows_of_all_positions(
    engine: type, make_model: MakeModel
) -> None:
    ids = [1, 2, 3, 2, 5]
    values, best = make_model(engine()).reduce_text_sync(ids, lambda rows: rows.max(-1)[:], 2)
    expected = rows_of(ids, 2).max(-1)
    torch.testing.assert_close(values, expected.values)
    assert torch.equal(best, expected.indices)


def test_an_engine_that_knows_nothing_of_them_is_named(make_model: MakeModel) -> None:
    llm = make_model(IgnoresOutputs())
    with pytest.raises(EvaluationError, match="TokenScores for a query that requests Reduced"):
        llm.reduce_text_sync([1, 2, 3], Entropy())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ([1, 2], "entropy"),
            TypeError,
            "expected a function of rows, a genlm.GroupReduction or a genlm.Reduction",
        ),
        (([1, 2], Entropy(), 0), ValueError, "start=0"),
        (([1, 2], Entropy(), 3), ValueError, "start=3 of a text of 2 tokens"),
        (([1, SIZE], Entropy()), TokenIdError, "token id 16 at position 1"),
    ],
)
def test_wrong_arguments_are_errors(
    make_model: MakeModel, arguments: Any, error: type[Exception], message: str
) -> None:
    for engine in (Scoring(), Rows()):
        llm = make_model(engine)
        with pytest.raises(error, match=message):
            llm.reduce_text_sync(*arguments)
        assert llm.statistics().requests == 0
