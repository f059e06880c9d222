"""Reductions and scores of a model: shared, cached, checked, on every kind of engine."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine, oracle_row

import genlm
from genlm import (
    AsyncLM,
    Capability,
    ContextLengthError,
    EvaluationError,
    GroupReduction,
    OutputCache,
    Reduction,
    TokenScores,
)
from genlm.core.queries.query import Completion, Query, Reduced
from genlm.core.rows.group_reductions import Rows
from genlm.core.rows.outputs import reduce_rows
from genlm.core.rows.sampling import stream_seeds, stream_uniform
from genlm.plugin import TokenIdError, Vocabulary

SIZE = 16
MakeModel = Callable[..., AsyncLM]


@dataclass(frozen=True)
class Entropy(Reduction):
    """A reduction of one's own."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Entropy]) -> Sequence[float]:
        return torch.special.entr(rows.exp()).sum(-1).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Listed(Entropy):
    """A reduction that cannot be hashed."""

    values: list[int]


@dataclass(frozen=True)
class Nothing(Reduction):
    """A reduction without a result."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Nothing]) -> Sequence[None]:
        return [None] * len(requests)


@dataclass(frozen=True)
class Failing(Reduction):
    """A reduction that fails for every row."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Failing]) -> Sequence[float]:
        raise ArithmeticError("no result")


def row_of(token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
    return oracle_row(token_ids, adapter, SIZE)


class Recording(Reduction, GroupReduction):
    """A reduction for contexts and populations that fails, and records its rows."""

    is_cacheable = False
    rows: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    @staticmethod
    def compute(rows: torch.Tensor, *_: object) -> Any:
        Recording.rows.append(weakref.ref(rows))
        raise ArithmeticError("no result")


async def fail_for_a_cached_row(llm: AsyncLM) -> None:
    await llm.next_token_logprobs([1, 2])
    await llm.context([1, 2]).reduce(Recording.compute)


FAIL: dict[str, Callable[[AsyncLM], Awaitable[object]]] = {
    "context": lambda llm: llm.context([1, 2]).reduce(Recording()),
    "function": lambda llm: llm.context([1, 2]).reduce(Recording.compute),
    "population": lambda llm: llm.population([1, 2], 3).reduce(Recording()),
    "function of a population": lambda llm: llm.population([1], 3).reduce(Recording.compute),
    "text": lambda llm: llm.reduce_text([1, 2, 3], Recording.compute),
    "cached row": fail_for_a_cached_row,
}


@pytest.mark.parametrize("fail", FAIL.values(), ids=FAIL)
def test_a_kept_error_of_a_reduction_keeps_no_rows(
    make_model: MakeModel, fail: Callable[[AsyncLM], Awaitable[object]]
) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    Recording.rows.clear()

    async def send() -> tuple[Any, weakref.ref[Any]]:
        requests = fail(llm), llm.next_token_logprobs([3])
        error, row = await asyncio.gather(*requests, return_exceptions=True)
        return error, weakref.ref(row)  # the error's traceback may refer to the task's result

    error, other_row = asyncio.run(send())
    assert isinstance(error, genlm.GenlmError)
    llm.next_token_logprobs_sync([4])  # the engine's thread has ended the step of the error
    assert Recording.rows
    assert [rows() for rows in (*Recording.rows, other_row)] == [None] * (
        len(Recording.rows) + 1
    )


# -- who reduces ----------------------------------------------------------------------


class WholeRows:
    """An `Engine` that knows nothing of outputs: it returns the row of every query."""

    max_context = None
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self) -> None:
        self.vocabulary: Vocabulary = ScriptedEngine(SIZE).vocabulary
        self.pending: dict[int, Query] = {}

    def submit(self, query: Query) -> None:
        self.pending[query.query_id] = query

    def step(self) -> Iterable[Completion]:
        finished = [Completion(i, row_of(q.token_ids)) for i, q in self.pending.items()]
        self.pending.clear()
        return finished

    def abort(self, query_id: int) -> None:
        self.pending.pop(query_id, None)

    def close(self) -> None: ...

    def statistics(self) -> dict[str, int]:
        return {}


class Reducing(WholeRows):
    """An `Engine` that reduces itself."""

    def step(self) -> Iterable[Completion]:
        queries = list(self.pending.values())
        self.pending.clear()
        rows = torch.stack([row_of(query.token_ids) for query in queries])
        for query, reduced in zip(
            queries, reduce_rows(rows, [query.outputs for query in queries]), strict=True
        ):
            assert isinstance(reduced, Reduced)
            yield Completion(query.query_id, reduced)


class TooFewValues(WholeRows):
    """An `Engine` that leaves values out."""

    def step(self) -> Iterable[Completion]:
        return [Completion(completion.query_id, Reduced(())) for completion in super().step()]


@pytest.mark.parametrize("engine", [ScriptedEngine, WholeRows, Reducing])
def test_every_kind_of_engine_answers_reductions(engine: type, make_model: MakeModel) -> None:
    llm = make_model(engine(), output_cache=OutputCache(0))
    ids = [1, 2, 3]

    async def ask() -> list[Any]:
        return await asyncio.gather(
            llm.token_logprobs(ids, [4, 0]),
            llm.next_token_logprobs(ids),
            llm.log_mass(ids, [4, 0]),
            llm.reduce(ids, Entropy()),
            llm.draw(ids, seed=3),
            llm.top_tokens([5], 2),
        )

    logprobs, row, mass, entropy, drawn, top = asyncio.run(ask())
    expected = row_of(ids)
    assert logprobs.tolist() == expected[[4, 0]].tolist()
    assert torch.equal(row, expected)
    assert mass == pytest.approx(float(expected[[0, 4]].logsumexp(0)), abs=1e-6)
    assert entropy == pytest.approx(float(torch.special.entr(expected.exp()).sum()))
    assert drawn.logprob == float(expected[drawn.token_id])
    assert top.token_ids.tolist() == row_of([5]).topk(2).indices.tolist()


def test_an_engine_that_returns_too_few_values_fails_its_query(make_model: MakeModel) -> None:
    llm = make_model(TooFewValues())
    with pytest.raises(EvaluationError, match="0 values for a query with 1 outputs"):
        llm.top_tokens_sync([1], 2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mask", [None, [1, 2, 5, 9]])
def test_draws_with_a_bias_invert_the_biased_distribution(
    mask: list[int] | None, temperature: float, make_model: MakeModel
) -> None:
    llm, seeds = make_model(ScriptedEngine(SIZE)), range(40)
    context, rng = llm.context([1, 2]), np.random.default_rng(0)
    bias = rng.normal(size=(len(seeds), SIZE))
    bias[:, 5] = -math.inf

    rows = np.concatenate([bias, bias[::-1], np.zeros_like(bias)])  # two for each seed, or none
    cases = [*zip([*seeds] * 3, rows, strict=True)]

    async def draw_all() -> list[Any]:
        draws = (
            context.draw(
                mask, bias=added if added.any() else 0, seed=i, temperature=temperature
            )
            for i, added in cases
        )
        return await asyncio.gather(*draws)

    drawn = asyncio.run(draw_all())
    row = row_of([1, 2]).double().numpy()
    allowed = np.isin(np.arange(SIZE), range(SIZE) if mask is None else mask)
    for (i, added), token in zip(cases, drawn, strict=True):
        logs = np.where(allowed, row + added, -np.inf)
        draw_logs = logs / temperature - np.logaddexp.reduce(logs / temperature)
        uniform = stream_uniform(i, 2)
        assert token.token_id == np.searchsorted(np.exp(draw_logs).cumsum(), uniform, "right")
        assert token.logprob == pytest.approx(row[token.token_id], abs=1e-6)
        assert token.log_mass == pytest.approx(np.logaddexp.reduce(logs), abs=1e-5)
        assert token.draw_logprob == pytest.approx(draw_logs[token.token_id], abs=1e-5)
    masks = None if mask is None else [mask] * len(seeds)
    contexts = [context] * len(seeds)
    settings: dict[str, Any] = {"temperature": temperature, "seed": [*seeds]}
    assert llm.batch_draw_sync(contexts, masks, bias=bias, **settings) == drawn[: len(seeds)]
    shared = llm.batch_draw_sync(contexts, masks, bias=torch.from_numpy(bias[3]), **settings)
    assert shared[3] == drawn[3]
    assert shared[4] != drawn[4]


def test_seeds_of_any_size_draw_independently(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    seeds = [1, 2**64 - 1, 2**64, 2**64 + 1, 2**128 + 1, 2**200 + 1]
    draws = [[llm.draw_sync([i], seed=seed).token_id for i in range(SIZE)] for seed in seeds]
    assert len(set(map(tuple, draws))) == len(seeds)
    for i in range(SIZE):
        drawn = llm.batch_draw_sync([[i]] * len(seeds), seed=seeds)
        assert [token.token_id for token in drawn] == [of_seed[i] for of_seed in draws]


def test_a_bias_of_another_shape_or_without_a_value_is_refused(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    with pytest.raises(ValueError, match=r"a bias of shape \(3,\) for 1 rows over 16 tokens"):
        llm.draw_sync([1], bias=[0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="bias is NaN or inf"):
        llm.batch_draw_sync([[1], [2]], bias=[0.0, math.nan])
    with pytest.raises(TypeError, match="bias has values of type"):
        llm.draw_sync([1], bias="a")
    assert llm.draw_sync([1], bias=-math.inf).token_id == -1
    assert llm.batch_draw_sync([], bias=np.zeros(SIZE)) == []


# -- sharing --------------------------------------------------------------------------


def test_requests_for_one_context_are_one_evaluation(make_model: MakeModel) -> None:
    engine = ScriptedEngine(SIZE)
    llm = make_model(engine, output_cache=OutputCache(0))

    async def ask() -> None:
        context = llm.context([1, 2])
        await asyncio.gather(
            *(llm.draw(context, seed=seed) for seed in range(20)),
            *(llm.draw([1, 2]) for _ in range(20)),
            llm.top_tokens([1, 2], 1),
            llm.next_token_logprobs(context),
        )

    asyncio.run(ask())
    assert engine.batches == [[(1, 2)]]
    assert llm.statistics().joined == 41


def test_a_request_for_something_else_of_a_running_evaluation_is_asked_again(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(SIZE)
    llm = make_model(engine, output_cache=OutputCache(0))

    async def ask() -> list[Any]:
        engine.hold()
        first = asyncio.ensure_future(llm.top_tokens([1, 2], 1))
        await asyncio.to_thread(engine.wait_until_entered)
        late = [
            asyncio.ensure_future(
                llm.top_tokens([1, 2], 1)
            ),  # what the engine computes: shared
            asyncio.ensure_future(llm.draw([1, 2], seed=1)),
            asyncio.ensure_future(llm.next_token_logprobs([1, 2])),
        ]
        await asyncio.sleep(0)
        engine.release()
        return await asyncio.gather(first, *late)

    top, same, drawn, row = asyncio.run(ask())
    assert top.token_ids.tolist() == same.token_ids.tolist() == [int(row_of([1, 2]).argmax())]
    assert drawn.logprob == float(row_of([1, 2])[drawn.token_id])
    assert torch.equal(row, row_of([1, 2]))
    assert engine.batches == [[(1, 2)], [(1, 2)]]


def test_queries_of_one_sequence_in_one_batch_are_evaluated_once() -> None:
    from genlm.core.rows.reductions import Draw, TopK

    engine = ScriptedEngine(SIZE)
    engine.submit(Query(0, (1, 2), outputs=(TopK(1),)))
    engine.submit(Query(1, (3,)))
    engine.submit(Query(2, (1, 2)))
    engine.submit(Query(3, (1, 2), outputs=(Draw(0.5), None)))
    engine.submit(Query(4, (1, 2), "red", outputs=(TopK(1),)))
    results = {completion.query_id: completion.result for completion in engine.step()}
    assert engine.batches == [[(1, 2), (3,), (1, 2)]]
    assert torch.equal(results[1], row_of([3]))  # type: ignore[arg-type]
    assert torch.equal(results[2], row_of([1, 2]))  # type: ignore[arg-type]
    assert results[0].values[0].token_ids.tolist() == [int(row_of([1, 2]).argmax())]  # type: ignore[union-attr]
    assert torch.equal(results[3].values[1], row_of([1, 2]))  # type: ignore[union-attr]
    best = int(row_of([1, 2], "red").argmax())
    assert results[4].values[0].token_ids.tolist() == [best]  # type: ignore[union-attr]


# -- the output cache -----------------------------------------------------------------


def test_reductions_are_cached_and_cached_rows_answer_them(make_model: MakeModel) -> None:
    engine = ScriptedEngine(SIZE)
    llm = make_model(engine)
    first = llm.token_logprobs_sync([1], [2, 3])
    first.zero_()  # the caller's own
    assert llm.token_logprobs_sync([1], [2, 3]).tolist() == row_of([1])[[2, 3]].tolist()
    assert len(engine.batches) == 1
    assert llm.cached_logprobs([1]) is None  # rows that nobody asked for are not kept
    llm.next_token_logprobs_sync([4])
    llm.draw_sync([4], [1, 2])
    llm.top_tokens_sync([4], 3)
    assert len(engine.batches) == 2
    assert llm.statistics().cache_hits == 3
    llm.clear_output_cache()
    llm.token_logprobs_sync([1], [2, 3])
    assert len(engine.batches) == 3


def entropies(rows: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(rows.exp()).sum(-1)


def best_two(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = rows.topk(2)
    return values, ids


def test_functions_of_rows_are_called_once_for_all_requests(make_model: MakeModel) -> None:
    counts: list[int] = []

    def counted(rows: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return entropies(rows)

    llm, contexts = make_model(ScriptedEngine(SIZE)), [[1], [2], [1], [3, 4]]
    functions = [counted, best_two, counted, counted]
    found = llm.batch_reduce_sync(contexts, functions)
    assert counts == [2]  # equal requests share a result
    for context, function, result in zip(contexts, functions, found, strict=True):
        expected = oracle_row(context, None, SIZE)
        if function is counted:
            torch.testing.assert_close(result, entropies(expected))
        else:
            assert isinstance(result, tuple)
            for one, other in zip(result, expected.topk(2), strict=True):
                torch.testing.assert_close(one, other)
    [first, _, equal, _] = found
    first.zero_()  # the caller's
    assert equal > 0
    assert llm.statistics().cache_entries == 0


def test_a_reduction_that_can_be_called_is_a_reduction(make_model: MakeModel) -> None:
    class Called(Entropy):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    llm = make_model(ScriptedEngine(SIZE))
    assert llm.reduce_sync([1], Called()) == llm.reduce_sync([1], Entropy())
    assert llm.population([1], 1).reduce_sync(Called()) > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows.sum(), r"<lambda> returned a tensor of shape \(\) for 1 rows"),
        (lambda rows: rows.sum(-1).tolist(), "<lambda> returned list for 1 rows; expected a"),
        (lambda rows: rows.missing, "<lambda> raised AttributeError"),
    ],
)
def test_what_a_function_of_rows_returns_is_checked(
    function: Any, message: str, make_model: MakeModel
) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    for reduced in (
        lambda: llm.reduce_sync([1], function),
        lambda: llm.population([1], 3).reduce_sync(function),
        lambda: llm.reduce_text_sync([1, 2], function),
    ):
        with pytest.raises(genlm.GenlmError, match=message):
            reduced()
    assert llm.reduce_sync([1], entropies) > 0


def test_a_result_that_is_none_is_evaluated_each_time(make_model: MakeModel) -> None:
    engine = ScriptedEngine(SIZE)
    llm = make_model(engine)
    assert [llm.reduce_sync([1], Nothing()) for _ in range(2)] == [None, None]
    assert engine.batches == [[(1,)], [(1,)]]
    assert llm.batch_reduce_sync([[1], [2]], [Nothing(), Entropy()])[0] is None
    assert llm.statistics().cache_hits == 0


def test_draws_without_a_seed_are_not_cached(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    drawn = {llm.draw_sync([1], temperature=5.0).token_id for _ in range(40)}
    assert len(drawn) > 1
    assert llm.statistics().cache_entries == 0


def test_reductions_of_a_removed_adapter_are_forgotten(make_model: MakeModel) -> None:
    class Removing(ScriptedEngine):
        def remove_adapter(self, name: str) -> None:
            del self.adapters[name]

    llm = make_model(Removing(SIZE))
    llm.load_lora("folder", "red")
    llm.top_tokens_sync([1], 1, lora_name="red")
    llm.top_tokens_sync([1], 1)
    llm.unload_lora("red")
    llm.next_token_logprobs_sync([2])  # after the removal, on the engine's thread
    assert llm.statistics().cache_entries == 2


def test_the_cache_counts_the_bytes_of_results_masks_and_ids(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    llm.token_logprobs_sync([1], list(range(10)))
    context, tensor, ids = 4, 10 * 4, 10 * 40
    row_bytes = context + tensor + ids
    assert llm.statistics().cache_bytes == row_bytes
    llm.log_mass_sync([1], [3])
    number, mask = 64, SIZE // 8
    assert llm.statistics().cache_bytes == row_bytes + context + number + mask


# -- the four forms -------------------------------------------------------------------


def test_all_forms_of_a_reduction_agree(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE), output_cache=OutputCache(0))
    contexts = [llm.context([1, 2]), [3], (4, 5)]
    masks: list[Any] = [[1, 2], [0], list(range(SIZE))]
    forms = {
        "token_logprobs": ([[1], [2, 3], []],),
        "log_mass": (masks,),
    }
    for name, (arguments,) in forms.items():
        batch = getattr(llm, f"batch_{name}_sync")(contexts, arguments)
        batch_async = asyncio.run(getattr(llm, f"batch_{name}")(contexts, arguments))
        singles = [getattr(llm, f"{name}_sync")(c, o) for c, o in zip(contexts, arguments)]
        singles_async = [
            asyncio.run(getattr(llm, name)(c, o)) for c, o in zip(contexts, arguments)
        ]
        for results in zip(batch, batch_async, singles, singles_async, strict=True):
            assert len({str(result) for result in results}) == 1
    tops = llm.batch_top_tokens_sync(contexts, 2)
    assert str(tops) == str(asyncio.run(llm.batch_top_tokens(contexts, 2)))
    assert str(tops) == str([llm.top_tokens_sync(context, 2) for context in contexts])
    drawn = llm.batch_draw_sync(contexts, masks, seed=7, top_p=0.9)
    assert drawn == asyncio.run(llm.batch_draw(contexts, masks, seed=7, top_p=0.9))
    seeds = stream_seeds(7, 3)
    assert drawn == llm.batch_draw_sync(contexts, masks, seed=seeds, top_p=0.9)
    assert drawn == [
        llm.draw_sync(context, mask, seed=seed, top_p=0.9)
        for context, mask, seed in zip(contexts, masks, seeds, strict=True)
    ]
    entropies = llm.batch_reduce_sync(contexts, [Entropy()] * 3)
    assert entropies == [llm.reduce_sync(context, Entropy()) for context in contexts]


def test_methods_for_one_and_several_contexts_take_an_adapter(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    llm.load_lora("folder", "red")
    contexts: list[list[int]] = [[1, 2], [3]]
    for name in ("red", None):
        rows = torch.stack([row_of(ids, name) for ids in contexts])
        logprobs = llm.batch_token_logprobs_sync(contexts, [[1], [2]], lora_name=name)
        assert torch.equal(torch.cat(logprobs), rows[[0, 1], [1, 2]])
        masses = llm.batch_log_mass_sync(contexts, [[1], [2]], lora_name=name)
        assert masses == pytest.approx(rows[[0, 1], [1, 2]].tolist())
        best = rows.argmax(1).tolist()
        tops = llm.batch_top_tokens_sync(contexts, 1, lora_name=name)
        assert [int(top.token_ids) for top in tops] == best
        drawn = llm.batch_draw_sync(contexts, temperature=0, lora_name=name)
        assert [token.token_id for token in drawn] == best
        for ids, row, token_id in zip(contexts, rows, best, strict=True):
            [logprob] = llm.token_logprobs_sync(ids, [1], lora_name=name)
            assert logprob == row[1]
            mass = llm.log_mass_sync(ids, [1], lora_name=name)
            assert mass == pytest.approx(float(row[1]))
            assert int(llm.top_tokens_sync(ids, 1, lora_name=name).token_ids) == token_id
            one = llm.draw_sync(ids, temperature=0, lora_name=name)
            assert one.token_id == token_id


def test_masks_of_batches_have_all_forms(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    contexts = [[1, 2], [3]]
    masks = torch.zeros(2, SIZE, dtype=torch.bool)
    masks[0, [1, 5]] = masks[1, [0, 2, 15]] = True
    packed = torch.tensor([[2**1 + 2**5], [2**0 + 2**2 + 2**15]], dtype=torch.int32)
    rows = torch.stack([row_of(ids) for ids in contexts])
    masses = pytest.approx(rows.masked_fill(~masks, -math.inf).logsumexp(1).tolist(), abs=1e-5)
    lists = [[1, 5], [0, 2, 15]]
    for form in (masks, masks.numpy(), packed, packed.numpy(), lists, [*masks]):
        assert llm.batch_log_mass_sync(contexts, form) == masses
    checked = [genlm.Mask(ids, SIZE) for ids in lists]
    assert llm.batch_log_mass_sync(contexts, checked) == masses
    assert [llm.log_mass_sync(*pair) for pair in zip(contexts, checked, strict=True)] == masses


def test_contexts_have_the_methods_too(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    context = llm.context([1]).extend(2)

    async def ask() -> list[Any]:
        return [
            await context.draw([3, 4], seed=1),
            await context.log_mass([3, 4]),
            (await context.top_tokens(1)).token_ids.tolist(),
            (await context.token_logprobs([5])).tolist(),
            await context.reduce(Entropy()),
        ]

    assert asyncio.run(ask()) == [
        llm.draw_sync([1, 2], [3, 4], seed=1),
        llm.log_mass_sync([1, 2], [3, 4]),
        llm.top_tokens_sync([1, 2], 1).token_ids.tolist(),
        llm.token_logprobs_sync([1, 2], [5]).tolist(),
        llm.reduce_sync([1, 2], Entropy()),
    ]


# -- wrong arguments ------------------------------------------------------------------


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("top_tokens", {"k": 0}, ValueError, "k=0; it must be 1 or more"),
    ("top_tokens", {"k": 17}, ValueError, "k=17 of a vocabulary of 16 ids"),
    ("top_tokens", {"k": 1.5}, TypeError, "k=1.5; expected an integer"),
    ("token_logprobs", {"token_ids": [16]}, TokenIdError, "token id 16 at position 0"),
    ("log_mass", {"mask": [True] * 15}, ValueError, r"shape \(15,\); expected \(16,\)"),
    ("draw", {"temperature": math.nan}, ValueError, "temperature=nan"),
    ("draw", {"top_k": 17}, ValueError, "top_k=17 of a vocabulary of 16"),
    ("draw", {"top_p": 0}, ValueError, "top_p=0.0; it must be above 0"),
    ("draw", {"seed": 1.5}, TypeError, "seed=1.5"),
    ("batch_draw", {"masks": [[1]]}, ValueError, "1 masks for 2 contexts"),
    ("batch_draw", {"masks": np.ones(16, bool)}, ValueError, "one mask for 2 contexts"),
    ("batch_log_mass", {"masks": genlm.Mask([1], 16)}, ValueError, "one mask for 2 contexts"),
    ("batch_log_mass", {"masks": 3}, TypeError, "masks=3; expected 2 masks"),
    ("log_mass", {"mask": genlm.Mask([1], 15)}, ValueError, "15"),
    ("batch_draw", {"seed": [1]}, ValueError, "1 seeds for 2 contexts"),
    ("batch_reduce", {"reductions": [Entropy()]}, ValueError, "1 reductions for 2 contexts"),
    ("batch_reduce", {"reductions": Entropy()}, ValueError, "one reduction for 2 contexts"),
    (
        "batch_token_logprobs",
        {"token_ids": [[1]]},
        ValueError,
        "1 sequences of token ids for 2",
    ),
    ("reduce", {"reduction": Rows()}, TypeError, "populations and reduce_text compute a Group"),
    ("reduce", {"reduction": Entropy}, TypeError, "expected a function of rows, or an object"),
    ("batch_reduce", {"reductions": best_two}, ValueError, "one reduction for 2 contexts"),
    ("reduce", {"reduction": Listed([1])}, TypeError, "Listed.* cannot be hashed, and equal"),
    ("score", {"start": 0}, ValueError, "start=0; it must be 1 or more"),
    ("score", {"start": 4}, ValueError, "start=4 of a text of 3 tokens"),
    ("score", {"stride": 0}, ValueError, "stride=0; it must be 1 or more"),
    ("score", {"stride": 1.5}, TypeError, "stride=1.5; expected an integer"),
    ("score", {"stride": 6}, ValueError, "stride=6; the context of the model is 5 tokens"),
    ("batch_score", {"start": [1, 2, 3]}, ValueError, "3 starts for 2 texts"),
]


@pytest.mark.parametrize(("method", "arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_before_anything_is_asked(
    method: str,
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
    make_model: MakeModel,
) -> None:
    llm = make_model(ScriptedEngine(SIZE, max_context=5))
    contexts = [[1, 2, 3], [4]] if method.startswith("batch") else [1, 2, 3]
    with pytest.raises(error, match=message):
        asyncio.run(getattr(llm, method)(contexts, **arguments))
    with pytest.raises(error, match=message):
        getattr(llm, f"{method}_sync")(contexts, **arguments)
    assert llm.statistics().requests == 0


def test_a_context_of_a_wrong_kind_is_named(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    with pytest.raises(TypeError, match="int 5"):
        llm.draw_sync(5, seed=1)  # type: ignore[arg-type]


# -- scores ---------------------------------------------------------------------------


class ScoringEngine(ScriptedEngine):
    """Scores whole texts itself."""

    capabilities = frozenset({Capability.LORA, Capability.SCORE})

    def __init__(self, **options: Any) -> None:
        super().__init__(SIZE, **options)
        self.scored: list[Query] = []

    def score(self, queries: Sequence[Query]) -> list[TokenScores]:
        self.scored += queries
        if any(self.poison & set(query.token_ids) for query in queries):
            raise ArithmeticError("poisoned text")
        return [self._scores(query) for query in queries]

    def _scores(self, query: Query) -> TokenScores:
        first = len(query) - len(query.targets) + 1
        rows = [
            row_of(query.token_ids[: first + i], query.adapter)
            for i in range(len(query.targets))
        ]
        logprobs = [row[target] for row, target in zip(rows, query.targets, strict=True)]
        return TokenScores(
            torch.stack(logprobs),
            torch.tensor([bool(p >= row.max()) for p, row in zip(logprobs, rows, strict=True)]),
        )


def loop_over_rows(ids: Sequence[int], start: int, adapter: str | None = None) -> list[float]:
    return [float(row_of(ids[:i], adapter)[ids[i]]) for i in range(start, len(ids))]


@pytest.mark.parametrize("engine", [ScriptedEngine, ScoringEngine, WholeRows])
def test_scores_are_those_of_the_rows(engine: type, make_model: MakeModel) -> None:
    llm = make_model(engine())
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, SIZE, n).tolist() for n in (1, 2, 7, 40, 300)]
    starts = [1, 1, 3, 40, 7]
    all_scores = llm.batch_token_scores_sync(texts, starts)
    for text, start, scores in zip(texts, starts, all_scores, strict=True):
        assert isinstance(scores, TokenScores)
        assert scores.logprobs.dtype == torch.float32
        assert scores.logprobs.tolist() == loop_over_rows(text, start)
        tops = [bool(row_of(text[:i]).argmax() == text[i]) for i in range(start, len(text))]
        assert scores.is_top.tolist() == tops
    plain = asyncio.run(llm.batch_score(texts, 1, progress=True))
    assert [scores.tolist() for scores in plain] == [loop_over_rows(t, 1) for t in texts]  # type: ignore[union-attr]
    assert llm.score_sync(llm.context(texts[2])).tolist() == loop_over_rows(texts[2], 1)
    assert asyncio.run(llm.score(np.array(texts[2]), 7)).shape == (0,)


def test_the_score_of_a_continuation_of_a_context_is_that_of_its_tokens(
    make_model: MakeModel,
) -> None:
    llm = make_model(ScriptedEngine(SIZE))
    prompt = llm.context([3, 1])
    expected = loop_over_rows((3, 1, 4, 1, 5), 2)
    assert asyncio.run(prompt.score([4, 1, 5])).tolist() == expected
    assert asyncio.run(prompt.score(np.int64(4))).tolist() == expected[:1]
    assert asyncio.run(prompt.score([])).shape == (0,)


@pytest.mark.parametrize("engine", [ScriptedEngine, ScoringEngine])
def test_a_text_may_have_one_token_more_than_the_context(
    engine: type, make_model: MakeModel
) -> None:
    llm = make_model(engine(max_context=4))
    assert llm.score_sync([1, 2, 3, 4, 5]).tolist() == loop_over_rows([1, 2, 3, 4, 5], 1)
    message = r"a text of 6 tokens .* context of 4 tokens, texts of at most 5 tokens .* stride="
    with pytest.raises(ContextLengthError, match=message) as raised:
        llm.score_sync([1, 2, 3, 4, 5, 6])
    assert (raised.value.length, raised.value.max_context) == (6, 4)


def score_in_windows(ids: Sequence[int], start: int, limit: int, stride: int) -> list[float]:
    """Score each token after those of its window that are before it."""
    scores = []
    for place in range(start, len(ids)):
        further = max(math.ceil((place + 1 - max(limit, start)) / stride), 0)
        end = min(max(limit, start) + further * stride, len(ids))
        window = ids[max(end - limit, 0) : place + 1]
        scores += loop_over_rows(window, len(window) - 1)
    return scores


@pytest.mark.parametrize("engine", [ScriptedEngine, ScoringEngine])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_longer_texts_are_scored_in_windows(
    engine: type, stride: int, make_model: MakeModel
) -> None:
    llm = make_model(engine(max_context=4))
    generator = np.random.default_rng(stride)
    texts = [generator.integers(0, SIZE, n).tolist() for n in (1, 5, 6, 13, 13, 13, 13)]
    starts = [1, 2, 1, 1, 4, 7, 13]
    windows = llm.batch_token_scores_sync(texts, starts, stride=stride)
    logprobs = llm.batch_score_sync(texts, starts, stride=stride)
    for score, scores in zip(logprobs, windows, strict=True):
        assert torch.equal(score, scores.logprobs)
    for text, start, scores in zip(texts, starts, windows, strict=True):
        assert scores.logprobs.tolist() == score_in_windows(text, start, 5, stride)
        assert scores.is_top.shape == scores.logprobs.shape
    whole = make_model(engine()).score_sync(texts[3], stride=1)  # contexts of any length
    assert whole.tolist() == loop_over_rows(texts[3], 1)


@pytest.mark.parametrize("length", [5, SIZE])  # few positions are separate queries
def test_the_rows_of_a_cancelled_text_are_dropped(length: int, make_model: MakeModel) -> None:
    held = ScriptedEngine(SIZE)
    llm = make_model(held)

    async def cancelled() -> None:
        held.hold()
        scoring = asyncio.ensure_future(llm.score(list(range(length))))
        other = asyncio.ensure_future(llm.score([3, 2, 1]))
        await asyncio.to_thread(held.wait_until_entered, 1)
        scoring.cancel()
        await asyncio.wait([scoring])
        held.release()
        assert (await other).tolist() == loop_over_rows([3, 2, 1], 1)

    asyncio.run(cancelled())
    assert llm.statistics().abandoned == 1
    groups: Any = llm._scheduler.engine
    assert not groups._texts
    assert not groups._row_requests
    assert llm.score_sync(range(4)).tolist() == loop_over_rows(range(4), 1)


@pytest.mark.parametrize("engine", [ScriptedEngine, ScoringEngine])
@pytest.mark.parametrize("wrong", [[1, SIZE], [], "ab"])
def test_nothing_of_a_batch_with_a_wrong_text_is_counted_or_looked_up(
    engine: type, wrong: Any, make_model: MakeModel
) -> None:
    llm = make_model(engine(), output_cache=OutputCache(2))
    llm.batch_score_sync([[1, 2], [3, 4]])
    keys = list(llm.output_cache._entries)  # the least recently used first
    before = llm.statistics()
    with pytest.raises(genlm.QueryError):
        llm.batch_score_sync([[1, 2], wrong])
    with pytest.raises(genlm.QueryError):
        asyncio.run(llm.batch_score([[1, 2], wrong]))
    after = llm.statistics()
    assert (after - before).requests == (after - before).cache_hits == 0
    assert list(llm.output_cache._entries) == keys


def test_every_request_of_a_batch_is_counted_if_a_known_row_fails_a_reduction(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(SIZE)
    llm = make_model(engine)
    llm.batch_next_token_logprobs_sync([[1], [2]])
    before = llm.statistics()
    contexts, reductions = [[1], [3], [2]], [Entropy(), Entropy(), Failing()]
    with pytest.raises(EvaluationError, match="no result"):
        llm.batch_reduce_sync(contexts, reductions)
    with pytest.raises(EvaluationError, match="no result"):
        asyncio.run(llm.batch_reduce(contexts, reductions))
    counted = llm.statistics() - before
    assert (counted.requests, counted.cache_hits) == (6, 5)
    assert engine.batches == [[(1,), (2,)], [(3,)]]


def test_scores_are_shared_cached_and_of_their_adapter(make_model: MakeModel) -> None:
    engine = ScoringEngine()
    llm = make_model(engine)
    llm.load_lora("folder", "red")
    text = [1, 2, 3]

    async def ask() -> list[Any]:
        return await asyncio.gather(
            llm.score(text),
            llm.score(text),
            llm.score(text, 2),
            llm.score(text, lora_name="red"),
            llm.score([1, 2, 4]),
        )

    first, same, tail, red, other = asyncio.run(ask())
    assert len(engine.scored) == 4
    first.zero_()
    assert same.tolist() == loop_over_rows(text, 1)
    assert tail.tolist() == loop_over_rows(text, 2)
    assert red.tolist() == loop_over_rows(text, 1, "red")
    assert other.tolist() == loop_over_rows([1, 2, 4], 1)
    assert llm.score_sync(text).tolist() == loop_over_rows(text, 1)
    assert len(engine.scored) == 4


def test_a_text_that_fails_does_so_alone(make_model: MakeModel) -> None:
    llm = make_model(ScoringEngine(poison=[9]))

    async def ask() -> list[Any]:
        texts = [[1, 2], [9, 2], [3, 4, 5]]
        row = llm.next_token_logprobs([6])
        scores = (llm.score(text) for text in texts)
        return list(await asyncio.gather(row, *scores, return_exceptions=True))

    row, first, failed, last = asyncio.run(ask())
    assert torch.equal(row, row_of([6]))
    assert first.tolist() == loop_over_rows([1, 2], 1)
    assert isinstance(failed, EvaluationError)
    assert last.tolist() == loop_over_rows([3, 4, 5], 1)


def test_scores_of_a_wrong_shape_are_errors(make_model: MakeModel) -> None:
    class OneTooFew(ScoringEngine):
        def _scores(self, query: Query) -> TokenScores:
            return TokenScores(*(column[1:] for column in super()._scores(query)))

    llm = make_model(OneTooFew())
    with pytest.raises(
        EvaluationError, match=r"of shapes \(1,\) and \(1,\) for a query of 2 t"
    ):
        llm.score_sync([1, 2, 3])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.zeros(1, 16),
            r"Other.score returned tensor\(.* for 1 queries; expected a list",
        ),
        ([torch.zeros(16)], "type Tensor for a query that requests TokenScores"),
        ([(torch.zeros(2), torch.ones(2))], "type tuple for a query that requests TokenScores"),
        (TokenScores(torch.zeros(2), torch.ones(2)), "returned 2 results for 1 queries"),
        (None, "returned None for 1 queries"),
        ([], "returned 0 results for 1 queries"),
        ([TokenScores(torch.zeros(2), None)], r"of shapes \(2,\) and \(\) for a query of 2"),  # type: ignore[arg-type]
    ],
)
def test_scores_of_another_kind_are_errors_that_say_what_is_expected(
    make_model: MakeModel, result: Any, message: str
) -> None:
    class Other(ScoringEngine):
        def score(self, queries: Sequence[Query]) -> Any:
            return result

    llm = make_model(Other())
    with pytest.raises(EvaluationError, match=message):
        llm.score_sync([1, 2, 3])
