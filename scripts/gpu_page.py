"""Writes docs/gpu.md from the results of `scripts/gpu.py`: hardware, versions, tables, a plot.

    python scripts/gpu_page.py            from benchmarks/results/gpu.json
    python scripts/gpu_page.py FILE       from another file, such as one brought from elsewhere

Lines without a figure, and all lines without a file, say "not measured on a GPU".
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GOALS", "PAGE", "STEPS", "Goal", "page", "write"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
VLLM_RESULTS = RESULTS.with_name("vllm_gpu.json")
PAGE = ROOT / "docs" / "gpu.md"
UNMEASURED = "not measured on a GPU"

STEPS = {
    "tests-trie": "tests of genlm-trie-cuda that need a GPU: kernels against the core and "
    "float64, graphs, streams, no waiting",
    "tests-hf": "tests of genlm-hf that need a GPU: rows, forks, cancellations, adapters, "
    "eviction, `device_map`, bitsandbytes",
    "tests-core": "tests of the core and the documents that need a GPU",
    "tests-vllm": "tests of genlm-vllm that need a GPU, where vLLM is installed: both model "
    "runners, CUDA graphs, adapters, a worker process",
    "check-cuda": "`genlm check cuda` on the device",
    "check-hf": "`genlm check hf` on the device",
    "check-vllm": "`genlm check vllm` on the device, where vLLM is installed",
    "check-sgl": "`genlm check sgl` on the device, where SGLang is installed",
}
"""Description of each step that is not a benchmark."""

_HEAD = """# On a GPU

<!-- Written by scripts/gpu_page.py from benchmarks/results/gpu.json. -->

{state}

```bash
make gpu                      # with the Python that has torch: make gpu PYTHON=python3
python scripts/gpu.py         # the same, without make
```

The program runs from a clone with the installed torch, Triton and transformers. It installs no
packages and needs no network and no `PYTHONPATH`. It runs the tests that need a GPU and the
conformance suite concurrently, and then one benchmark after the other, each in a separate
process with a time limit; the whole run takes at most ten minutes. Results are written to
`benchmarks/results/gpu.json` after each step, and this page at the end. After an interruption,
run it again to continue. `--fresh` repeats all steps, and names of steps (`python
scripts/gpu.py trie outside`) repeat these. Failures, time-outs and missing packages of steps
are reported. `--device cpu --tiny` runs every step on a machine without a GPU.

It needs Python 3.11 to 3.13, torch from 2.7, transformers from 5.17, pytest, pytest-timeout,
hypothesis, pluggy, cachetools, typer, rich, tqdm, peft, accelerate, opentelemetry-sdk,
outlines-core and xgrammar. For a machine without a network, copy wheels of missing packages,
and of genlm-backend 0.3.1 for the comparison with it, to `.cache/gpu-wheels/` or the folder of
`--wheels`; they are unpacked, not installed:

```bash
pip download --no-deps -d .cache/gpu-wheels cachetools genlm-backend==0.3.1 \\
    opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions outlines-core \\
    xgrammar apache-tvm-ffi pydantic pydantic-core typing-inspection annotated-types
python benchmarks/trie_vocabulary.py     # .cache/trie_vocabulary_128000.npz; a minute, once
```

`--out` and `--page` set the paths of the results and of this page; `python scripts/gpu_page.py
FILE` writes this page from other results. With `PYTHONPATH=$(python scripts/source_tree.py)`,
any other program can import genlm from the clone and find its plugins.
"""


_SPEED = """
## Speed

50/64 are 50 particles, or members of a population, after a prompt of 64 tokens. Models that are
loaded by their names replay steps from CUDA graphs; lines without graphs are for
`cuda_graphs=False`.
"""


@dataclass(frozen=True)
class Goal:
    """A figure and its goal.

    Attributes:
        step: Benchmark that measures the figure.
        value: Name of the figure in its results.
        what: Description for readers.
        target: The goal.
        at_least: Whether the goal is a lower bound; else it is an upper bound.
        unit: Unit of figure and goal.
    """

    step: str
    value: str
    what: str
    target: float
    at_least: bool = True
    unit: str = ""

    def verdict(self, figure: float) -> str:
        """Whether a figure reaches the goal."""
        reached = figure >= self.target if self.at_least else figure <= self.target
        return "yes" if reached else "no"


# With graphs, as a model that is loaded by its name.
_OPTIONS = ((" graphs", ""), ("", " without graphs"))


def _particles() -> Iterator[Goal]:
    ways = {
        "static graph": "StaticCache as a CUDA graph",
        "lockstep": "DynamicCache",
    }
    for shape in ("1b", "8b"):
        for case in ("50/64", "50/512", "200/512", "1000/512"):
            for option, graphs in _OPTIONS:
                for way, name in ways.items():
                    what = f"hf, {shape.upper()}{graphs}, a request for each particle, {case}: "
                    value = f"{shape} {case}{option} {way}"
                    what += f"times as fast as {name}"
                    yield Goal(f"particles-{shape}", value, what, 1.0)
            what = f"hf, {shape.upper()}, a request for each particle, {case}: "
            what += "graphs, times as fast as without"
            yield Goal(f"particles-{shape}", f"{shape} {case} graphs", what, 1.0)
    for option, graphs in _OPTIONS:
        what = f"hf, 1B{graphs}, a request for each particle, 50/64: "
        what += "times as fast as StaticCache, "
        value = f"1b 50/64{option} static compile"
        yield Goal("compile", value, f"{what}`torch.compile`", 1.0)


def _others() -> Iterator[Goal]:
    for case in ("50/64", "50/512", "200/512", "1000/512"):
        for resampled in ("", " resampled"):
            for option, graphs in _OPTIONS:
                what = f"a population of 1B{graphs}, {case}{resampled}: "
                what += "times as fast as StaticCache as a CUDA graph with `torch.multinomial`"
                value = f"population {case}{resampled}{option} static graph"
                yield Goal("population", value, what, 1.0)
    what = "20 populations of 50 members of 1B, in concurrent coroutines: times as fast as one "
    yield Goal("concurrent", "concurrent", f"{what}after the other", 3.0)
    for size in (50, 500):
        for constraint in ("automaton", "grammar", "python"):
            what = f"a population of {size} of 1B under `{constraint.title()}`: "
            what += "times as fast as without a constraint"
            yield Goal("constraints", f"constraints {size} {constraint}", what, 0.98)
    ways = {"a coroutine each": "a coroutine each", "one call": "in one call"}
    ways["a population"] = "a population that draws"
    for value, how in ways.items():
        what = f"share of a step outside the forward pass, 1,000 particles, {how}"
        yield Goal("outside", f"outside {value}", what, 0.1, at_least=False)
    for width in (10, 100):
        what = f"`beam_search` of 1B, {width} beams: times as fast as transformers' `generate`"
        yield Goal("beams", f"beams {width}", what, 1.0)
    what = "`batch_score` of 1B, 16 texts of 512 tokens: times as fast as a padded forward pass"
    yield Goal("scores", "scores", what, 0.8)
    for rows in (32, 512):
        for operation in ("sum", "logsumexp"):
            what = (
                f"trie, {operation}, {rows} rows x 128,000 tokens: share of a copy's bandwidth"
            )
            yield Goal("trie", f"trie {rows} {operation}", what, 0.6)
    masks = {"no masks": "no masks", "one mask": "one mask", "a mask each": "a mask each"}
    masks["masks on it"] = "a mask each, on the device"
    for value, how in masks.items():
        what = f"draws for a population of 1,000, 128,000 ids, {how}"
        yield Goal("draws", f"draws {value}", what, 1.0, at_least=False, unit=" ms")
    for mode, name in (("cached", "with `cache_kv`"), ("uncached", "without it")):
        what = f"times as fast as genlm-backend 0.3.1 {name}, 1B, 50/64"
        yield Goal("peer", f"peer {mode}", what, 6.0)
    ways = {"population": "", "resampled": " resampled", "sample": " by `sample`"}
    for runner, name in (("vllm", ""), ("vllm-first", "'s first model runner")):
        for case in ("50/64", "200/512", "1000/512"):
            for way, how in ways.items():
                what = f"a population of 1B on vLLM{name}, {case}{how}: "
                what += "times as fast as vLLM's own generation"
                yield Goal(runner, f"{runner} {case} {way}", what, 0.95)


GOALS: Sequence[Goal] = (*_particles(), *_others())


def page(results: Mapping[str, Any] | None) -> str:
    """Return the page of results; of None, that nothing was measured."""
    machine = (results or {}).get("machine", {})
    # A run on a CPU tests the programs and measures nothing.
    on_gpu = machine.get("device", "cpu") != "cpu"
    found: Mapping[str, Any] = (results or {}).get("steps", {})
    parts = [_HEAD.format(state=_state(machine, found, on_gpu=on_gpu)), "## Tests and checks\n"]
    parts += [_row("What", "Result"), _row("---", "---")]
    for name, what in STEPS.items():
        parts.append(_row(what, _outcome(found.get(name), on_gpu=on_gpu)))
    parts += _rows_of_vllm(json.loads(VLLM_RESULTS.read_text()))
    parts += [_SPEED, _row("What", "Goal", "Measured", "Reached"), _row(*["---"] * 4)]
    for goal in GOALS:
        sign = ">=" if goal.at_least else "<="
        parts.append(
            _row(
                goal.what,
                f"{sign} {goal.target:g}{goal.unit}",
                *_figure(goal, found.get(goal.step), on_gpu=on_gpu),
            )
        )
    if results and on_gpu:
        parts += _details(results)
    return "\n".join(parts) + "\n"


def _state(machine: Mapping[str, Any], steps: Mapping[str, Any], *, on_gpu: bool) -> str:
    if not on_gpu:
        return (
            "Nothing of genlm was measured on a GPU yet, and none of the tests that need one "
            "has run.\nOne command does both on any machine that has one:"
        )
    packages = machine["packages"]
    names = ("torch", "triton", "transformers", "peft", "bitsandbytes", "vllm", "sglang")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    commit = machine.get("commit", "unknown")
    earlier = [
        f"{name} (commit {step['commit']})"
        for name, step in steps.items()
        if step.get("commit", commit) != commit
    ]
    again = f" Not measured again: {', '.join(earlier)}." if earlier else ""
    return (
        f"Measured on {machine['devices']} x {machine['device']} "
        f"({machine['memory_bytes'] / 2**30:.0f} GiB, CUDA {machine['cuda']}, driver "
        f"{machine.get('driver', 'unknown')}), Python {machine['python']}, {versions}, commit "
        f"{commit}.{again}\nOne command repeats it:"
    )


def _outcome(step: Mapping[str, Any] | None, *, on_gpu: bool) -> str:
    if step is None or not on_gpu:
        return "not run on a GPU"
    result, said = step.get("result", {}), [step["status"]]
    if "counts" in result:
        said += [f"{count} {status}" for status, count in result["counts"].items()]
        said += [f"on {', '.join(result['devices'])}"]
    elif "passed" in result:
        said.append(f"{result['passed']} passed, {len(result['failed'])} failed")
        said += [f"{count} skipped: {reason}" for reason, count in result["skipped"].items()]
    if step.get("reason"):
        said.append(step["reason"])
    return "; ".join(said).replace("|", "/").replace("\n", " ")


def _rows_of_vllm(found: Mapping[str, Any]) -> list[str]:
    """Return the largest errors of each configuration that was compared, in stored results."""
    machine = found["machine"]
    versions = ", ".join(
        f"{name} {machine['packages'][name]}" for name in ("vllm", "torch", "transformers")
    )
    parts = [
        f"\n## Rows of vLLM\n\nCompared on {found['date']} on {machine['device']}, {versions} "
        f"([results](../benchmarks/results/{VLLM_RESULTS.name}), [what was "
        f"compared](vllm-engine.md#on-a-gpu)), with unbatched float32 forward passes of "
        f"transformers:\n"
    ]
    head = ("Configuration", "Largest difference of a log-probability", "Largest divergence")
    parts += [_row(*head), _row(*["---"] * 3)]
    for run in found["runs"]:
        steps = "eager" if run["cuda_graphs"] == "NONE" else f"graphs `{run['cuda_graphs']}`"
        said = [run["dtype"], f"{run['model_runner']} model runner", steps]
        said += ["`torch.compile`"] if run["compilation_mode"] else []
        options = ("enable_lora", "multiprocess", "unverified")
        said += [f"`{name}={run[name]!r}`" for name in options if name in run]
        errors = [error for error in run["largest"].values() if "max" in error]
        columns = (max(error.get(key, 0.0) for error in errors) for key in ("max", "kl"))
        parts.append(
            _row(f"{', '.join(said)} ({run['commit']})", *map("{:.1e}".format, columns))
        )
    return parts


def _figure(goal: Goal, step: Mapping[str, Any] | None, *, on_gpu: bool) -> tuple[str, str]:
    if step is None or not on_gpu:
        return UNMEASURED, ""
    result = step.get("result", {})
    if (figure := result.get("values", {}).get(goal.value)) is not None:
        return f"{figure:.2f}{goal.unit}", goal.verdict(figure)
    notes = result.get("notes", {})
    # A peer is measured once for runs with graphs and without.
    note = notes.get(goal.value, notes.get(goal.value.replace(" graphs ", " ")))
    reason = str(note).split(". ")[0] if note else step.get("reason") or step["status"]
    return f"{UNMEASURED}: {reason}".replace("|", "/").replace("\n", " "), ""


def _details(results: Mapping[str, Any]) -> list[str]:
    parts = ["\n## All figures\n", "![speed of particles](assets/gpu-particles.svg)\n"]
    parts = parts if _has_plot(results) else parts[:1]
    parts += [_row("What", "Median, ms", "Least", "Most"), _row(*["---"] * 4)]
    for step in results["steps"].values():
        for row, figures in step.get("result", {}).get("rows", {}).items():
            columns = (f"{figures[key]:.3f}" for key in ("median", "min", "max"))
            parts.append(_row(row, *columns))
    notes = [
        f"- {row}: {note}"
        for step in results["steps"].values()
        for row, note in step.get("result", {}).get("notes", {}).items()
    ]
    return parts + (["\n## Notes\n", *notes] if notes else [])


def _speeds(results: Mapping[str, Any]) -> dict[str, float]:
    """Times the speed of StaticCache as a graph, by shape and case."""
    return {
        name.removesuffix(" static graph"): figure
        for step in results["steps"].values()
        for name, figure in step.get("result", {}).get("values", {}).items()
        if name.endswith(" static graph") and " batch " not in name
    }


def _has_plot(results: Mapping[str, Any]) -> bool:
    return bool(_speeds(results)) and importlib.util.find_spec("matplotlib") is not None


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def write(results: Mapping[str, Any] | None, path: Path = PAGE) -> None:
    """Write the page, and its plot into `assets/` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results), encoding="utf-8")
    if results and results["machine"]["device"] != "cpu" and _has_plot(results):
        _plot(_speeds(results), path.parent / "assets" / "gpu-particles.svg")


def _plot(speeds: Mapping[str, float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "genlm", "svg.fonttype": "none", "font.size": 9}
    figure, plot = plt.subplots(figsize=(7, 3))
    plot.bar(list(speeds), list(speeds.values()))
    plot.axhline(1, color="grey", linewidth=0.8)
    plot.set_ylabel("times the speed of StaticCache\nas a CUDA graph")
    plot.tick_params(axis="x", rotation=30)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    write(json.loads(path.read_text()) if path.exists() else None)
    print(PAGE)


if __name__ == "__main__":
    main()
