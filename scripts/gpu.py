"""Run the tests, checks and benchmarks that need a GPU.

    python scripts/gpu.py                 all steps that are not finished yet
    python scripts/gpu.py trie outside    these steps, finished or not
    python scripts/gpu.py --fresh         all steps again

Runs from a tree of sources with the Python that starts it: nothing is installed, built or
downloaded, and no PYTHONPATH is needed (see `source_tree`). Each step is a separate process
with a time limit: tests and checks run concurrently, then one benchmark after the other. Each
result is written to the JSON file immediately, so an interrupted run can be continued. Steps
that passed or failed are finished; steps that ran out of time or lacked a package are repeated.
A step that could not run reports the reason, and `build/gpu/NAME.log` has its output. Exit
code 0: every step passed, except those of engines that are not installed.

`--device cpu --tiny` runs every step without a GPU: tests that need one are reported as
skipped, and benchmarks use small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_page
from source_tree import BUILD, ROOT, WHEELS, environment

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
FINISHED = {"passed", "failed"}
LINES_KEPT = 40
REPORT = '{"unit": '
"""How a benchmark's report begins."""

_TINY_CHECKS = {
    "cuda": "values-are-exact",
    "hf": "rows-are-right",
    "vllm": "rows-are-right",
    "sgl": "rows-are-right",
}

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "numpy", "peft", "accelerate"),
    *("bitsandbytes", "vllm", "sglang", "numba", "cachetools", "pluggy", "typer", "rich"),
    *(
        "tqdm",
        "safetensors",
        "pytest",
        "pytest_timeout",
        "hypothesis",
        "scipy",
        "matplotlib",
        "opentelemetry",
    ),
    *("outlines_core", "xgrammar"),
)

_DESCRIBE = """
import importlib.metadata, importlib.util, json, os, platform, sys
import torch
device, names = sys.argv[1], sys.argv[2:]
found = {}
for name in names:
    if importlib.util.find_spec(name) is not None:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
machine = {"python": platform.python_version(), "cores": os.cpu_count(), "packages": found,
           "cuda": torch.version.cuda, "device": "cpu", "devices": 0}
if device != "cpu":
    properties = torch.cuda.get_device_properties(device)
    machine |= {"device": properties.name, "devices": torch.cuda.device_count(),
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "capability": f"{properties.major}.{properties.minor}"}
print(json.dumps(machine))
"""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: On the command line and in the JSON file.
        kind: `"tests"`, `"checks"` or `"bench"`: how its result is read.
        arguments: After the interpreter's name.
        limit_s: After so many seconds it is ended.
        needs: Modules without which it cannot run.
        optional: Whether the machine need not have these.
    """

    name: str
    kind: str
    arguments: Sequence[str]
    limit_s: float
    needs: tuple[str, ...] = ()
    optional: bool = False


def steps(device: str, *, tiny: bool) -> list[Step]:
    """All steps, in their order; their limits are far above what they take."""
    needs = ("pytest", "pytest_timeout", "hypothesis", "cachetools", "pluggy")

    def tests(
        name: str,
        limit_s: float,
        *paths: str,
        also: tuple[str, ...] = (),
        optional: bool = False,
    ) -> Step:
        found = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
        own = (*needs, *also)
        return Step(f"tests-{name}", "tests", (*found, *paths), limit_s, own, optional)

    def checks(name: str, limit_s: float, needed: str, *, optional: bool = False) -> Step:
        only = ("--only", _TINY_CHECKS[name]) if tiny else ()
        arguments = ("-m", "genlm", "check", name, "--json", *only)
        own = ("hypothesis", "typer", "rich", needed)
        return Step(f"check-{name}", "checks", arguments, limit_s, own, optional)

    def bench(line: str, limit_s: float, *also: str, optional: bool = False) -> Step:
        options = ("--device", device, *(("--tiny",) if tiny else ()))
        arguments = (str(ROOT / "benchmarks" / "bench_gpu.py"), line, *options)
        own = ("transformers", "cachetools", *also)
        return Step(line, "bench", arguments, limit_s, own, optional)

    hf, trie = "plugins/genlm-hf/tests", "plugins/genlm-trie-cuda/tests"
    vllm = "plugins/genlm-vllm/tests/test_gpu.py"
    return [
        tests("trie", 240, trie),
        tests("hf", 240, hf, also=("transformers", "peft", "accelerate")),
        tests(
            "core", 120, "core/tests/rows", "tests/test_documents.py", also=("opentelemetry",)
        ),
        tests("vllm", 300, vllm, also=("vllm", "transformers", "peft"), optional=True),
        checks("cuda", 240, "triton"),
        checks("hf", 240, "transformers"),
        checks("vllm", 240, "vllm", optional=True),
        checks("sgl", 240, "sglang", optional=True),
        bench("population", 120),
        bench("trie", 90),
        bench("draws", 60),
        bench("concurrent", 60),
        bench("constraints", 60, "outlines_core", "xgrammar"),
        bench("outside", 60),
        bench("beams", 60),
        bench("scores", 60),
        bench("particles-1b", 120),
        bench("peer", 90),
        bench("particles-8b", 150),
        bench("compile", 150),
        bench("vllm", 120, "vllm", optional=True),
        bench("vllm-first", 120, "vllm", optional=True),
    ]


def run_step(step: Step, variables: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run one step; end it and all its processes when its time is over."""
    BUILD.mkdir(parents=True, exist_ok=True)
    report = BUILD / f"{step.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, *step.arguments]
    if step.kind == "tests":
        command.append(f"--junitxml={report}")
    if step.kind != "bench":
        # Comparisons with float32 forward passes: products must not be rounded to TF32, in
        # libraries and in Triton's kernels.
        exact = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
        variables = {**variables, **exact}
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
        status = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        status = "timeout"
    (BUILD / f"{step.name}.log").write_text(out + err)
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if status == "timeout":
        result["reason"] = f"not finished after {seconds:.0f} s"
        if step.kind == "bench":
            result |= _read_unfinished_bench(out)
    else:
        result |= _READ[step.kind](out, report, process.returncode)
    if result["status"] != "passed":
        result["output"] = [*out.splitlines()[-LINES_KEPT:], *err.splitlines()[-LINES_KEPT:]]
    return result


def _read_tests(out: str, report: Path, code: int) -> dict[str, Any]:  # noqa: ARG001 - as _READ
    """Counts, failures and the reason of every skip, from pytest's report."""
    if not report.exists():
        return {"status": "failed", "reason": "pytest ended without a report"}
    passed, failed, skipped = 0, [], {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        faults = [*case.findall("failure"), *case.findall("error")]
        skip = case.find("skipped")
        if faults:
            failed.append({"test": name, "message": (faults[0].get("message") or "")[:300]})
        elif skip is not None:
            reason = skip.get("message") or ""
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    status = "failed" if failed or code not in {0, 5} else "passed" if passed else "skipped"
    found = {"passed": passed, "failed": failed, "skipped": skipped}
    return {"status": status, "result": found} | (
        {"reason": "; ".join(skipped) or "no test was found"} if status == "skipped" else {}
    )


def _read_checks(out: str, report: Path, code: int) -> dict[str, Any]:  # noqa: ARG001 - as _READ
    """Counts, devices, failures and skips of a conformance run."""
    begin = out.find("{")
    if begin < 0:
        return {"status": "failed", "reason": "genlm check ended without a report"}
    found = json.loads(out[begin:])
    others = [
        {key: outcome[key] for key in ("check", "model", "status") if key in outcome}
        | {"found": str(outcome.get("found") or outcome.get("reason"))[:300]}
        for outcome in found["outcomes"]
        if outcome["status"] not in {"passed", "not applicable"}
    ]
    kept = {key: found[key] for key in ("counts", "devices", "certified")}
    return {"result": {**kept, "not passed": others}}


def _read_bench(out: str, report: Path, code: int) -> dict[str, Any]:  # noqa: ARG001 - as _READ
    """The JSON line that a benchmark prints last."""
    lines = out.splitlines()
    if code or not lines:
        return {}
    return {"result": json.loads(lines[-1])}


def _read_unfinished_bench(out: str) -> dict[str, Any]:
    """The last JSON line of a benchmark that was ended, if it had printed one."""
    reports = [line for line in out.splitlines() if line.startswith(REPORT)]
    return {"result": json.loads(reports[-1])} if reports else {}


_READ: dict[str, Callable[[str, Path, int], dict[str, Any]]] = {
    "tests": _read_tests,
    "checks": _read_checks,
    "bench": _read_bench,
}


def describe(device: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Hardware and versions, as a process of the steps finds them.

    Raises:
        SystemExit: torch or the device is not there.
    """
    command = [sys.executable, "-c", _DESCRIBE, device, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise SystemExit(
            f"no device {device!r} here: {done.stderr.strip().splitlines()[-1]}\n"
            f"--device cpu --tiny reaches every step without a GPU"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name, command in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        ("commit", ["git", "rev-parse", "--short", "HEAD"]),
    ):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=ROOT
            )
        except OSError:
            continue
        if not done.returncode:
            found[name] = done.stdout.split("\n")[0].strip()
    return found


def load(path: Path, machine: Mapping[str, Any], *, fresh: bool) -> dict[str, Any]:
    """Return the results so far; nothing of another machine.

    Raises:
        SystemExit: The file holds results of another device or other versions.
    """
    if fresh or not path.exists():
        return {"machine": machine, "steps": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    for key in ("device", "packages"):
        if found["machine"].get(key) != machine.get(key):
            raise SystemExit(
                f"{path} holds results with another {key}: {found['machine'].get(key)}; "
                f"--fresh replaces them, --out names another file"
            )
    return {**found, "machine": machine}


def absent(step: Step, packages: Mapping[str, str]) -> dict[str, Any] | None:
    """Why a step cannot run on this machine, None if it can."""
    lacking = [name for name in step.needs if name not in packages]
    if not lacking:
        return None
    kind = "absent" if step.optional else "missing"
    return {"status": kind, "seconds": 0.0, "reason": f"not installed: {', '.join(lacking)}"}


def run(
    chosen: Sequence[Step],
    path: Path,
    results: dict[str, Any],
    variables: Mapping[str, str],
    total_s: float,
    patience: float = 1.0,
) -> None:
    """Run steps, each with what is left of the total; write the file after each.

    Tests and checks run side by side, and before all benchmarks, which run alone.

    Args:
        chosen: The steps.
        path: The file.
        results: What it holds.
        variables: Of the processes.
        total_s: Seconds for all steps together.
        patience: Factor of each step's limit.
    """
    ends = time.monotonic() + total_s
    packages = results["machine"]["packages"]

    def result_of(step: Step) -> dict[str, Any]:
        if (result := absent(step, packages)) is not None:
            return result
        left = ends - time.monotonic()
        if left < min(20, step.limit_s):
            reason = f"the run's {total_s:.0f} s were over; run it again to go on"
            return {"status": "not run", "seconds": 0.0, "reason": reason}
        return run_step(step, variables, min(step.limit_s * patience, left))

    def record(step: Step, result: dict[str, Any]) -> None:
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        commit = results["machine"].get("commit")
        results["steps"][step.name] = {**result, "date": date, "commit": commit}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(path)
        said = f"{step.name:14} {result['status']:8} {result['seconds']:6.1f} s"
        print(said, result.get("reason", ""), flush=True)

    measured = [step for step in chosen if step.kind == "bench"]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        begun = {pool.submit(result_of, step): step for step in chosen if step not in measured}
        for done in as_completed(begun):
            record(begun[done], done.result())
    for step in measured:
        record(step, result_of(step))


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", help="by default all that are not finished")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument(
        "--out", type=Path, help="JSON file; default benchmarks/results/gpu.json"
    )
    parser.add_argument("--page", type=Path, help="page to write; default docs/gpu.md")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels to use")
    parser.add_argument("--total", type=float, default=570, help="seconds for the whole run")
    parser.add_argument("--patience", type=float, default=1, help="factor of steps' limits")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    path = options.out or (BUILD / "cpu.json" if on_cpu else RESULTS)
    variables = environment(options.wheels) | {
        "HF_HUB_OFFLINE": "1",
        "GENLM_PEER_PATH": str(BUILD / "peer"),
        **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}),
    }
    known = {step.name: step for step in steps(options.device, tiny=options.tiny)}
    if unknown := set(options.steps) - known.keys():
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    machine = describe(options.device, variables)
    results = load(path, machine, fresh=options.fresh)
    done = {name for name, found in results["steps"].items() if found["status"] in FINISHED}
    names = options.steps or [name for name in known if name not in done]
    for name in [name for name in known if name in done and name not in names]:
        print(f"{name:14} finished before: {results['steps'].get(name, {}).get('status')}")
    chosen = [known[name] for name in names]
    run(chosen, path, results, variables, options.total, options.patience)
    page = options.page or (BUILD / "cpu.md" if on_cpu else gpu_page.PAGE)
    gpu_page.write(results, page)
    print(f"results: {path}\npage: {page}")
    good = {"passed", "absent"}
    sys.exit(any(found["status"] not in good for found in results["steps"].values()))


if __name__ == "__main__":
    main()
