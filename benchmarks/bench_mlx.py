"""How fast is `genlm-mlx` with particles, compared with mlx-lm and genlm-backend?

A population of particles shares a prompt and grows by one token per step; if `resampled`, every
fourth step continues copies of some; if `uneven`, only a random half takes each step; with
`--tails`, also with particles that start with so many different tokens. Contestants, all in
every round:

- lockstep: mlx-lm's model over one batch of its cache, `[N, 1]` at a time, without a front end;
- genlm: N coroutines that await `next_token_logprobs`, including the front end;
- genlm-backend: the same on 0.3.1's `AsyncMlxLM`, in a separate environment.

Only decoding is timed. Ratios are genlm-backend's time (with `--no-peer`, lockstep's) by the
contestant's in the same round, their median over rounds. `peak_mib` is the peak memory of MLX's
arrays beyond the weights, the prompt's pass included. Model: a Llama of 8 layers x 512,
vocabulary 8,000, random weights, float32, on MLX's default device, which the results name as
`device`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm
from bench_hf_particles import RESAMPLE_EVERY, genlm
from mlx_lockstep import lockstep
from particle_model import VOCAB_SIZE, save_model
from particle_population import CLOCKS, Clock, Population, population_arguments
from peer import Peer, interpreter
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache
from genlm_mlx.engine import MLXEngine

STEPS = 12


def populations(options: argparse.Namespace) -> Iterator[Population]:
    for count in options.particles:
        for prompt in options.prompts:
            yield Population(count, prompt, 0, 0, STEPS)
            yield Population(count, prompt, 0, RESAMPLE_EVERY, STEPS)
            for tail in options.tails:
                yield Population(count, prompt, tail, 0, STEPS)
            if count > 1:
                yield Population(count, prompt, 0, 0, STEPS, uneven=True)


def peer_python() -> Path:
    """An interpreter with genlm-backend 0.3.1 and mlx-lm."""
    needed = ("numpy<2.5", "numba", "accelerate", "mlx[cpu]", "mlx-lm==0.31.3")
    return interpreter("genlm-backend-0.3.1-mlx", *needed, alone=["genlm-backend==0.3.1"])


def measure(
    folder: Path, options: argparse.Namespace, peer: Peer | None, clock: Clock
) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
    """Milliseconds a step and peak memory of every contestant, by case."""
    model, _ = mlx_lm.load(str(folder))
    samples: dict[str, dict[str, list[float]]] = {}
    peaks: dict[str, int] = {}

    def with_peak(name: str, run: Callable[[], float]) -> float:
        mx.reset_peak_memory()
        result = run()
        peaks[name] = (mx.get_peak_memory() - weights) >> 20
        return result

    with AsyncLM(lambda: MLXEngine(folder), output_cache=OutputCache(0)) as lm:
        weights = mx.get_active_memory()
        for case in populations(options):
            contestants: dict[str, Callable[[], float]] = {
                "genlm": functools.partial(genlm, lm, case, clock)
            }
            if not case.uneven:
                contestants["lockstep"] = functools.partial(lockstep, model, case, clock)
            contestants = {
                name: functools.partial(with_peak, f"{case} {name}", run)
                for name, run in contestants.items()
            }
            if peer is not None:
                line = " ".join(str(int(value)) for value in dataclasses.astuple(case))
                contestants["genlm-backend"] = functools.partial(peer.measure, line)
            samples[str(case)] = in_turn(contestants, options.rounds, str(case))
    return samples, peaks


def main() -> None:
    parser = population_arguments(
        __doc__, particles=[1, 10, 50], prompts=[64, 512], peer="genlm-backend 0.3.1, mlx-lm"
    )
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_model(folder, VOCAB_SIZE)
        peer = None
        if not options.no_peer:
            python = options.peer or peer_python()
            peer = Peer(python, "mlx_peer.py", folder, options.clock)
        samples, peaks = measure(folder, options, peer, CLOCKS[options.clock])
        if peer is not None:
            peer.close()
    print_cases(
        "mlx",
        samples,
        base="lockstep" if options.no_peer else "genlm-backend",
        unit="ms a step",
        extra={
            "clock": options.clock,
            "device": str(mx.default_device()),
            "peak_mib": peaks,
        },
    )


if __name__ == "__main__":
    main()
