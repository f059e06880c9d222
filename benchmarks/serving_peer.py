"""The loop of particles that genlm-backend 0.3.1 runs on its own serving engines.

`vllm_peer.py` and `sgl_published.py` measure with it. It is the loop of the lists of
`bench_serving_particles.py`, without genlm-core, which their environments lack.
"""

from __future__ import annotations

import abc
import asyncio
import random
import sys
import time
from typing import Any, TextIO

import numpy as np
import torch

__all__ = ["ServingPeer", "answer_requests"]

RESAMPLE_EVERY = 4


def clock() -> np.ndarray[Any, Any]:
    """Seconds of CPU time of this process and of wall-clock time."""
    return np.array([time.process_time(), time.perf_counter()])


class ServingPeer(abc.ABC):
    """One engine of genlm-backend.

    Args:
        lm: The model of genlm-backend.
    """

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._generator = random.Random(0)
        self._torch_generator = torch.Generator().manual_seed(0)

    async def release(self) -> None:  # noqa: B027 - optional for subclasses
        """Free the requests that the engine keeps; by default it keeps none."""

    @abc.abstractmethod
    def generate(self, prompts: list[list[int]], steps: int) -> None:
        """Generate tokens after each prompt with the engine's own sampler at temperature 1."""

    def particles(self, count: int, length: int, steps: int, kind: str) -> Any:
        """Seconds of particles that share a prompt, which is computed before."""
        return asyncio.run(self._particles(count, length, steps, kind))

    def own(self, count: int, length: int, steps: int) -> Any:
        """Seconds of the engine's generation of as many tokens, without the prompt."""
        prompts = self._starts(count, length)
        asyncio.run(self._compute(prompts[0][:-1]))
        begin = clock()
        self.generate(prompts, steps)
        return clock() - begin

    async def _compute(self, token_ids: list[int]) -> None:
        await self.lm.next_token_logprobs(token_ids)
        await self.release()

    async def _particles(self, count: int, length: int, steps: int, kind: str) -> Any:
        contexts = self._starts(count, length)
        await self.release()
        await self.lm.next_token_logprobs(contexts[0][:-1])
        begin = clock()
        for step in range(steps):
            rows = await asyncio.gather(*map(self.lm.next_token_logprobs, contexts))
            probabilities = torch.stack(rows).exp()
            drawn = torch.multinomial(probabilities, 1, generator=self._torch_generator)
            for context, token in zip(contexts, drawn[:, 0].tolist(), strict=True):
                context.append(token)
            if kind == "resampled" and step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
                weights = [self._generator.random() ** 3 for _ in contexts]
                parents = self._generator.choices(range(count), weights, k=count)
                contexts = [list(contexts[parent]) for parent in parents]
        seconds = clock() - begin
        await self.release()
        return seconds

    def _starts(self, count: int, length: int) -> list[list[int]]:
        size = len(self.lm.byte_vocab)
        prompt = [self._generator.randrange(1, size) for _ in range(length)]
        return [[*prompt, token] for token in self._generator.sample(range(size), count)]


def answer_requests(peer: ServingPeer, output: TextIO) -> None:
    """Read `COUNT PROMPT STEPS KIND` per line; print microseconds a token.

    They are CPU time and wall-clock time of particles and of the engine's own generation.
    """
    for line in sys.stdin:
        *sizes, kind = line.split()
        count, length, steps = map(int, sizes)
        seconds = [
            *peer.particles(count, length, steps, kind),
            *peer.own(count, length, steps),
        ]
        print(*(each / count / steps * 1e6 for each in seconds), file=output, flush=True)
