"""The default dtype and device of torch, which a program may set, change no result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import genlm
import genlm.smc
from genlm.constraints import Automaton
from genlm.core.reference.engine import ReferenceEngine

IDS = [97, 98]


@contextmanager
def default_dtype() -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def default_device() -> Any:
    """A device without values, in place of a GPU: an operation on its tensors raises."""
    return torch.device("meta")


def entropy(rows: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(rows.exp()).sum(-1)


def results(llm: genlm.AsyncLM) -> list[Any]:
    size = llm.vocab_size
    masks = np.ones((4, size), bool)
    masks[1] = False
    masks[2:, 50:] = False
    population = llm.population(IDS, 4)
    some = llm.population(IDS, 4).finish(np.array([False, True, False, False]))
    gone = population.finish(np.ones(4, bool))
    rows = population.next_token_logprobs_sync()
    found: list[Any] = [
        rows,
        some.next_token_logprobs_sync(),
        llm.population([IDS, [98]]).tokens,
        llm.batch_next_token_logprobs_sync([IDS, [98]]),
        llm.batch_next_token_logprobs_sync([]),
        population.log_mass_sync([1, 2, 3]),
        some.log_mass_sync(masks),
        population.score_sync([[1, 2], [3, 4], [5, 6], [7, 8]]),
        population.score_sync([[1, 2], [3], [], [7, 8]]),
        population.token_logprobs_sync([[1, 2]] * 4),
        *population.top_tokens_sync(3),
        *population.draw_sync(seed=1),
        *some.draw_sync(seed=1),
        *some.draw_sync(masks, temperature=0.5, seed=1),
        *population.draw_sync(masks[2:], mask_index=[0, 1, 1, 0], top_p=0.9, seed=1),
        *population.draw_sync([[1, 2], None, [3], [4, 5]], min_p=0.1, seed=1),
        *population.draw_sync(bias=np.zeros((4, size), np.float32), seed=1),
        *population.draw_sync(masks, rows=rows, seed=1),
        *some.draw_without_replacement_sync(3, masks, seed=1),
        *gone.draw_sync(masks, seed=1),
        *gone.top_tokens_sync(2),
        gone.log_mass_sync([1]),
        gone.reduce_sync(entropy),
        gone.token_logprobs_sync([[1]] * 4),
        population.reduce_sync(entropy),
        genlm.Population.cat([some, population]).truncate([1] * 8).tokens,
        llm.reduce_text_sync(IDS, entropy),
        llm.log_mass_sync(IDS, [1, 2]),
        *llm.draw_sync(IDS, [1, 2], seed=1),
        *llm.top_tokens_sync(IDS, 2),
        llm.token_logprobs_sync(IDS, [1, 2]),
        llm.score_sync(IDS),
        llm.score_sync([98]),
        *llm.batch_token_scores_sync([IDS, [98]])[0],
        llm.sample_sync(IDS, 5, seed=1),
    ]
    sampled = population.sample_sync([3, 0, 2, 3], masks[2], stop="a", seed=1)
    found += [sampled.token_ids, sampled.logprobs, sampled.draw_logprob]
    *_, particles = genlm.smc.steer_sync(
        llm, IDS, 5, max_tokens=6, constraint=Automaton.regex("[a-d]{1,4}"), seed=0
    )
    reader = genlm.ByteReader(llm, width=4)
    reader.start_sync([98])
    reader.read_sync(b"ab")
    found += [torch.from_numpy(reader.probabilities()), reader.logprob]
    found += [particles.population.tokens, torch.from_numpy(particles.log_weights)]
    return found


@pytest.mark.parametrize("defaults", [default_dtype, default_device])
def test_defaults_of_torch_change_no_result(defaults: Any) -> None:
    with genlm.load_model("demo", "reference", output_cache=genlm.OutputCache(0)) as llm:
        expected = results(llm)
        with defaults():
            found = results(llm)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


class WithADefaultDevice(ReferenceEngine):
    """An engine that sets the default device of its own thread."""

    def __init__(self) -> None:
        super().__init__("demo")
        torch.set_default_device("meta")

    def evaluate(self, queries: Any) -> Any:
        with torch.device("cpu"):
            return super().evaluate(queries)


def test_the_default_device_of_an_engine_changes_no_result() -> None:
    tables = []
    for build in (lambda: ReferenceEngine("demo"), WithADefaultDevice):
        with genlm.AsyncLM(build, output_cache=genlm.OutputCache(0)) as llm:
            tables.append(results(llm))
    expected, found = tables
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
