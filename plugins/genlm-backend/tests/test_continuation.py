"""Models that users write are continued by draws from their rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from genlm.backend.llm.continuation import sampled_continuation
from genlm.plugin import draw_tokens, stream_uniform

INF = float("inf")


class Successor:
    """A model certain that token n is followed by n + 1; records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def __call__(self, sequence: Sequence[int]) -> torch.Tensor:
        self.asked.append(list(sequence))
        row = torch.full((50,), -INF)
        row[sequence[-1] + 1] = 0.0
        return row


def drawn(model: Successor, max_tokens: int, *stop_ids: int) -> list[int]:
    continued = sampled_continuation(model, (3, 4), max_tokens, 1.0, frozenset(stop_ids), 0)
    return asyncio.run(continued)


def test_a_continuation_asks_for_the_row_after_each_of_its_tokens() -> None:
    model = Successor()
    assert drawn(model, 3) == [5, 6, 7]
    assert model.asked == [[3, 4], [3, 4, 5], [3, 4, 5, 6]]


def test_a_continuation_ends_before_a_stop_id() -> None:
    model = Successor()
    assert drawn(model, 9, 7, 20) == [5, 6]
    assert len(model.asked) == 3


def test_a_stop_id_of_the_prompt_ends_nothing() -> None:
    assert drawn(Successor(), 2, 3, 4) == [5, 6]


def test_a_continuation_of_no_tokens_asks_nothing() -> None:
    model = Successor()
    assert drawn(model, 0) == []
    assert model.asked == []


def random_row(sequence: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(sequence)))
    return torch.randn(30, generator=generator).log_softmax(-1)


def test_a_continuation_is_the_chain_of_draws_from_its_seed() -> None:
    async def rows(sequence: Sequence[int]) -> torch.Tensor:
        return random_row(sequence)

    found = asyncio.run(sampled_continuation(rows, (1,), 12, 1.3, frozenset(), 5))
    sequence = [1]
    for position in range(12):
        row = random_row(sequence)
        sequence.append(int(draw_tokens(row[None], [1.3], [stream_uniform(5, position)])))
    assert found == sequence[1:]
