"""Write docs/<backend>-architectures.md and the engine's verified.json, or hf's list of paths.

Serves the tiny random models of `genlm.testing.families` with an engine and compares every
row with an unbatched float32 forward pass. Engines run in processes of their own, so that a
crash or a hang is a row of the table; what is measured is kept in .cache/architectures, and
`--resume` goes on from there. Longer than other modules: a third is the table of engines.

Run from the repository root: `python scripts/architectures.py --backend hf`
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from genlm.testing import Family, families

ROOT = Path(__file__).resolve().parent.parent
BOUND = 1e-4
HEADER = """# Architectures on {title}

Made by `python scripts/architectures.py --backend {backend}` with
{versions}; do not edit.
Tiny models with large random weights, heads of {head_dim}, float32, on the CPU. *Error* is the
largest difference in log-probability between served rows and an unbatched forward pass of
transformers, over mixed lengths of up to 60 tokens, forks, duplicates, cancellations, particles
that grow across every window, and repeats; *right* is an error within the bound. {more}

| Family | Rows | {path} | Error | Bound | Note |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Engine:
    """How an engine is measured, and what its table says.

    Attributes:
        title: Its name in prose.
        libraries: Distributions whose versions the table states; the engine's own first.
        options: Of `load_model`.
        head_dim: Width of heads that its kernels serve.
        per_process: How many models a process may load; None for any number.
        path: Title of the column that says how a model was served.
        path_of: Reads that from the engine's figures.
        note_of: Reads from them what is to be said about rows that are right.
        reason_of: Reads from the reason of a refusal or failure what is to be said.
        bounds: By family: a bound above the usual one, and why.
        more: A last sentence above the table.
        reads_list: Whether it reads `verified.json`; hf, which tests each model itself,
            reads `execution_paths.json`.
    """

    title: str
    libraries: Sequence[str]
    options: Mapping[str, Any]
    head_dim: int = 16
    per_process: int | None = None
    path: str = "Path"
    path_of: Callable[[Mapping[str, Any]], str] = lambda figures: str(figures.get("path", ""))
    note_of: Callable[[Mapping[str, Any]], str] = lambda figures: str(figures.get("note", ""))
    reason_of: Callable[[str], str] = lambda reason: reason
    bounds: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    more: str = ""
    reads_list: bool = True


def _set_right(corrections: str) -> str:
    return f"set right: {corrections}" if corrections else ""


_LONGEST = 60


def _shortened(figures: Mapping[str, Any]) -> str:
    """Say how long contexts may be where that is less than was to be asked."""
    longest = figures.get("max_context")
    if not isinstance(longest, int) or longest >= _LONGEST:
        return ""
    return f"contexts of at most {longest} tokens"


def _execution_path(figures: Mapping[str, Any]) -> str:
    return str(figures.get("execution_path", ""))


def _execution_path_reason(figures: Mapping[str, Any]) -> str:
    """Say why a faster path does not serve a model, if there is one."""
    return str(figures.get("execution_path_reason", "")).replace("the fastest", "")


_LONGEST_REASON = 300


def _what_it_raised(reason: str) -> str:
    """Return an engine's own reason, without the options and the name of the model."""
    _, _, raised = reason.partition("it raised ")
    raised = raised.partition(" (options")[0] or reason.partition("first row failed: ")[2]
    return (raised or reason)[:_LONGEST_REASON]


ENGINES = {
    "hf": Engine(
        "Hugging Face transformers",
        ("transformers", "torch"),
        {"device": "cpu", "dtype": "float32"},
        head_dim=8,
        reads_list=False,
        path="Execution path",
        path_of=_execution_path,
        note_of=_execution_path_reason,
        more=(
            "The execution\npaths are explained in [hf-engine.md](hf-engine.md); "
            "the note says why a faster one does not\nserve a model. "
            "Every family is right on the path `padded` too."
        ),
    ),
    "vllm": Engine(
        "vLLM",
        ("vllm", "transformers", "torch"),
        {
            "engine_opts": {
                "dtype": "float32",
                "enforce_eager": True,
                "max_num_seqs": 64,
                "kv_cache_memory_bytes": 2**26,
            }
        },
        head_dim=64,
        per_process=12,
        path="Implementation",
        path_of=lambda figures: str(figures.get("implementation", "")),
        note_of=_shortened,
        reason_of=_what_it_raised,
        more="[vllm-engine.md](vllm-engine.md)\nexplains refusals.",
    ),
    "sgl": Engine(
        "SGLang",
        ("sglang", "transformers", "torch"),
        {
            "engine_opts": {
                "device": "cpu",
                "dtype": "float32",
                "max_total_tokens": 4096,
                "max_mamba_cache_size": 400,
            }
        },
        per_process=10,
        path="Model class",
        path_of=lambda figures: str(figures.get("model_class", "")),
        note_of=lambda figures: _set_right(str(figures.get("corrections", ""))),
        reason_of=_what_it_raised,
        more=(
            "`Transformers...`\nclasses are SGLang's fallback, which warns. What is set right, "
            "and what is refused, is explained\nin [sglang-engine.md](sglang-engine.md)."
        ),
    ),
    "mlx": Engine(
        "MLX",
        ("mlx-lm", "mlx", "transformers"),
        {"dtype": "float32"},
        path="Execution path",
        path_of=_execution_path,
        note_of=_execution_path_reason,
        more=(
            "The execution\npaths are explained in [genlm-mlx]"
            "(../plugins/genlm-mlx/README.md); the note says why the\n"
            "prefix tree does not serve a model."
        ),
    ),
}


# -- one process ----------------------------------------------------------------------------


def measure(backend: str, names: Sequence[str], results: Path) -> None:
    """Measure families and append a line of JSON for each."""
    import transformers

    import genlm
    from genlm.testing import TinyModel, measure_family

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    engine = ENGINES[backend]
    listed = families(engine.head_dim)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model = TinyModel.of(Path(folder), listed[name])
            bound, _ = engine.bounds.get(name, (BOUND, ""))
            config = transformers.AutoConfig.from_pretrained(model.path)
            load = functools.partial(genlm.load_model, backend=backend, **engine.options)
            result = measure_family(load, model, bound=bound)
            row = asdict(result) | row_of(name, genlm.ModelFacts.of(config).key)
            row["reason"] = result.reason.replace(folder, "MODEL")
            stated = re.search(r": max_context=(\d+)", result.reason)
            if stated is not None:
                load = functools.partial(load, max_context=int(stated[1]))
                limited = measure_family(load, model, bound=bound)
                row["limited"] = {"status": limited.status, "error": limited.error}
        write_line(results, row)


def row_of(name: str, key: str) -> dict[str, str]:
    """Return what identifies a row."""
    return {"family": name, "key": key}


def write_line(results: Path, row: Mapping[str, Any]) -> None:
    """Append a row; figures that JSON does not know become text."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")


# -- all of them ----------------------------------------------------------------------------


def measure_all(backend: str, names: Sequence[str], results: Path, timeout_s: float) -> None:
    """Measure what `results` lacks, in processes that may crash or hang."""
    engine = ENGINES[backend]
    while pending := [name for name in names if name not in measured(results)]:
        chunk = pending[: engine.per_process]
        why = run_process(backend, chunk, results, timeout_s)
        missing = [name for name in chunk if name not in measured(results)]
        if missing:
            result = {"status": "fails", "error": None, "reason": why, "statistics": {}}
            write_line(results, result | row_of(missing[0], ""))
        for name in chunk[: len(chunk) - len(missing) + 1]:
            row = measured(results)[name]
            print(f"{name}: {row['status']} {row['error']} {row['reason'][:150]}", flush=True)


def run_process(backend: str, names: Sequence[str], results: Path, timeout_s: float) -> str:
    """Measure in a process; returns how it ended, if it did before its work."""
    command = [sys.executable, __file__, "--backend", backend, "--results", str(results)]
    try:
        done = subprocess.run(
            [*command, *(part for name in names for part in ("--only", name))],
            timeout=timeout_s * len(names),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no result within {timeout_s:.0f} s"
    last = done.stdout.strip().splitlines()[-1:] or [""]
    return f"the process ended with exit code {done.returncode}: {last[0][:300]}"


def measured(results: Path) -> dict[str, dict[str, Any]]:
    """Read the rows that there are, by family."""
    if not results.exists():
        return {}
    rows = map(json.loads, results.read_text("utf-8").splitlines())
    return {row["family"]: row for row in rows}


# -- the page and the list ------------------------------------------------------------------


def table(backend: str, listed: Mapping[str, Family], rows: Mapping[str, Any]) -> str:
    """Return the page."""
    engine = ENGINES[backend]
    text = HEADER.format(
        title=engine.title,
        backend=backend,
        versions=", ".join(f"{k} {v}" for k, v in versions(engine).items()),
        head_dim=engine.head_dim,
        more=engine.more,
        path=engine.path,
    )
    for name in listed:
        row = rows[name]
        bound, why = engine.bounds.get(name, (BOUND, ""))
        figures = row["statistics"]
        right = row["status"] == "right"
        note = "; ".join(
            filter(
                None,
                [engine.note_of(figures) if right else engine.reason_of(row["reason"]), why],
            )
        )
        note = " ".join(note.split()).replace("|", "\\|")
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        cells = [name, row["status"], engine.path_of(figures), error, f"{bound:.0e}", note]
        text += f"| {' | '.join(cells)} |\n"
    return text


def verified(backend: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the families that were right in every variant that was served.

    A variant that is refused is measured with the `max_context` that the refusal states.
    """
    errors: dict[str, float] = {}
    found = [(row["key"], row.get("limited", row)) for row in rows.values()]
    excluded = {key for key, row in found if row["status"] in {"wrong", "fails"}}
    for key, row in found:
        if row["status"] == "right" and key not in excluded:
            errors[key] = max(float(f"{row['error']:.1e}"), errors.get(key, 0))
    return {"versions": versions(ENGINES[backend]), "errors": dict(sorted(errors.items()))}


def execution_paths(backend: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the path of each family; of several models of one, that of all or none."""
    paths: dict[str, set[str]] = {}
    for row in rows.values():
        if row["status"] == "right":
            path = ENGINES[backend].path_of(row["statistics"])
            paths.setdefault(row["key"], set()).add(path)
    found = {key: path for key, (path, *others) in sorted(paths.items()) if not others}
    return {"versions": versions(ENGINES[backend]), "execution_paths": found}


def versions(engine: Engine) -> dict[str, str]:
    """Return the versions of an engine's libraries."""
    return {name: version(name) for name in engine.libraries}


def version(library: str) -> str:
    """Return a library's version, also of its build for CPUs."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(f"{library}-cpu")


def package_folder(backend: str) -> Path:
    """Return where the engine's package is."""
    spec = importlib.util.find_spec(f"genlm_{backend}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=ENGINES, required=True)
    parser.add_argument(
        "--only", action="append", metavar="FAMILY", help="print, write nothing"
    )
    parser.add_argument("--resume", action="store_true", help="keep what was measured")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a family")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    backend = arguments.backend
    if arguments.results:
        measure(backend, arguments.only, arguments.results)
        return
    listed = families(ENGINES[backend].head_dim)
    if arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            measure_all(backend, arguments.only, Path(folder) / "rows", arguments.timeout)
        return
    results = ROOT / ".cache" / "architectures" / f"{backend}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        results.unlink(missing_ok=True)
    measure_all(backend, list(listed), results, arguments.timeout)
    rows = measured(results)
    page = ROOT / "docs" / f"{backend}-architectures.md"
    page.write_text(table(backend, listed, rows), "utf-8")
    file, content = (
        ("verified.json", verified)
        if ENGINES[backend].reads_list
        else ("execution_paths.json", execution_paths)
    )
    text = json.dumps(content(backend, rows), indent=1)
    (package_folder(backend) / file).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
