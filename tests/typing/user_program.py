"""A program as users write it, which `mypy` checks with the rest; nothing runs it.

`assert_type` says what an editor should know. An ignored error is one that must be found:
the type checker complains about an ignore that nothing needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import assert_type

import numpy as np
import numpy.typing as npt
import torch

import genlm
from genlm.constraints import Automaton
from genlm.smc import (
    Particles,
    batch_steer,
    batch_steer_sync,
    resampled,
    steer,
    steer_sync,
)
from genlm.testing import EngineTarget


def takes_any_sequence_of_ids(llm: genlm.AsyncLM, tensor: torch.Tensor) -> None:
    array = np.arange(3)
    for ids in ([1, 2], (1, 2), range(3), array, tensor):
        assert_type(llm.next_token_logprobs_sync(ids), torch.Tensor)
    llm.next_token_logprobs_sync([np.int64(1), 2])
    llm.batch_next_token_logprobs_sync([[1, 2], (3,), array, tensor])
    llm.batch_next_token_logprobs_sync(array.reshape(1, 3))
    llm.batch_next_token_logprobs_sync(tensor.reshape(1, 3))
    llm.next_token_logprobs_sync("text")  # type: ignore[arg-type]
    llm.next_token_logprobs_sync([[1, 2]])  # type: ignore[list-item]
    llm.batch_next_token_logprobs_sync([1, 2])  # type: ignore[list-item]


async def knows_what_it_gets(folder: Path) -> None:
    async with genlm.load_model(folder, "hf", output_cache=genlm.OutputCache(10)) as llm:
        assert_type(llm, genlm.AsyncLM)
        assert_type(await llm.next_token_logprobs([1]), torch.Tensor)
        assert_type(await llm.batch_sample([[1]], 3, seed=1), list[list[int]])
        assert_type(llm.byte_vocab[0], genlm.Token)
        assert_type(llm.encode("a text"), list[int])
        assert_type(llm.encode_chat([{"role": "user", "content": "Hello"}]), list[int])
        assert_type(llm.decode(llm.context([1])), str)
        assert_type(llm.with_lora("poet"), genlm.AsyncLM)
        assert_type(llm.statistics(), genlm.Statistics)
        assert_type(llm.statistics().mean_batch_size, float)
        assert_type(llm.statistics() - llm.statistics(), genlm.Statistics)


async def knows_which_scores_it_gets(llm: genlm.AsyncLM) -> None:
    assert_type(await llm.score([1, 2]), torch.Tensor)
    assert_type(await llm.batch_score([[1, 2]], progress=True), list[torch.Tensor])
    assert_type(await llm.batch_token_scores([[1, 2]], [1]), list[genlm.TokenScores])
    assert_type(llm.score_sync([1, 2]), torch.Tensor)
    assert_type(llm.batch_score_sync([[1, 2]]), list[torch.Tensor])
    assert_type(llm.batch_token_scores_sync([[1, 2]]), list[genlm.TokenScores])


async def steers_particles(llm: genlm.AsyncLM, judge: genlm.Population) -> None:
    async def rows(population: genlm.Population) -> torch.Tensor:
        return await population.next_token_logprobs()

    steer(llm, [1], 3, max_tokens=2, bias=rows, potential=lambda population: [0.0])
    steer(llm, [1], 3, max_tokens=2, bias=np.zeros(4), constraint=Automaton.regex("a"))
    steer(llm, [1], 3, max_tokens=2, bias=lambda population: population.lengths)
    async for particles in steer(llm, judge, max_tokens=2, log_weights=torch.zeros(3)):
        assert_type(particles.history[0].is_resampled, bool)
    async with aclosing(steer(llm, [1], 3, max_tokens=2)) as states:
        assert_type(await anext(states), Particles)
    async with aclosing(llm.stream([1], 3)) as tokens:
        assert_type(await anext(tokens), genlm.DrawnToken)
    assert_type(list(steer_sync(llm, [1], 3, max_tokens=2, bias=rows)), list[Particles])
    steer_sync(llm, [1], 3, max_tokens=2, resample=0.3)  # type: ignore[call-arg]
    languages = [Automaton.regex("a"), Automaton.regex("b")]
    async for batch in batch_steer(llm, [[1], [2]], 3, max_tokens=2, constraint=languages):
        assert_type(batch[0], Particles)
        assert_type(batch[1:], list[Particles])
    batch_steer_sync(llm, judge, 3, max_tokens=2, seed=[1, 2], potential=lambda _: [0.0])
    ancestors, log_weights = resampled(torch.zeros(3), 0.5)
    assert_type(log_weights, torch.Tensor)
    judge = judge[ancestors]
    assert_type(resampled([0.0, 1.0], 0.5)[0], npt.NDArray[np.int64])
    assert_type(llm.batch_decode(judge), list[str])
    assert_type(llm.batch_decode([[1], (2, -1)]), list[str])
    assert_type(llm.batch_decode(judge.tokens), list[str])
    assert_type(llm.decode_bytes(llm.context([1])), bytes)
    assert_type(await llm.draw([1], bias=torch.zeros(3)), genlm.DrawnToken)
    assert_type(await judge.sample(judge.lengths), genlm.SampledTokens)


def looks_a_backend_up(vocabulary: genlm.Vocabulary) -> None:
    build = genlm.get_backend("hf")
    assert_type(build, Callable[..., genlm.Engine])
    assert_type(build("demo").vocabulary, genlm.Vocabulary)
    trie = genlm.get_trie("numpy")(vocabulary)
    assert_type(trie, genlm.TokenCharacterTrie)
    assert_type(trie.root, int)
    assert_type(genlm.list_backends("trie"), list[genlm.BackendInfo])
    genlm.list_backends("tries")  # type: ignore[arg-type]
    genlm.lod_model("demo")  # type: ignore[attr-defined]


class Uniform(genlm.BatchEngine):
    """The smallest engine."""

    def __init__(self, model: str) -> None:
        self.vocabulary = genlm.Vocabulary(None, [genlm.Token(0, b"a")], ["a"])

    def evaluate(self, queries: list[genlm.Query]) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(len(queries), 1)


def writes_a_plugin() -> genlm.Engine:
    EngineTarget(model="tiny", build=Uniform, oracle=None)
    genlm.AsyncLM(lambda: Uniform("tiny"))
    genlm.AsyncLM(Uniform)  # type: ignore[arg-type]
    return Uniform("tiny")
