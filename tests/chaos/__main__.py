"""`make chaos`: random requests of every kind from concurrent callers, with their invariants.

`python -m tests.chaos ENGINE` takes the conformance targets of any installed engine. A
failure shows the request, the expected and the actual result; the same seed sends the same
requests.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from genlm.testing import EngineTarget
from genlm.testing.check import CheckFailure, CheckTimeout
from genlm.testing.run import find, targets_of

from .chaos import Report, Settings, run_chaos


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 if a property does not hold."""
    options = _parser().parse_args(arguments)
    logging.disable()  # engines that die on purpose log it
    with tempfile.TemporaryDirectory(prefix="genlm-chaos-") as folder:
        target = _target(options.engine, options.model, Path(folder))
        settings = Settings(
            requests=options.requests,
            seed=options.seed,
            kill_worker=options.kill_worker,
            engine_options=options.options,
        )
        began = time.perf_counter()
        try:
            report = run_chaos(target, settings)
        except (CheckFailure, CheckTimeout) as failure:
            print(f"chaos: {options.engine}[{target.model}], {settings}\n{failure}", flush=True)
            return 1
        seconds = time.perf_counter() - began
    _tell(options.engine, target.model, settings, report, seconds, save=options.save)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("engine", help="an installed engine, such as hf")
    parser.add_argument("--model", help="one of its conformance targets; by default the first")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="of the engine, a JSON object"
    )
    parser.add_argument(
        "--kill-worker", action="store_true", help="kill a process of the engine midway"
    )
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
    return parser


def _target(engine: str, model: str | None, folder: Path) -> EngineTarget:
    targets = targets_of(find(engine), folder)
    for target in targets:
        if isinstance(target, EngineTarget) and model in {None, target.model}:
            return target
    sys.exit(f"{engine} has no target {model!r}: {', '.join(each.model for each in targets)}")


def _tell(
    engine: str, model: str, settings: Settings, report: Report, seconds: float, *, save: bool
) -> None:
    from benchmarks.report import RESULTS, environment

    print(
        f"chaos: {engine}[{model}], seed {settings.seed}: {report.requests} requests in "
        f"{seconds:.0f} s, {report.ended}; {report.compared} rows compared; grown by "
        f"{asdict(report.grown)}"
    )
    record: dict[str, Any] = {
        "benchmark": "chaos",
        "engine": engine,
        "model": model,
        "seconds": round(seconds),
        **asdict(settings),
        **asdict(report),
        **environment(),
    }
    if save:
        with (RESULTS / "chaos.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
