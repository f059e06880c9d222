"""`sglang.Engine` with the log-probabilities of all ids; run by `bench_sgl.py`.

Its processes import this file again, so the stubs for CUDA's packages are installed at the
top and remain. Prints one JSON line: milliseconds of wall-clock time by kind of prompts.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import time

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

from genlm_sgl.cpu import stubs

STAND_INS = stubs.stub_packages()
STAND_INS.__enter__()
atexit.register(STAND_INS.__exit__, None, None, None)

LENGTH = 64


def main() -> None:
    folder, vocab_size, count, rounds = sys.argv[1], *map(int, sys.argv[2:])
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        max_total_tokens=16_384,
        max_running_requests=64,
        skip_server_warmup=True,
        log_level="error",
    )
    generator = random.Random(5)
    everything = list(range(vocab_size))

    def ask(prompts: list[list[int]]) -> float:
        start = time.perf_counter()
        answers = engine.generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            return_logprob=True,
            token_ids_logprob=[everything] * len(prompts),
        )
        spent = 1e3 * (time.perf_counter() - start)
        for answer in answers:
            [row] = answer["meta_info"]["output_token_ids_logprobs"]
            assert len(row) == vocab_size
        return spent

    found: dict[str, list[float]] = {"fresh": [], "grown": []}
    for turn in range(rounds + 1):
        prompts = [
            [generator.randrange(vocab_size) for _ in range(LENGTH)] for _ in range(count)
        ]
        grown = [[*prompt, generator.randrange(vocab_size)] for prompt in prompts]
        engine.flush_cache()
        times = {"fresh": ask(prompts), "grown": ask(grown)}
        if turn:
            for kind, spent in times.items():
                found[kind].append(spent)
    engine.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
