"""Draws the stored results of benchmarks: the SVG files of docs/figures.md.

Also draws the genealogy of the particles of `examples/awrs_json.py`, by `History.plot`.
Every picture has its numbers as JSON in its metadata, so that a test can
compare them with `benchmarks/results/` with any version of matplotlib. The background is
transparent and the text grey, so that it is readable on light and dark pages.
"""

from __future__ import annotations

import html
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import genlm
from genlm.smc import History

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "assets"
GENEALOGY = "genealogy"
GREY = "#808080"
COLOURS = "#3b82c4", "#d97706", "#2f9e6e", "#b0569c"
STYLE = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "genlm",  # equal ids in every run
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}
Plot = dict[str, dict[str, dict[str, float]]]
"""What a picture shows: panel, then line or kind of bar, then position and value."""


def runs(name: str) -> list[dict[str, Any]]:
    """All stored runs of a benchmark, the oldest first."""
    text = (RESULTS / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def hf_particles() -> Plot:
    """Speed against the number of particles, of runs with one of torch's threads."""
    found = {
        row: figures["ratio"]
        for run in runs("hf_particles")
        if run["omp_num_threads"] == "1"
        for row, figures in run["rows"].items()
    }
    shown = {
        "genlm": "genlm",
        "preallocated": "lockstep, preallocated",
        "genlm-backend cached": "genlm-backend 0.3.1, cache_kv",
    }
    plot: Plot = {}
    for prompt in (64, 512, 2048):
        panel = plot[f"prompt of {prompt} tokens"] = {}
        for contestant, label in shown.items():
            points = {n: found.get(f"{n}/{prompt} {contestant}") for n in (1, 10, 50, 200)}
            line = {str(n): ratio for n, ratio in points.items() if ratio is not None}
            if line:
                panel[label] = line
    return plot


def serving_particles() -> Plot:
    """Speed of particles as a fraction of the engine's own generation, by the newest runs."""
    plot: Plot = {}
    for run in runs("serving_particles"):
        if run.get("model") == "tiny" or run.get("second_runner"):
            continue
        panel = plot.setdefault({"vllm": "vLLM", "sgl": "SGLang"}[run["engine"]], {})
        for contestant in ("population", "contexts", "blocks"):
            points = panel.setdefault(contestant, {})
            for case in ("10/64", "50/64", "200/64", "500/64"):
                row = run["rows"].get(f"{case} plain {contestant}")
                if row is not None:  # a run may leave contestants out
                    points[case] = row["ratio"]
    return plot


def programs() -> Plot:
    """Speed of programs and populations against their peers, by the newest runs."""
    rows = {key: row for run in runs("programs") for key, row in run["rows"].items()}
    members = {key: row for run in runs("populations") for key, row in run["rows"].items()}
    shown = {
        "10 beams": rows["beams 10/16 program"],
        "100 beams": rows["beams 100/16 program"],
        "1,000 beams": rows["beams 1000/8 program"],
        "Power-SMC": rows["power 32/64 program"],
        "rewarded\nblocks": rows["reward 32/4x16 program"],
        "200\nparticles": members["200/64 over 24 population"],
    }
    found = {name: row["ratio"] for name, row in shown.items()}
    return {"programs and their peers": {"genlm": found}}


def other_programs() -> Plot:
    """Speed of the programs that are not in `programs` against their peers."""
    rows = {key: row for run in runs("programs") for key, row in run["rows"].items()}
    documents = runs("awrs")[-1]["rows"]
    shown = {
        "twisted\nSMC": rows["twisted 32/32 program"],
        "importance\ndraws": rows["importance 32/32 program"],
        "ensemble": rows["ensemble 4/8 program"],
        "distillation": rows["distil 1024 program"],
        "JSON, 20\nparticles": documents["20 particles, genlm"],
        "JSON, 50\nparticles": documents["50 particles, genlm"],
    }
    found = {name: row["ratio"] for name, row in shown.items()}
    return {"other programs and their peers": {"genlm": found}}


def long_contexts() -> Plot:
    """CPU time of a request against the length of its context."""
    rows = runs("long_contexts")[-1]["rows"]
    lengths = (16, 128, 512, 2048, 8192)
    return {
        "a no-op engine": {
            kind: {str(n): round(rows[f"{kind} of {n}"]["median"], 1) for n in lengths}
            for kind in ("contexts", "lists")
        }
    }


def vllm_rows() -> Plot:
    """CPU time of rows from vLLM, as a multiple of generating one token."""
    rows = runs("vllm")[-1]["rows"]
    shown = {"genlm": "genlm", "logprobs=-1 flat": "logprobs=-1 of vLLM"}
    cases = {"fresh": "new prompt", "grown": "one token more"}
    return {
        f"vocabulary of {size:,}": {
            label: {
                case: rows[f"{size} {word} {name}"]["ratio"] for word, case in cases.items()
            }
            for name, label in shown.items()
        }
        for size in (8000, 128000)
    }


FIGURES: dict[str, tuple[Callable[[], Plot], str, str, str]] = {
    "hf-particles": (hf_particles, "lines", "particles", "times the speed of lockstep"),
    "serving-particles": (
        serving_particles,
        "bars",
        "particles / tokens of the prompt",
        "fraction of own generation",
    ),
    "programs": (programs, "bars", "", "times the speed of the peer"),
    "other-programs": (other_programs, "bars", "", "times the speed of the peer"),
    "long-contexts": (long_contexts, "lines", "tokens of the context", "us of CPU a request"),
    "vllm-rows": (vllm_rows, "bars", "", "times one generated token"),
}
"""File name: what it shows, how, and the labels of its axes."""


def shown_in(picture: Path) -> Plot:
    """Read the numbers that a picture shows from its metadata."""
    text = picture.read_text("utf-8")
    [found] = re.findall(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    plot: Plot = json.loads(html.unescape(found))
    return plot


def draw(name: str, plot: Plot) -> None:
    """Write one picture."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    _, kind, below, beside = FIGURES[name]
    with mpl.rc_context(STYLE):
        size = (6.5 if name.endswith("programs") else max(4.5, 3 * len(plot)), 3.2)
        figure, axes = plt.subplots(1, len(plot), figsize=size, squeeze=False)
        for axis, (title, lines) in zip(axes[0], plot.items(), strict=True):
            for at, (label, points) in enumerate(lines.items()):
                if kind == "lines":
                    places = [float(x) for x in points]
                    options = {"color": COLOURS[at], "marker": "osx^"[at], "label": label}
                    axis.plot(places, [*points.values()], **options)
                else:
                    width = 0.8 / len(lines)
                    places = [
                        x + (at - (len(lines) - 1) / 2) * width for x in range(len(points))
                    ]
                    axis.bar(places, [*points.values()], width, color=COLOURS[at], label=label)
            labels = [*next(iter(lines.values()))]
            if kind == "lines":
                axis.set_xscale("log")
                axis.set_xticks([float(x) for x in labels], labels)
                axis.minorticks_off()
            else:
                axis.set_xticks(range(len(labels)), labels)
            if name == "hf-particles":
                axis.set_yscale("log")
                axis.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
                axis.set_ylim(0.05, 25)
                axis.minorticks_off()
            else:
                axis.set_ylim(bottom=0)
            if name != "long-contexts":
                axis.axhline(1, color=GREY, linewidth=0.8)
            axis.set(title=title, xlabel=below)
        axes[0][0].set_ylabel(beside)
        figure.legend(
            *axes[0][0].get_legend_handles_labels(), loc="upper center", ncol=3, fontsize=8
        )
        figure.tight_layout(rect=(0, 0, 1, 0.92))
        _save(figure, name, plot)
        plt.close(figure)


def _save(figure: Any, name: str, plot: Plot) -> None:
    target = PICTURES / f"{name}.svg"
    metadata = {"Date": None, "Description": json.dumps(plot)}
    figure.savefig(target, transparent=True, metadata=metadata, bbox_inches="tight")
    lines = [line.rstrip() for line in target.read_text("utf-8").splitlines()]
    target.write_text("\n".join(lines) + "\n", "utf-8")


def json_particles() -> History:
    """Run `examples/awrs_json.py` with 16 particles of the demo model."""
    example = runpy.run_path(str(ROOT / "examples" / "awrs_json.py"))
    with genlm.load_model("demo", "hf") as llm:
        particles = example["ascending_lists"](llm, ">>> sorted(digits)\n", 16)
    history: History = particles.history
    return history


def draw_genealogy(history: History) -> None:
    """Write the genealogy of particles, with the effective sample sizes as metadata."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        sizes = {
            str(number): round(step.effective_sample_size, 2)
            for number, step in enumerate(history, 1)
        }
        _save(history.plot(), GENEALOGY, {"effective sample size": {"awrs_json.py": sizes}})


def main() -> None:
    """Read the results and write the pictures."""
    draw_genealogy(json_particles())
    for name, (numbers, *_) in FIGURES.items():
        draw(name, numbers())


if __name__ == "__main__":
    main()
