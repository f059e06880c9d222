"""How fast are weighted samples of JSON under a schema and a check in Python?

The task of `examples/awrs_json.py`: lists of two or three ascending digits after a prompt, by
adaptive weighted rejection sampling (arXiv 2504.05410), with the packaged demo model. The peer
is genlm-control 0.4.1 on genlm-backend 0.3.1 with the same particles, seeds, steps and check,
in a separate environment (created in `.cache/`). White space is allowed, as in its
`JsonSchema`.

Both run in every round with another seed. A figure is the CPU time of the process in
milliseconds per particle; the ratio is the peer's time by genlm's in the same round, the
median over rounds. The log of the mean of `exp(log_evidence)` over all rounds is printed for
both, which estimate the same number.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from pathlib import Path

import numpy as np
from bench_backend import CLIENTS
from peer import Peer, interpreter
from report import print_report

import genlm
import genlm_hf
from genlm.constraints import Grammar, Python
from genlm.smc import steer_sync

PROMPT, MAX_TOKENS = ">>> sorted(digits)\n", 24
DEMO = Path(genlm_hf.__file__).with_name("demo")
EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "awrs_json.py"))


def run(llm: genlm.AsyncLM, particles: int, seed: int) -> tuple[float, float]:
    """CPU time in seconds and the log-evidence of one run."""
    llm.clear_output_cache()
    begin = time.process_time()
    schema = Grammar.json_schema(EXAMPLE["SCHEMA"])
    language = Python(EXAMPLE["is_ascending"], within=schema)
    *_, found = steer_sync(
        llm,
        llm.encode(PROMPT),
        particles,
        max_tokens=MAX_TOKENS,
        constraint=language,
        seed=seed,
    )
    return time.process_time() - begin, found.log_evidence


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 50])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    python = interpreter("genlm-control-published", "genlm-backend==0.3.1", *CLIENTS)
    samples: dict[str, list[float]] = {}
    logs: dict[str, list[float]] = {}
    with genlm.load_model("demo", "hf") as llm:
        arguments = map(str, (llm.encode(PROMPT), EXAMPLE["SCHEMA"], MAX_TOKENS))
        peer = Peer(python, "awrs_peer.py", DEMO, *arguments)
        for size in options.sizes:
            for seed in range(options.rounds + 1):
                seconds, log_evidence = map(float, peer.ask(f"{size} {seed}").split())
                found = {"peer": (seconds, log_evidence), "genlm": run(llm, size, seed)}
                if seed:  # the first run also makes what is made on first use
                    for name, (seconds, log_evidence) in found.items():
                        case = f"{size} particles, {name}"
                        samples.setdefault(case, []).append(seconds / size * 1e3)
                        logs.setdefault(case, []).append(log_evidence)
    peer.close()
    means = {
        case: round(float(np.logaddexp.reduce(values) - np.log(len(values))), 2)
        for case, values in logs.items()
    }
    print("log of the mean evidence", means)
    ratios = {
        f"{size} particles, genlm": statistics.median(
            theirs / own
            for theirs, own in zip(
                samples[f"{size} particles, peer"],
                samples[f"{size} particles, genlm"],
                strict=True,
            )
        )
        for size in options.sizes
    }
    extra = {"max_tokens": MAX_TOKENS, "log_mean_evidence": means, "clock": "cpu"}
    print_report("awrs", samples, unit="ms a particle", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
