"""Run the tests with the newest releases of the libraries that the packages depend on.

    python scripts/newest.py run      # .venv-newest, the tests, build/newest/report.md
    python scripts/newest.py issue    # an issue with that report, or a comment on the open one

`run` installs every requirement without its upper bound. It exits with status 1 if a suite
fails or an engine has a release that its plugin was not tested with. vLLM, SGLang, llama.cpp
and Ray are not installed; for these it compares the newest release with the tested ones.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-newest"
REPORT = ROOT / "build" / "newest" / "report.md"
TITLE = "The newest releases fail"

PACKAGES = ("core", "plugins/genlm-hf", "plugins/genlm-mlx", "plugins/genlm-backend")
LISTED_ONLY = tuple(f"plugins/genlm-{name}" for name in ("vllm", "sgl", "llamacpp", "ray"))
"""Installed without their engines, so that `genlm plugins` says what they were tested with."""

TOOLS = (
    "editables", "hatchling", "hypothesis", "mlx[cpu]; sys_platform == 'linux'", "packaging",
    "psutil", "pytest", "pytest-timeout", "pyyaml", "scipy", "tiktoken",
)  # fmt: skip
SUITES = ("core/tests", *(f"{package}/tests" for package in PACKAGES[1:]))

_UPPER_BOUND = re.compile(r",?\s*(?:<=?|==|~=)\s*[^,;\s]+")


def unbounded(requirement: str) -> str:
    """Return a requirement without upper bounds and pins; lower bounds and markers stay."""
    specifier, semicolon, marker = requirement.partition(";")
    lower = re.sub(r"^([\w.\[\]-]+)\s*,", r"\1", _UPPER_BOUND.sub("", specifier))
    return lower.strip() + semicolon + marker


def requirements(projects: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield what distributions of other projects the packages and their extras need."""
    for project in projects:
        extras: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
        groups: list[Sequence[str]] = [project["dependencies"], *extras.values()]  # type: ignore[list-item]
        for requirement in {each for group in groups for each in group}:
            if not requirement.startswith("genlm"):
                yield unbounded(requirement)


def untested(tested: Mapping[str, Sequence[str]], newest: Mapping[str, str]) -> list[str]:
    """Return a line for each library whose newest release was not tested."""
    return [
        f"{name} {newest[name]} is released; the newest tested version is {versions[-1]}"
        for name, versions in tested.items()
        if newest.get(name) and newest[name] not in versions
    ]


def report(
    versions: Mapping[str, str], failures: Mapping[str, str], releases: Sequence[str]
) -> str:
    """Return the report: what failed, with which versions, and untested releases."""
    lines = ["Made by `make newest`.", ""]
    lines += [f"- {line}" for line in releases]
    for suite, output in failures.items():
        lines += ["", f"## {suite}", "", "```text", output, "```"]
    lines += ["", "## Versions", ""]
    lines += [f"- {name} {version}" for name, version in versions.items()]
    return "\n".join(lines) + "\n"


def run() -> int:
    """Build the environment, run the suites, write the report."""
    python = _environment()
    failures = {}
    for suite in SUITES:
        done = subprocess.run(
            [python, "-m", "pytest", suite, "-q", "-p", "no:cacheprovider"],
            cwd=ROOT, check=False, capture_output=True, text=True,
        )  # fmt: skip
        print(done.stdout[-2000:], done.stderr[-2000:])
        if done.returncode:
            named = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            failures[suite] = "\n".join(named[:100]) or done.stdout[-3000:]
    found = json.loads(_output(python, "-m", "genlm", "env", "--json"))
    tested = {
        name: versions
        for info in found["plugins"]
        for name, versions in info["tested"].items()
        if name not in found["libraries"]  # the suites ran with those
    }
    releases = untested(tested, {name: _newest(python, name) for name in tested})
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(report(found["libraries"], failures, releases), "utf-8")
    print(REPORT.read_text("utf-8"))
    return int(bool(failures or releases))


def _environment() -> str:
    python = str(ENVIRONMENT / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    projects = [
        tomllib.loads((ROOT / package / "pyproject.toml").read_text("utf-8"))["project"]
        for package in PACKAGES
    ]
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *TOOLS, *sorted(set(requirements(projects)))], check=True)
    paths = [word for each in (*PACKAGES, *LISTED_ONLY) for word in ("-e", str(ROOT / each))]
    subprocess.run([*install, "--no-deps", "--no-build-isolation", *paths], check=True)
    return python


def _newest(python: str, distribution: str) -> str:
    """Return the newest release of a distribution, "" if the index does not have it."""
    command = [python, "-m", "pip", "index", "versions", distribution]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = re.search(r"\(([^)]+)\)", done.stdout)
    return found[1].partition("+")[0] if found else ""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def issue() -> int:
    """Open an issue with the report, or add the report to the open one, by GitHub's `gh`."""
    search = ("--state", "open", "--search", f'"{TITLE}" in:title', "--json", "number")
    found = json.loads(_output("gh", "issue", "list", *search))
    body = ("--body-file", str(REPORT))
    if found:
        _output("gh", "issue", "comment", str(found[0]["number"]), *body)
    else:
        _output("gh", "issue", "create", "--title", TITLE, *body)
    return 0


if __name__ == "__main__":
    sys.exit({"run": run, "issue": issue}[sys.argv[1]]())
