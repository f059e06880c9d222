"""How long does a population take per member and step, without the model?

The engine returns constant logits for every group. A step extends, draws and, every fourth
time, resamples: array operations of the caller, one request through the scheduler, and the
draw. Contestants are the same loop with contexts and `batch_draw`, and the limit: the same
draws by `torch` on arrays, without a library.

The second part draws 1,000 tokens over 128,000 ids under one mask. The physical limit is the
number of times that the processor reads and writes 512 MB; a plain torch loop takes the
log-softmax of a row, masks it, sums it up and inverts it. The peak of memory above the logits
is the growth of the largest resident set of a new process.

Each figure is the median over rounds, each of which runs all contestants.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Coroutine

import numpy as np
import numpy.typing as npt
import torch
from report import print_report

from genlm import AsyncLM, BatchEngine, OutputCache, Population, Token, Vocabulary
from genlm.plugin import GroupQuery, GroupValues, Query
from genlm.smc import systematic_resampling

PROMPT = (1, 2, 3)
STEPS = 12
RESAMPLE_EVERY = 4
ROUNDS = {1_000: 9, 10_000: 5}
VOCAB_SIZE = 64
LARGE_VOCAB_SIZE = 128_000
LARGE_MEMBERS = 1_000
LARGE_ROUNDS = 5
SEED = 0


class NoOpEngine(BatchEngine):
    """Has the logits of any sequence at hand: row i of a table for sequence i of a group.

    Args:
        logits: Shape `(sequences, vocab_size)`.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        tokens = [Token(i, b"%d" % i) for i in range(logits.shape[1])]
        self.vocabulary = Vocabulary(None, tokens, [str(i) for i in range(len(tokens))])

    def evaluate(self, queries: list[Query]) -> torch.Tensor:
        return torch.log_softmax(self._logits[: len(queries)], -1)

    def evaluate_groups(
        self, parts: list[tuple[GroupQuery, npt.NDArray[np.int64]]]
    ) -> GroupValues:
        [(_, places)] = parts
        return GroupValues(self._logits[places[0] : places[-1] + 1], are_logits=True)


def model(members: int, vocab_size: int) -> tuple[AsyncLM, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(members, vocab_size, generator=generator)
    return AsyncLM(lambda: NoOpEngine(logits), output_cache=OutputCache(0)), logits


# -- steps of many members ----------------------------------------------------------------


async def by_population(llm: AsyncLM, members: int) -> None:
    rng = np.random.default_rng(SEED)
    population = llm.population(PROMPT, members)
    log_weights = np.zeros(members)
    for step in range(STEPS):
        drawn = await population.draw(seed=SEED)
        log_weights += drawn.log_mass.numpy()
        population = population.extend(drawn.token_ids)
        if step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
            population = population[systematic_resampling(log_weights, rng.random())]


async def by_contexts(llm: AsyncLM, members: int) -> None:
    rng = np.random.default_rng(SEED)
    contexts = [llm.context(PROMPT)] * members
    log_weights = np.zeros(members)
    for step in range(STEPS):
        drawn = await llm.batch_draw(contexts, seed=SEED + step)
        log_weights += [each.log_mass for each in drawn]
        contexts = [
            context.extend(each.token_id) for context, each in zip(contexts, drawn, strict=True)
        ]
        if step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
            chosen = systematic_resampling(log_weights, rng.random())
            contexts = [contexts[ancestor] for ancestor in chosen.tolist()]


async def by_torch(logits: torch.Tensor) -> None:
    rng = np.random.default_rng(SEED)
    tokens = torch.empty(len(logits), 0, dtype=torch.long)
    for step in range(STEPS):
        probabilities = torch.softmax(logits, -1)
        drawn, _ = inverted(probabilities, torch.from_numpy(rng.random(len(logits))).float())
        tokens = torch.cat([tokens, drawn[:, None]], 1)
        if step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
            tokens = tokens[systematic_resampling(np.zeros(len(tokens)), rng.random())]


def inverted(
    weights: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that numbers draw from weights, and the sums of the weights."""
    cumulative = weights.cumsum(-1)
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return places.clamp_(max=weights.shape[1] - 1), cumulative[:, -1]


def microseconds(run: Callable[[], Coroutine[None, None, None]], members: int) -> float:
    start = time.perf_counter()
    asyncio.run(run())
    return (time.perf_counter() - start) / (members * STEPS) * 1e6


def measure_steps() -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for members, rounds in ROUNDS.items():
        llm, logits = model(members, VOCAB_SIZE)
        contestants = {
            "torch on arrays": lambda: by_torch(logits),  # noqa: B023 - called here
            "population": lambda: by_population(llm, members),  # noqa: B023
            "contexts and batch_draw": lambda: by_contexts(llm, members),  # noqa: B023
        }
        for _ in range(rounds):
            for name, run in contestants.items():
                found = microseconds(run, members)
                samples.setdefault(f"{name}, {members:,} members", []).append(found)
        llm.close()
    return samples


# -- draws over a large vocabulary --------------------------------------------------------


def large_population(llm: AsyncLM) -> Population:
    """A population of distinct sequences."""
    return llm.population([[i] for i in range(LARGE_MEMBERS)])


def large_mask() -> npt.NDArray[np.bool_]:
    return np.random.default_rng(SEED).random(LARGE_VOCAB_SIZE) < 0.5


def drawn_by_loop(
    logits: torch.Tensor, mask: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, log_mass = [], []
    for row, uniform in zip(logits, uniforms, strict=True):
        weights = torch.log_softmax(row, -1).exp_().mul_(mask)
        token, total = inverted(weights[None], uniform[None])
        tokens.append(token)
        log_mass.append(total.log())
    return torch.cat(tokens), torch.cat(log_mass)


def measure_large_draws() -> dict[str, list[float]]:
    llm, logits = model(LARGE_MEMBERS, LARGE_VOCAB_SIZE)
    population, mask = large_population(llm), large_mask()
    as_floats = torch.from_numpy(mask).float()
    uniforms = torch.rand(LARGE_MEMBERS, generator=torch.Generator().manual_seed(SEED))
    samples: dict[str, list[float]] = {}
    contestants: dict[str, Callable[[], object]] = {
        "plain torch loop": lambda: drawn_by_loop(logits, as_floats, uniforms),
        "population": lambda: population.draw_sync(mask, seed=SEED),
    }
    for _ in range(LARGE_ROUNDS):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            found = (time.perf_counter() - start) / LARGE_MEMBERS * 1e6
            samples.setdefault(f"{name}, {LARGE_VOCAB_SIZE:,} ids", []).append(found)
    llm.close()
    return samples


def peak_bytes_above_the_logits() -> int:
    """Growth of the largest resident set of this process, which must be new."""
    llm, _ = model(LARGE_MEMBERS, LARGE_VOCAB_SIZE)
    population, mask = large_population(llm), large_mask()
    population[:1].draw_sync(mask, seed=SEED)  # loads code
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    population.draw_sync(mask, seed=SEED)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm.close()
    return 1024 * (after - before)


def main() -> None:
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as process:
        peak = process.submit(peak_bytes_above_the_logits).result()
    samples = measure_steps() | measure_large_draws()
    floors = {
        name.rsplit(", ", 1)[1]: statistics.median(values)
        for name, values in samples.items()
        if name.startswith(("torch on arrays", "plain torch loop"))
    }
    print(f"peak above the logits of {LARGE_MEMBERS:,} draws: {peak / 2**20:.0f} MiB")
    print_report(
        "population_front_end",
        samples,
        unit="us a member and step",
        ratios={
            name: statistics.median(values) / floors[name.rsplit(", ", 1)[1]]
            for name, values in samples.items()
        },
        extra={"seed": SEED, "steps": STEPS, "peak_bytes_above_logits": peak},
    )


if __name__ == "__main__":
    main()
