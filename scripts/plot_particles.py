"""Draws the last stored particle benchmark: docs/assets/hf-particles.svg.

Speed against the number of particles, as a fraction of lockstep decoding; of every case
the last result in `benchmarks/results/hf_particles.jsonl` counts.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "hf_particles.jsonl"
PICTURE = ROOT / "docs" / "assets" / "hf-particles.svg"
PROMPTS = (64, 512, 2048)
STYLES = {
    "genlm": ("genlm", "-", "o"),
    "preallocated": ("lockstep, preallocated", ":", "s"),
    "genlm-backend cached": ("genlm-backend 0.3.1, cache_kv", "--", "x"),
}


def ratios() -> dict[str, float]:
    """The last ratio to lockstep of every row stored, of runs with one of torch's threads."""
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {
        row: figures["ratio"]
        for run in runs
        if run["omp_num_threads"] == "1"
        for row, figures in run["rows"].items()
    }


def line_of(found: dict[str, float], prompt: int, contestant: str) -> list[tuple[int, float]]:
    """Particles and speed of one contestant, for the particle numbers that it has."""
    ending = f"/{prompt} {contestant}"
    rows = {row: ratio for row, ratio in found.items() if row.endswith(ending)}
    return sorted((int(row.removesuffix(ending)), ratio) for row, ratio in rows.items())


def main() -> None:
    """Read the results and write the picture."""
    mpl.rcParams |= {"svg.hashsalt": "genlm", "svg.fonttype": "none", "font.size": 9}
    found = ratios()
    figure, plots = plt.subplots(1, len(PROMPTS), figsize=(9, 3.2), sharey=True)
    for plot, prompt in zip(plots, PROMPTS, strict=True):
        for contestant, (label, style, marker) in STYLES.items():
            points = line_of(found, prompt, contestant)
            if points:
                plot.plot(*zip(*points, strict=True), style, marker=marker, label=label)
        plot.axhline(1, color="grey", linewidth=0.8)
        plot.set(xscale="log", yscale="log", title=f"prompt of {prompt} tokens")
        plot.set_xticks([1, 10, 50, 200], ["1", "10", "50", "200"])
        plot.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
        plot.minorticks_off()
        plot.set_xlabel("particles")
    plots[0].set_ylabel("times the speed of lockstep")
    plots[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
