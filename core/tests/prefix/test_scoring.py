"""Scores of texts from a prefix tree, by a model whose keys tell every prefix apart."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from genlm import EvaluationError, GroupReduction, Token, TokenScores, Vocabulary
from genlm.plugin import Query, Reduced, TokenSequence
from genlm.prefix import PieceScores, PrefixRows
from genlm.prefix.forward import ForwardResult, TokenBatch

from .test_rows import SIZE, Model, expected, packed, text
from .test_rows import serve as serve_rows

Ids = tuple[int, ...]


def serve(capacity: int, **limits: int) -> tuple[PrefixRows, Model]:
    return serve_rows(capacity, **{"max_rows": 64} | limits)


def next_pass(rows: PrefixRows, texts: list[Query]) -> list[int]:
    sequences = [text.sequence for text in texts]
    return list(rows.next_pass(None, sequences, [text.first_target for text in texts]))


def scored(ids: Ids, start: int = 1) -> Query:
    return Query(0, TokenSequence.of(ids[:-1]), targets=ids[start:])


def right_scores(adapter: str | None, text: Query) -> TokenScores:
    """The oracle: each target by the row before it."""
    ids = text.sequence.token_ids
    rows = [expected(adapter, ids[:end]) for end in range(text.first_target + 1, len(ids) + 1)]
    pairs = list(zip(rows, text.targets, strict=True))
    return TokenScores(
        torch.stack([row[target] for row, target in pairs]),
        torch.tensor([bool(row[target] >= row.max()) for row, target in pairs]),
    )


def scores_of(rows: PrefixRows, texts: list[Query], adapter: str | None = None) -> list[Any]:
    *_, results = rows.scores_by_pass(adapter, texts)
    assert results is not None
    return results


def assert_right(rows: PrefixRows, texts: list[Query], adapter: str | None = None) -> None:
    for result, scored_text in zip(scores_of(rows, texts, adapter), texts, strict=True):
        wanted = right_scores(adapter, scored_text)
        assert isinstance(result, TokenScores), result
        torch.testing.assert_close(result.logprobs, wanted.logprobs, rtol=0, atol=1e-6)
        assert result.is_top.tolist() == wanted.is_top.tolist()


def used(rows: PrefixRows, name: str) -> int:
    return int(rows.statistics()[name])


@pytest.mark.parametrize("capacity", [0, 25, 70, 2000])
@pytest.mark.parametrize("seed", range(4))
def test_scores_do_not_depend_on_what_else_is_scored_or_kept(capacity: int, seed: int) -> None:
    program = random.Random(seed)
    rows, model = serve(capacity)
    texts: list[Ids] = [text(20, seed)]
    for _ in range(12):
        texts = [
            (*program.choice(texts)[: program.randrange(90)], *text(program.randint(2, 12), i))
            for i in program.choices(range(1000), k=program.randint(1, 9))
        ]
        assert_right(rows, [scored(ids, program.randint(1, len(ids) - 1)) for ids in texts])
        if program.random() < 0.5:
            sequences = list(dict.fromkeys(ids[: program.randint(1, 40)] for ids in texts))
            computed = rows.rows(None, packed(sequences))
            wanted = torch.stack([expected(None, ids) for ids in sequences])
            torch.testing.assert_close(computed, wanted, rtol=0, atol=0)
        assert used(rows, "kv_tokens") <= capacity
    assert model.largest[0] <= 64
    if capacity != 70:  # longer than most
        assert (used(rows, "contexts_without_cache") > 0) == (capacity < 70)


def test_a_known_prefix_is_not_computed_again_and_the_rest_once() -> None:
    rows, _ = serve(500)
    ids = text(30, 0)
    rows.rows(None, packed([ids[:20]]))
    before = used(rows, "tokens_computed")
    assert_right(rows, [scored(ids, 20)])  # after token 19, which is run again for its logits
    assert used(rows, "tokens_computed") == before + 1 + 9
    assert used(rows, "forwards") == 2


def test_scored_texts_leave_contexts_in_the_cache() -> None:
    """A cache of 110 tokens, contexts of 60 and a prompt of 10: texts have the other 40."""
    rows, _ = serve(110)
    contexts, prompt = [text(30, 100), text(30, 101)], text(10, 102)
    rows.rows(None, packed(contexts))
    for seed in range(12):
        assert_right(rows, [scored(text(25, seed)), scored((*prompt, *text(15, seed)), 10)])
    before = used(rows, "tokens_computed")
    rows.rows(None, packed(contexts))
    assert used(rows, "tokens_computed") == before + 2  # their last tokens
    assert_right(rows, [scored((*prompt, *text(15, 99)), 10)])
    assert used(rows, "tokens_computed") == before + 2 + 15  # the last one of the prompt


def test_a_text_that_continues_a_context_leaves_the_context() -> None:
    rows, _ = serve(100)
    context, other = text(40, 0), text(30, 1)
    rows.rows(None, packed([context, other]))
    for seed in range(6):
        assert_right(rows, [scored((*context, *text(25, 10 + seed)), 1)])
    before = used(rows, "tokens_computed")
    rows.rows(None, packed([(*context, 3), (*other, 3)]))
    assert used(rows, "tokens_computed") == before + 2


@pytest.mark.parametrize("ids", [(*text(45, 1), *text(5, 2)), text(30, 1)])
def test_no_more_than_the_end_of_a_scored_text_goes_first(ids: Ids) -> None:
    rows, _ = serve(100)
    oldest, context = text(45, 0), text(45, 1)
    rows.rows(None, packed([oldest]))
    rows.rows(None, packed([context]))
    assert_right(rows, [scored(ids, len(ids) - 5)])
    rows.rows(None, packed([text(20, 3)]))  # for which 14 others have to go
    before = used(rows, "tokens_computed")
    rows.rows(None, packed([(*context, 3)]))
    assert used(rows, "tokens_computed") == before + 1


def test_the_prompt_of_a_scored_text_is_evicted_after_older_contexts() -> None:
    rows, _ = serve(40)
    oldest, prompt = text(20, 0), text(10, 1)
    rows.rows(None, packed([oldest]))
    assert_right(rows, [scored((*prompt, *text(5, 2)), 11)])
    rows.rows(None, packed([text(14, 3)]))  # for which 4 scored tokens and 4 others have to go
    before = used(rows, "tokens_computed")
    rows.rows(None, packed([(*prompt, 3)]))
    assert used(rows, "tokens_computed") == before + 1


def test_a_context_that_continues_a_scored_text_stays() -> None:
    rows, _ = serve(100)
    first, context = text(40, 0), (*text(40, 0)[:30], *text(10, 1))
    assert_right(rows, [scored(first)])
    rows.rows(None, packed([context]))
    for seed in range(6):
        assert_right(rows, [scored(first), scored(text(45, 10 + seed))])
    before = used(rows, "tokens_computed")
    rows.rows(None, packed([(*context, 3)]))
    assert used(rows, "tokens_computed") == before + 1


def test_positions_that_texts_share_are_computed_once() -> None:
    rows, model = serve(500)
    prompt = text(30, 0)
    texts = [scored((*prompt, i, 3), 1) for i in range(SIZE)]
    assert_right(rows, texts)
    assert used(rows, "tokens_computed") == model.largest[1] == 30 + SIZE
    assert next_pass(rows, texts) == list(range(SIZE))
    assert_right(rows, texts)  # all of them cached and run again, in one pass
    assert used(rows, "tokens_computed") == 2 * (30 + SIZE)
    assert (model.passes, model.largest) == (2, (30 + SIZE, 30 + SIZE))


def test_only_requested_positions_of_a_cached_context_are_computed_again() -> None:
    rows, model = serve(500)
    rows.rows(None, packed([text(20, 0)]))
    assert_right(rows, [scored(text(6, 0), 3), scored(text(18, 0), 12)])
    assert used(rows, "tokens_computed") == 20 + 3 + 6
    assert model.passes == 2


def test_texts_that_differ_in_the_last_target_share_all_positions() -> None:
    rows, _ = serve(500)
    ids = text(12, 0)
    assert_right(rows, [scored((*ids, i), 5) for i in range(SIZE)])
    assert used(rows, "tokens_computed") == 12


def test_a_text_longer_than_a_pass_takes_several_of_its_own() -> None:
    rows, model = serve(500, max_tokens=10)
    assert_right(rows, [scored(text(36, 0), 14), scored(text(5, 1), 2)])
    assert model.passes == 4 + 1
    assert model.largest[0] == 10
    assert used(rows, "tokens_computed") == 35 + 4


def test_a_text_that_does_not_fit_is_counted_and_computed_without_the_cache() -> None:
    rows, _ = serve(20)
    assert_right(rows, [scored(text(12, 0)), scored(text(30, 1), 4), scored(text(9, 2))])
    assert used(rows, "contexts_without_cache") == 1


def test_a_pass_has_no_more_tokens_than_results() -> None:
    rows, model = serve(500, max_rows=8)
    assert_right(rows, [scored(text(30, 0)), scored(text(9, 1))])
    assert model.largest[0] == 8


def test_the_logits_of_a_pass_are_freed_before_the_next_pass() -> None:
    class Tracked(Model):
        logits: weakref.ref[torch.Tensor] | None = None

        def __call__(self, batch: TokenBatch) -> ForwardResult:
            assert self.logits is None or self.logits() is None
            result = super().__call__(batch)
            self.logits = weakref.ref(result.logits)
            return result

    rows, model = serve(500, max_rows=8)
    model.__class__ = Tracked
    assert_right(rows, [scored(text(30, 0)), *(scored(text(9, i)) for i in range(1, 4))])
    assert model.passes > 4


def test_what_raises_leaves_computed_tokens_only() -> None:
    rows, model = serve(500)
    ids = text(30, 0)
    assert_right(rows, [scored(ids[:10])])
    model.fail = True
    with pytest.raises(RuntimeError, match="no memory"):
        scores_of(rows, [scored(ids)])
    assert used(rows, "kv_tokens") == 9
    model.fail = False
    assert_right(rows, [scored(ids)])


def test_adapters_share_nothing() -> None:
    rows, _ = serve(500)
    for adapter in (None, "red", "scarlet"):
        assert_right(rows, [scored(text(9, 0))], adapter)
    assert used(rows, "kv_tokens") == 24


def test_a_choice_is_one_pass() -> None:
    rows, model = serve(2000)
    prompt = text(25, 99)
    left = [scored((*prompt, *text(12, i)), 5 * (i % 6) + 1) for i in range(12)]
    left += [scored(text(40, i)) for i in range(3)]
    program = random.Random(0)
    program.shuffle(left)
    while left:
        indices = next_pass(rows, left)
        assert indices[0] == 0
        assert sorted(set(indices)) == list(indices)
        before = model.passes
        assert_right(rows, [left[place] for place in indices])
        assert model.passes == before + 1
        left = [query for place, query in enumerate(left) if place not in indices]
    assert model.largest[0] <= 64
    # 14 passes would be one for each text.
    assert model.passes <= 8


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    rows, _ = serve(500)
    waiting = [scored(text(n + 1, n)) for n in (40, 30, 10, 25, 14, 3)]
    assert next_pass(rows, waiting) == [0, 2, 4]
    assert next_pass(rows, [scored(text(101, 0)), *waiting]) == [0]


def test_a_choice_of_texts_has_no_more_tokens_than_a_pass_has_results() -> None:
    rows, _ = serve(500, max_rows=8)
    assert next_pass(rows, [scored(text(n + 1, n)) for n in (5, 4, 3)]) == [0, 2]
    assert rows.is_long(scored(text(8 + 2, 0)))
    assert not rows.is_long(scored(text(8 + 1, 0)))
    assert not rows.is_long(Query(0, text(9, 0)))
    assert_right(rows, [scored(text(10, 0))])
    assert rows.is_long(scored(text(10, 0)))  # all tokens are computed again for their logits
    assert not rows.is_long(scored(text(10, 0), 5))


# -- pieces -----------------------------------------------------------------------------


def vocabulary(size: int, missing: tuple[int, ...] = ()) -> Vocabulary:
    tokens = [Token(i, b"" if i in missing else bytes([65 + i])) for i in range(size)]
    return Vocabulary(None, tokens, [str(i) for i in range(size)], missing)


def pieces(keys: np.ndarray, targets: np.ndarray, vocab: Vocabulary) -> PieceScores:
    """The scores of one text whose targets follow positions of these keys."""
    sequence = TokenSequence.of([0] * len(targets))
    scores = PieceScores([Query(0, sequence, targets=tuple(targets.tolist()))], vocab)
    scores.expect(keys, np.arange(len(targets)))
    return scores


def result(scores: PieceScores) -> TokenScores:
    [results] = scores.results()
    assert isinstance(results, TokenScores), results
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 9, 12])
def test_only_ids_of_the_vocabulary_that_have_logits_count(
    width: int, dtype: torch.dtype
) -> None:
    vocab = vocabulary(9, missing=(3, 7))
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    known_logits = torch.full((6, 9), float("-inf"), dtype=torch.float64)
    known_logits[:, :width] = logits[:, :9].double()
    known_logits[:, [3, 7]] = float("-inf")
    wanted = known_logits.log_softmax(-1)
    pairs = np.array([(row, target) for row in range(6) for target in range(9)])
    pairs = np.random.default_rng(0).permutation(pairs)
    scores = pieces(pairs[:, 0] * 10, pairs[:, 1], vocab)
    for rows in ([4], [5, 0], [1, 2, 3]):
        scores.add(np.array(rows) * 10, logits[rows])
    logprobs, is_top = result(scores)
    right = wanted[pairs[:, 0], pairs[:, 1]]
    torch.testing.assert_close(logprobs.double(), right, rtol=0, atol=1e-5)
    assert torch.equal(is_top, right >= wanted.amax(-1)[pairs[:, 0]])
    assert is_top.any()


def test_equal_logits_are_all_on_top() -> None:
    scores = pieces(np.array([0, 0, 0]), np.array([1, 2, 0]), vocabulary(4))
    scores.add(np.array([0]), torch.tensor([[0.0, 2.0, 2.0, -1.0]]))
    assert result(scores).is_top.tolist() == [True, True, False]


def test_a_few_rows_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    results = []
    for values in (1, 20, 10**6):
        monkeypatch.setattr("genlm.core.rows.logits._VALUES_ON_CPU", values)
        scores = pieces(np.arange(50), np.arange(50) % 9, vocabulary(9, (2,)))
        scores.add(np.arange(50), logits)
        results.append(result(scores))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_rows_that_are_no_distributions_are_errors(bad: float | None) -> None:
    logits = torch.zeros(3, 4)
    if bad is None:
        logits[1] = float("-inf")
    else:
        logits[1, 2] = bad
    for targets, fails in (([0, 1, 2], True), ([0, 2], False)):
        scores = pieces(np.array(targets), np.zeros(len(targets), np.int64), vocabulary(4))
        scores.add(np.arange(3), logits)
        [results] = scores.results()
        if fails:
            assert isinstance(results, EvaluationError)
            assert "1 of 3 rows that are not distributions" in str(results)
        else:
            assert result(scores).logprobs.isfinite().all()


def test_a_text_of_which_positions_are_missing_is_an_error() -> None:
    scores = PieceScores([scored(text(4, 0)), scored(text(3, 1))], vocabulary(SIZE))
    scores.add(np.array([0, 2, 3, 4]), torch.zeros(4, SIZE))
    missing, complete = scores.results()
    assert not scores.is_complete
    assert isinstance(missing, EvaluationError)
    assert "2 of 3 positions" in str(missing)
    assert isinstance(complete, TokenScores)
    error = EvaluationError("computed by other means")
    scores.put(0, error)
    assert scores.is_complete
    assert scores.results()[0] is error


class Columns(GroupReduction):
    """The number of each member, its token's log-probability, and its row."""

    def __init__(self, token_ids: Ids) -> None:
        self.token_ids = torch.tensor(token_ids)

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logprobs = rows[row_of, self.token_ids[members]]
        return members, logprobs, rows[row_of]


def reduced(ids: Ids, start: int = 1) -> Query:
    return scored(ids, start).replace(outputs=(Columns(ids[start:]),))


@pytest.mark.parametrize("capacity", [0, 25, 200])
@pytest.mark.parametrize("values", [1, 20, 10**6])
def test_reductions_of_texts_have_the_rows_before_their_tokens(
    capacity: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.core.rows.logits._VALUES_ON_CPU", values)
    program = random.Random(capacity)
    rows, _ = serve(capacity, max_tokens=16)
    shared = text(12, 0)
    texts = [(*shared[: program.randrange(1, 12)], *text(9, i)) for i in range(6)]
    starts = [program.randint(1, len(ids) - 1) for ids in texts]
    queries = [
        (reduced if place % 3 else scored)(ids, start)
        for place, (ids, start) in enumerate(zip(texts, starts, strict=True))
    ]
    for result, query, start in zip(scores_of(rows, queries), queries, starts, strict=True):
        right = right_scores(None, query)
        if query.outputs == (None,):
            assert isinstance(result, TokenScores)
            torch.testing.assert_close(result.logprobs, right.logprobs, rtol=0, atol=1e-6)
            continue
        assert isinstance(result, Reduced)
        [(members, logprobs, whole)] = result.values
        assert members.tolist() == list(range(len(query.targets)))
        torch.testing.assert_close(logprobs, right.logprobs, rtol=0, atol=1e-6)
        ids = query.sequence.token_ids
        wanted = [expected(None, ids[:end]) for end in range(start, len(ids) + 1)]
        torch.testing.assert_close(whole, torch.stack(wanted), rtol=0, atol=1e-6)


def test_no_more_rows_than_a_part_are_reduced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genlm.core.rows.logits._VALUES_ON_CPU", SIZE)
    sizes: list[int] = []
    living: list[int] = []

    class Counted(Columns):
        def compute(self, rows: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
            sizes.append(len(rows))
            living.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
            return super().compute(rows, *more)[:2]

    rows, _ = serve(500)
    ids = text(30, 0)
    [results] = scores_of(rows, [scored(ids).replace(outputs=(Counted(ids[1:]),))])
    assert isinstance(results, Reduced)
    assert sum(sizes) == 29
    assert max(sizes) == 1
    assert len(set(living[1:])) == 1  # nothing is kept of each part


def test_a_reduction_that_raises_or_returns_no_columns_fails_its_text_alone() -> None:
    class Broken(Columns):
        answer: Any = None

        def compute(self, rows: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if self.answer is None:
                raise ArithmeticError("this reduction fails")
            answer: tuple[torch.Tensor, ...] = self.answer(rows)
            return answer

    rows, _ = serve(500)
    ids = text(9, 0)
    for answer, message in (
        (None, "Broken.compute raised ArithmeticError: this reduction fails"),
        (lambda rows: rows, "returned Tensor; expected a tuple"),
        (lambda rows: (rows[:1],), "shape (1, 7) for 8 members"),
    ):
        broken = Broken(ids[1:])
        broken.answer = answer
        queries = [scored(ids).replace(outputs=(broken,)), reduced(text(9, 1))]
        failed, fine = scores_of(rows, queries)
        assert isinstance(failed, EvaluationError)
        assert message in str(failed)
        assert isinstance(fine, Reduced)


def test_reduced_rows_that_are_no_distributions_are_errors() -> None:
    ids = text(4, 0)
    scores = PieceScores([reduced(ids), reduced(ids)], vocabulary(SIZE))
    logits = torch.zeros(6, SIZE)
    logits[4, 2] = float("nan")
    scores.add(np.arange(6), logits)
    fine, failed = scores.results()
    assert isinstance(fine, Reduced)
    assert isinstance(failed, EvaluationError)
    assert "1 of 3 rows that are not distributions" in str(failed)
