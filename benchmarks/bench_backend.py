"""How much faster does a genlm-control program get by replacing genlm-backend?

Sequential Monte Carlo of `genlm-control` with a `PromptedLLM`, unchanged, on the published
genlm-backend 0.3.1 and on this project's, each in a separate environment (created in `.cache/`,
or `--published PYTHON --ours PYTHON`) with equal versions of everything else. Both run
alternately within each round. Two token samplers: `direct` draws from the model's row, `eager`
walks the token trie under a constraint. `as-is` uses default options; `tuned` follows the
published documentation: batches of all particles, and the prompt in the cache. A figure is the
time of a step of all particles in milliseconds, including front end and sampler; a ratio is the
published package's time by this project's, the median over rounds.

The published package recomputes contexts at every step, `tuned` all tokens after the prompt,
and waits 20 ms for a batch that is not full. The limit is the forward pass of one new token for
each particle and the work of genlm-control.

Model: a Llama of 8 layers x 512, vocabulary 8,000, random weights, float32.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from peer import Peer, interpreter
from report import print_report

REPOSITORY = Path(__file__).resolve().parent.parent
CLIENTS = ["genlm-control==0.4.1", "genlm-bytes==0.2.0", "genlm-grammar==0.2.0"]
OURS = ["core", "plugins/genlm-hf", "plugins/genlm-backend"]

CASES = [
    "direct 20 64 6 as-is",
    "direct 20 64 6 tuned",
    "direct 50 64 6 tuned",
    "direct 20 256 6 tuned",
    "eager 20 64 6 as-is",
    "eager 20 64 6 tuned",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, help="a Python with genlm-backend 0.3.1")
    parser.add_argument("--ours", type=Path, help="a Python with this project's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CASE")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    editable = [word for path in OURS for word in ("-e", str(REPOSITORY / path))]
    pythons = {
        "0.3.1": options.published
        or interpreter("genlm-control-published", "genlm-backend==0.3.1", *CLIENTS),
        "ours": options.ours or interpreter("genlm-control-ours", *editable, *CLIENTS),
    }
    peers = {name: Peer(python, "control_program.py") for name, python in pythons.items()}
    samples: dict[str, list[float]] = {}
    for peer in peers.values():
        peer.measure("direct 2 8 2 as-is")  # warm
    for round_ in range(options.rounds):
        for case in options.cases:
            order = list(peers) if round_ % 2 else list(reversed(peers))
            for name in order:
                samples.setdefault(f"{case}, {name}", []).append(peers[name].measure(case))
    for peer in peers.values():
        peer.close()
    ratios = {
        f"{case}, ours": statistics.median(
            theirs / own
            for theirs, own in zip(samples[f"{case}, 0.3.1"], samples[f"{case}, ours"])
        )
        for case in options.cases
    }
    rows = {
        f"{case}, {name}": samples[f"{case}, {name}"]
        for case in options.cases
        for name in peers
    }
    print_report("backend", rows, unit="ms a step", ratios=ratios)


if __name__ == "__main__":
    main()
