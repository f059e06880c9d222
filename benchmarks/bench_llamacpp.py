"""How fast is `genlm-llamacpp` with particles, compared with llama.cpp's loops?

A population of particles shares a prompt and grows by one random token per step; if
`resampled`, every fourth step continues copies of some; with `--tails`, also with particles
that start with so many different tokens. Contestants, all in every round:

- batched: llama.cpp's C interface alone, as in `llama-batched-bench`: the prompt
  once, copied to N sequences (`llama_memory_seq_cp`), then one `llama_decode` of N tokens a
  step, and rows by log_softmax;
- genlm: N coroutines that await `next_token_logprobs`, including the front end; the engine
  decides whether sequences share a cache;
- genlm shared: the same with `kv_unified=True`;
- genlm divided: the same with `kv_unified=False`, in 256 parts of 256 cells;
- llama-cpp-python: its `Llama.eval` and `Llama.scores`, one sequence at a time in
  one context, cut back to the common prefix. In a separate environment (`--peer`);
  beside it the same calls of the C interface (`one sequence`).

The limit is `batched`: the rest is the front end. Only decoding is timed. Ratios are
the time of `batched` by the contestant's in the same round, their median over rounds. Model: a
Llama of 8 layers x 512, vocabulary 8,000, random weights, float32 GGUF.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from bench_hf_particles import RESAMPLE_EVERY, genlm
from particle_model import VOCAB_SIZE, save_model
from particle_population import CLOCKS, Clock, Population, population_arguments
from peer import Peer
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache
from genlm_llamacpp.checkpoint import write_model
from genlm_llamacpp.engine import LlamaCppEngine
from genlm_llamacpp.library import Batch, llama

STEPS = 12
FEW_STEPS = 2  # for one sequence at a time
CELLS = 16_384
SEQUENCES = 256


class Loop:
    """A context of llama.cpp and batches of one token for each of several sequences."""

    def __init__(self, file: Path, sequences: int, cells: int) -> None:
        self.llama = llama()
        self.model = self.llama.llama_model_load_from_file(
            bytes(file), self.llama.llama_model_default_params()
        )
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = cells, 2048, sequences
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.flash_attn_type, params.type_k, params.type_v = 0, 0, 0
        params.kv_unified = True
        self.context = self.llama.llama_init_from_model(self.model, params)
        self.memory = self.llama.llama_get_memory(self.context)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
    ) -> torch.Tensor:
        """Compute tokens, and return rows after all of them."""
        count = len(tokens)
        numbers = np.array(sequences, np.int32)
        arrays = (
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.ones(count, np.int32),
            (numbers.ctypes.data + 4 * np.arange(count)).astype(np.uintp),
            np.ones(count, np.int8),
        )
        token, pos, n_seq_id, seq_id, logits = (array.ctypes.data for array in arrays)
        batch = Batch(count, token, None, pos, n_seq_id, seq_id, logits)
        assert self.llama.llama_decode(self.context, batch) == 0
        address = self.llama.llama_get_logits(self.context)
        found = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return torch.from_numpy(np.ctypeslib.as_array(found, (count, VOCAB_SIZE))).log_softmax(
            -1
        )

    def start(self, prompt: Sequence[int]) -> None:
        """Compute the prompt in sequence 0."""
        self.llama.llama_memory_clear(self.memory, False)
        self.decode(prompt, range(len(prompt)), [0] * len(prompt))


def batched(loop: Loop, population: Population, clock: Clock) -> float:
    """Milliseconds a step of one batch over all sequences, the start computed before."""
    particles = population.start()
    loop.start(population.prompt)
    copy, cut = loop.llama.llama_memory_seq_cp, loop.llama.llama_memory_seq_rm
    members = list(range(population.count))
    length = population.prompt_length
    for member in members[1:]:
        copy(loop.memory, 0, member, -1, -1)
    for tail in range(population.tail_length):
        ids = [context[length + tail] for context in particles.contexts]
        loop.decode(ids, [length + tail] * len(ids), members)
    length += population.tail_length
    # Two halves of the sequences take turns, as copies must not overwrite what is copied.
    spare = list(range(population.count, 2 * population.count))
    seconds = 0.0
    for step in range(population.steps):
        particles.grow()
        ids = [context[-1] for context in particles.contexts]
        start = clock()
        loop.decode(ids, [length] * len(ids), members)
        length += 1
        particles.resample(step)
        if particles.parents is not None:
            for target, parent in zip(spare, particles.parents, strict=True):
                copy(loop.memory, members[parent], target, -1, -1)
            for member in members:
                cut(loop.memory, member, -1, -1)
            members, spare = spare, members
        seconds += clock() - start
    return seconds / population.steps * 1e3


def one_sequence(loop: Loop, population: Population, clock: Clock) -> float:
    """Milliseconds a step of one sequence at a time, cut back to the common prefix."""
    particles = population.start()
    loop.start(population.prompt)
    held = list(population.prompt)
    seconds = 0.0
    for step in range(FEW_STEPS):
        particles.grow()
        start = clock()
        for context in particles.contexts:
            pairs = zip(held, context, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(held))
            same = min(same, len(context) - 1)
            loop.llama.llama_memory_seq_rm(loop.memory, 0, same, -1)
            rest = context[same:]
            loop.decode(rest, range(same, len(context)), [0] * len(rest))
            held = list(context)
        particles.resample(step)
        seconds += clock() - start
    return seconds / FEW_STEPS * 1e3


def populations(options: argparse.Namespace) -> Iterator[Population]:
    for count in options.particles:
        for prompt in options.prompts:
            yield Population(count, prompt, 0, 0, STEPS)
            if 2 * count <= SEQUENCES:
                yield Population(count, prompt, 0, RESAMPLE_EVERY, STEPS)
            for tail in options.tails:
                yield Population(count, prompt, tail, 0, STEPS)


def measure(
    file: Path, options: argparse.Namespace, peer: Peer | None, clock: Clock
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step of every contestant, by case."""
    samples: dict[str, dict[str, list[float]]] = {}
    loop = Loop(file, SEQUENCES, CELLS)

    def model(*, kv_unified: bool | None) -> AsyncLM:
        def build() -> LlamaCppEngine:
            return LlamaCppEngine(
                file,
                n_ctx=SEQUENCES * 256 if kv_unified is False else CELLS,
                n_seq_max=SEQUENCES,
                kv_unified=kv_unified,
            )

        return AsyncLM(build, output_cache=OutputCache(0))

    with (
        model(kv_unified=None) as chosen,
        model(kv_unified=True) as shared,
        model(kv_unified=False) as divided,
    ):
        for case in populations(options):
            contestants: dict[str, Callable[[], float]] = {
                "batched": functools.partial(batched, loop, case, clock),
                "genlm": functools.partial(genlm, chosen, case, clock),
                "genlm shared": functools.partial(genlm, shared, case, clock),
            }
            if case.prompt_length + case.tail_length + STEPS < 256:
                contestants["genlm divided"] = functools.partial(genlm, divided, case, clock)
            if not case.tail_length:
                contestants["one sequence"] = functools.partial(one_sequence, loop, case, clock)
                if peer is not None:
                    few = dataclasses.replace(case, steps=FEW_STEPS)
                    line = " ".join(str(int(each)) for each in dataclasses.astuple(few))
                    contestants["llama-cpp-python"] = functools.partial(peer.measure, line)
            samples[str(case)] = in_turn(contestants, options.rounds, str(case))
    return samples


def main() -> None:
    parser = population_arguments(
        __doc__,
        particles=[10, 50, 200],
        prompts=[64],
        tails=[128],
        peer="llama-cpp-python 0.3.36",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_model(folder, VOCAB_SIZE)
        file = folder / "model.gguf"
        write_model(folder, file)
        peer = None
        if options.peer is not None:
            peer = Peer(options.peer, "llamacpp_peer.py", file, options.clock)
        samples = measure(file, options, peer, CLOCKS[options.clock])
        if peer is not None:
            peer.close()
    print_cases(
        "llamacpp", samples, base="batched", unit="ms a step", extra={"clock": options.clock}
    )


if __name__ == "__main__":
    main()
