"""Run engines in processes, one after the other, and compare their rows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genlm.cli.comparison.contexts import Context
from genlm.cli.comparison.differences import Differences, differences

__all__ = ["Outcome", "answer_of", "asked_of", "judged"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one engine.

    Attributes:
        backend: Its name.
        status: `"reference"`, `"within the bound"`, `"beyond the bound"` or `"failed"`.
        reason: Of a failure.
        differences: To the first engine that answered; None for itself.
        skipped: Contexts that the engine does not take: too long, or with unknown ids.
        figures: Memory, speed and sizes.
    """

    backend: str
    status: str
    reason: str = ""
    differences: Differences | None = None
    skipped: int = 0
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def answer_of(
    request: Mapping[str, Any], folder: Path, timeout: float | None
) -> Mapping[str, Any]:
    """Run one engine in a process; returns its figures, or the error that it ended with."""
    path = folder / f"request-{request['number']}.json"
    path.write_text(json.dumps(request), "utf-8")
    command = [sys.executable, "-m", "genlm.cli.comparison.engine_run", str(path)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and our own module
            command,
            timeout=timeout,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {timeout:g} s"}
    result = folder / f"{request['number']}.json"
    if not result.exists():
        last = "".join(done.stdout.strip().splitlines()[-1:])
        return {"error": f"its process ended with exit code {done.returncode}: {last}"}
    answer: Mapping[str, Any] = json.loads(result.read_text("utf-8"))
    return answer


def judged(
    names: Sequence[str],
    answers: Sequence[Mapping[str, Any]],
    folder: Path,
    bound: float,
    seed: int,
) -> list[Outcome]:
    """Compare every engine's rows with those of the first that answered."""
    outcomes: list[Outcome] = []
    reference: int | None = None
    for number, (name, answer) in enumerate(zip(names, answers, strict=True)):
        if "error" in answer:
            outcomes.append(Outcome(name, "failed", answer["error"]))
        elif reference is None:
            reference = number
            outcomes.append(Outcome(name, "reference", figures=_figures(answer)))
        else:
            found = _compared((reference, answers[reference]), (number, answer), folder, seed)
            outcomes.append(_bounded(name, found, answer, bound))
    return outcomes


def _compared(
    first: tuple[int, Mapping[str, Any]],
    second: tuple[int, Mapping[str, Any]],
    folder: Path,
    seed: int,
) -> tuple[Differences, int] | str:
    """Return the differences and the number of skipped contexts, or why there are none."""
    (_, expected), (_, found) = first, second
    if expected["vocab_size"] != found["vocab_size"]:
        return f"rows of {found['vocab_size']} ids; expected {expected['vocab_size']}"
    contexts = json.loads((folder / "contexts.json").read_text("utf-8"))["all"]
    shared = sorted({*expected["fitting"]} & {*found["fitting"]})
    if not shared:
        return "takes no context that the other one takes"
    rows = [
        np.load(folder / f"{number}.npy")[:, [answer["fitting"].index(i) for i in shared]]
        for number, answer in (first, second)
    ]
    apart = differences([Context(*contexts[i]) for i in shared], rows[0], rows[1], seed)
    return apart, len(contexts) - len(shared)


def _bounded(
    name: str,
    found: tuple[Differences, int] | str,
    answer: Mapping[str, Any],
    bound: float,
) -> Outcome:
    figures = _figures(answer)
    if isinstance(found, str):
        return Outcome(name, "failed", found, figures=figures)
    apart, skipped = found
    within = max(apart.largest, apart.repeats) <= bound  # false for NaN
    status = "within the bound" if within else "beyond the bound"
    return Outcome(name, status, "", apart, skipped, figures)


def _figures(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "fitting"}


def asked_of(folder: Path) -> dict[str, Any]:
    """Return what was asked: how many contexts, how long, of which family of models."""
    path = folder / "contexts.json"
    if not path.exists():
        return {"contexts": 0, "longest": 0, "not_reached": [], "family": None}
    found = json.loads(path.read_text("utf-8"))
    return {
        "contexts": len(found["all"]),
        "longest": found["longest"],
        "not_reached": found["beyond"],
        "family": found["family"],
    }
