"""The path without a cache: batches of sequences and texts within the limits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from genlm import Query
from genlm.prefix import BatchLimits, Integers64

from .test_rows import Alone, expected, logits_after, packed
from .test_scoring import right_scores, scored, text


class Recorded(Alone):
    """Records the lengths of each batch, and whether only last positions were requested."""

    def __init__(self, limits: BatchLimits, *, scores_by_rows: bool = False) -> None:
        super().__init__()
        self.limits, self.scores_by_rows = limits, scores_by_rows
        self.batches: list[list[int]] = []

    def run(
        self, sequences: Sequence[Sequence[int]], firsts: Integers64
    ) -> Iterator[tuple[Integers64, torch.Tensor]]:
        self.count(sequences)
        lengths = np.array([len(ids) for ids in sequences])
        self.batches.append(lengths.tolist())
        if self.scores_by_rows:
            assert np.array_equal(firsts, lengths - 1)
        pairs = [(i, end) for i, n in enumerate(lengths) for end in range(firsts[i], n)]
        logits = [logits_after(self.adapter, sequences[i][: end + 1]) for i, end in pairs]
        yield np.array(pairs).T, torch.stack(logits)


def is_within(batch: list[int], max_tokens: int, max_rows: int) -> bool:
    size = len(batch)
    return size == 1 or (size * max(batch) <= max_tokens and size <= max_rows)


@pytest.mark.parametrize("scores_by_rows", [False, True])
@pytest.mark.parametrize(("max_tokens", "max_rows"), [(64, 20), (64, 1), (20, 64)])
def test_scores_are_right_and_batches_have_no_more_positions_than_results(
    max_tokens: int, max_rows: int, scores_by_rows: bool
) -> None:
    path = Recorded(BatchLimits(max_tokens, max_rows), scores_by_rows=scores_by_rows)
    program = random.Random(0)
    texts = [scored(text(n, n), program.randrange(1, n)) for n in (3, 30, 5, 4, 9, 40, 4)]
    for adapter in (None, "red"):
        [results] = path.scores_by_pass(adapter, texts)
        for query, result in zip(texts, results, strict=True):
            wanted = right_scores(adapter, query)
            torch.testing.assert_close(result.logprobs, wanted.logprobs, rtol=0, atol=1e-6)
            assert result.is_top.tolist() == wanted.is_top.tolist()
    limit = max_tokens if scores_by_rows else min(max_tokens, max_rows)
    assert all(is_within(batch, limit, max_rows) for batch in path.batches)
    if scores_by_rows:
        rows = sum(len(query.targets) for query in texts)
        assert sum(map(len, path.batches)) == 2 * rows


def test_a_choice_is_the_batch_of_the_first_sequence() -> None:
    lengths = [9, 30, 10, 8, 9, 40]
    queries = [Query(i, text(n, n)) for i, n in enumerate(lengths)]
    path = Recorded(BatchLimits(64, 20))
    sequences = [query.sequence for query in queries]
    assert path.next_pass(None, sequences) == [0, 4, 3]
    assert path.next_pass(None, sequences[1:]) == [0, 1]
    firsts = [0] * len(sequences)
    assert path.next_pass(None, sequences, firsts) == [2, 0]  # 20 positions
    path.scores_by_rows = True
    assert path.next_pass(None, sequences, firsts) == [0]
    assert path.next_pass(None, sequences) == [0, 4, 3]


def test_rows_of_all_batches_are_in_the_order_of_the_sequences() -> None:
    path = Recorded(BatchLimits(20, 3))
    contexts = [text(n, n) for n in (4, 25, 1, 9, 10, 3)]
    rows = path.rows("red", packed(contexts))
    for row, ids in zip(rows, contexts, strict=True):
        torch.testing.assert_close(row, expected("red", ids), rtol=0, atol=1e-6)
    assert path.batches == [[25], [10, 9], [4, 3, 1]]
    statistics = path.statistics()
    assert statistics["tokens_computed"] == 4 + 25 + 1 + 9 + 10 + 3
    assert statistics["tokens_padded"] == 1 + (1 + 3)
    assert statistics["forwards"] == 3
