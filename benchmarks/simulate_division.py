"""How evenly is a population divided among replicas? A simulation with the real division.

    python benchmarks/simulate_division.py [--save]

A population of which all members have one prompt is extended by a random token at each step,
and resampled systematically every few steps with weights of a given variance. The time of a
step is that of the replica with most work: a row is 1, a token that it computes again 0.25. The
speed is the number of rows over this time, in multiples of one replica. Contestants: sequences
are moved to other replicas when the excess of rows has reached the cost, or only an eighth of
an equal share, as if tokens cost nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from report import print_report

from genlm.plugin import Generation, TokenSequence
from genlm.smc.resampling import systematic_resampling
from genlm_ray import division
from genlm_ray.division import Division, division_of
from genlm_ray.wire import PlacedGeneration, holder_of

PROMPT, STEPS, SEEDS = 512, 100, 2
TOKEN_COST = division.TOKEN_COST
SIZES = ((2, 200), (2, 1000), (8, 1000), (8, 4000), (32, 10_000))
"""Numbers of replicas and members."""

RESAMPLING = ((1, 0.5), (4, 1.0), (16, 2.0))
"""Steps between resamplings, and the exponent of exponentially distributed weights."""

POLICIES = {"by cost": TOKEN_COST, "without cost": 0.0}
"""Cost of a token for the decision to move sequences."""


class Result(NamedTuple):
    """Multiples of one replica, recomputed tokens per row, and microseconds per step."""

    speed: float
    recomputed: float
    division_us: float


def simulate(replicas: int, size: int, every: int, exponent: float, seed: int) -> Result:
    generator = np.random.default_rng(seed)
    generation = Generation(division.Lineage.of_sequences([TokenSequence.of(range(PROMPT))]))
    places = np.zeros(size, np.int64)
    rows, work, recomputed, seconds = 0, 0.0, 0, 0.0
    for step in range(1, STEPS + 1):
        wanted, began = np.unique(places), time.thread_time()
        divided = division_of(generation, wanted, range(1, replicas + 1), replicas)
        seconds += time.thread_time() - began
        new_tokens = compute(divided, wanted, range(1, replicas + 1))
        generation.keep(divided)
        requested = np.bincount(divided.part_of[wanted], minlength=len(divided.parts))
        again = new_tokens - requested
        if step > 1:  # all compute the prompt, or receive it, once
            rows += len(wanted)
            recomputed += int(again.sum())
            work += float((requested + TOKEN_COST * again).max())
        tokens = generator.integers(0, 500, (size, 1))
        generation, places = generation.extended(places, tokens)
        if step % every == 0:
            log_weights = exponent * np.log(generator.exponential(size=size))
            places = places[systematic_resampling(log_weights, generator.random())]
    return Result(rows / work, recomputed / rows, seconds / STEPS * 1e6)


def compute(divided: Division, wanted: np.ndarray, sessions: range) -> np.ndarray:
    """Return the number of tokens that the replica of each part computes."""
    held = [holder_of(part, sessions) for part in divided.parts]
    unused = iter([session for session in sessions if session not in held])
    new_tokens = []
    for index, (part, session) in enumerate(zip(divided.parts, held, strict=True)):
        places = divided.places[wanted[divided.part_of[wanted] == index]]
        known = np.zeros(len(part.lineage), np.int64)
        for source in part.sources():
            known[source.places] = np.maximum(known[source.places], source.lengths)
        new_tokens.append(len(set(missing_tokens(part, places, known))))
        if part.state is None:
            part.keep(PlacedGeneration(session or next(unused), 0, deque()))
    return np.array(new_tokens)


def missing_tokens(part: Generation, places: np.ndarray, known: np.ndarray) -> Iterator[bytes]:
    """Yield the key of each prefix that is not known, without those of the prompt.

    All sequences have the prompt, which a part computes or receives once.
    """
    for place in places.tolist():
        sequence = part.lineage.sequence(place)
        for length in range(max(PROMPT, int(known[place])) + 1, len(sequence) + 1):
            yield sequence.prefix_key(length)


def main() -> None:
    samples: dict[str, list[float]] = {}
    extra: Counter[str] = Counter()
    for replicas, size in SIZES:
        for every, exponent in RESAMPLING:
            for policy, cost in POLICIES.items():
                division.TOKEN_COST = cost
                name = f"{replicas} replicas, {size} members, every {every}, {policy}"
                results = [
                    simulate(replicas, size, every, exponent, seed) for seed in range(SEEDS)
                ]
                samples[name] = [result.speed for result in results]
                extra[f"{name}: recomputed"] = results[0].recomputed
                extra[f"{name}: us"] = results[0].division_us
    print_report("simulate_division", samples, unit="replicas", extra=dict(extra))


if __name__ == "__main__":
    main()
