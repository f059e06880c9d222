"""Run the tests with the newest or the oldest releases of the packages' dependencies.

    python scripts/releases.py run newest      # .venv-newest, then `test` in it
    python scripts/releases.py test newest     # the tests, build/newest/report.md
    python scripts/releases.py issue newest    # that report as an issue, or in the open issue

`newest` installs every requirement without its upper bound, `oldest` in the lowest version that
its bounds allow. `run` and `test` exit with status 1 if a suite fails; for `newest` also if a
bound excludes an installed version, or if vLLM or SGLang has a release that its plugin was not
tested with. These two are not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["newest", "oldest"]

ROOT = Path(__file__).resolve().parent.parent

_PLUGINS = ("hf", "trie-cuda", "mlx", "llamacpp", "ray", "backend", "lm-eval")
PACKAGES = ("core", *(f"plugins/genlm-{name}" for name in _PLUGINS))
LISTED_ONLY = ("plugins/genlm-vllm", "plugins/genlm-sgl")
"""Installed without their engines, so that `genlm plugins` says what they were tested with."""

TOOLS = ("requirements.txt", "requirements-dev.txt", "requirements-site.txt")
"""What `make` installs for the tests."""

SUITES = (*(f"{package}/tests" for package in PACKAGES), "tests")

_UPPER_BOUND = re.compile(r",?\s*(?:<=?|==|~=)\s*[^,;\s]+")


def unbounded(requirement: str) -> str:
    """Return a requirement without upper bounds and pins; lower bounds and markers stay."""
    specifier, semicolon, marker = requirement.partition(";")
    lower = re.sub(r"^([\w.\[\]-]+)\s*,", r"\1", _UPPER_BOUND.sub("", specifier))
    return lower.strip() + semicolon + marker


def requirements(kind: Kind, projects: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what the packages, their extras and the tests need from other projects.

    Args:
        kind: `newest` for requirements without upper bounds; `oldest` for those of the packages
            as stated, and the tests' requirements of other distributions.
        projects: The `project` tables of the packages.
    """
    stated = [requirement for project in projects for requirement in _stated(project)]
    if kind == "newest":
        return sorted({*map(unbounded, stated), *map(unbounded, _tools())})
    names = set(map(_name, stated))
    others = (each for each in _tools() if _name(each) not in names)
    # An extra is needed whatever the version: `mlx[cpu]` has the libraries of `mlx`.
    extras = (unbounded(each) for each in _tools() if "[" in each)
    return sorted({*stated, *others, *extras})


def _tools() -> Iterator[str]:
    """Yield the requirements of the tests."""
    for file in TOOLS:
        for line in (ROOT / file).read_text("utf-8").splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement and not requirement.startswith("-r "):
                yield requirement


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def _stated(project: Mapping[str, object]) -> list[str]:
    """Return the requirements of a package and of its extras on other projects."""
    extras: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
    groups: list[Sequence[str]] = [project["dependencies"], *extras.values()]  # type: ignore[list-item]
    stated = {requirement for group in groups for requirement in group}
    return sorted(each for each in stated if not each.startswith("genlm"))


def untested(tested: Mapping[str, Sequence[str]], newest: Mapping[str, str]) -> list[str]:
    """Return a line for each library whose newest release was not tested."""
    return [
        f"{name}: the newest release is {newest[name] or 'unknown'}, "
        f"the newest tested version {versions[-1]}"
        for name, versions in tested.items()
        if newest[name] not in versions
    ]


def excluded(
    projects: Sequence[Mapping[str, object]], installed: Mapping[str, str]
) -> list[str]:
    """Return a line for each requirement of a package whose bounds exclude what is installed.

    Args:
        projects: The `project` tables of the packages.
        installed: Versions by distribution.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions = {canonicalize_name(name): version for name, version in installed.items()}
    return [
        f"{project['name']} excludes {requirement.name} {version} ({requirement.specifier})"
        for project in projects
        for requirement in map(Requirement, _stated(project))
        if (version := versions.get(canonicalize_name(requirement.name)))
        and not requirement.specifier.contains(version, prereleases=True)
    ]


def report(
    kind: Kind,
    versions: Mapping[str, str],
    failures: Mapping[str, str],
    releases: Sequence[str],
) -> str:
    """Return the report: what failed, with which versions, and untested releases."""
    lines = [f"Made by `make {kind}`.", ""]
    lines += [f"- {line}" for line in releases]
    for suite, output in failures.items():
        lines += ["", f"## {suite}", "", "```text", output, "```"]
    lines += ["", "## Versions", ""]
    lines += [f"- {name} {version}" for name, version in versions.items()]
    return "\n".join(lines) + "\n"


def run(kind: Kind) -> int:
    """Build the environment, run the suites in it, write the report."""
    python = _environment(kind)
    return subprocess.run([python, __file__, "test", kind], check=False).returncode


def test(kind: Kind) -> int:
    """Run the suites in the environment of this interpreter, write the report."""
    failures = {}
    for suite in SUITES:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", suite, "-q", "-p", "no:cacheprovider"],
            cwd=ROOT, check=False, capture_output=True, text=True,
        )  # fmt: skip
        print(done.stdout[-2000:], done.stderr[-2000:])
        if done.returncode:
            named = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            failures[suite] = "\n".join(named[:100]) or done.stdout[-3000:]
    found = json.loads(_output(sys.executable, "-m", "genlm", "env", "--json"))
    releases = _releases(found) if kind == "newest" else []
    path = _report_path(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(kind, found["libraries"], failures, releases), "utf-8")
    print(path.read_text("utf-8"))
    return int(bool(failures or releases))


def _releases(found: Mapping[str, Any]) -> list[str]:
    """Return lines for releases that were not tested, or that bounds exclude."""
    tested = {
        name: versions
        for info in found["plugins"]
        for name, versions in info["tested"].items()
        if name not in found["libraries"]  # the suites ran with those
    }
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return [
        *untested(tested, {name: _newest(name) for name in tested}),
        *excluded(_projects(), installed),
    ]


def _environment(kind: Kind) -> str:
    folder = ROOT / f".venv-{kind}"
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    needed = requirements(kind, _projects())
    if kind == "oldest":
        needed = _lowest(needed, python)
    subprocess.run([*install, *needed], check=True)
    paths = [word for each in (*PACKAGES, *LISTED_ONLY) for word in ("-e", str(ROOT / each))]
    subprocess.run([*install, "--no-deps", "--no-build-isolation", *paths], check=True)
    return python


def _lowest(needed: Sequence[str], python: str) -> list[str]:
    """Return the lowest versions that satisfy requirements, as uv resolves them."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    resolve = [python, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*resolve, "--resolution", "lowest-direct", "--python", python, "-"],
        input="\n".join(needed), check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def _projects() -> list[Mapping[str, object]]:
    return [
        tomllib.loads((ROOT / package / "pyproject.toml").read_text("utf-8"))["project"]
        for package in PACKAGES
    ]


def _newest(distribution: str) -> str:
    """Return the newest release of a distribution, "" if the index shows none."""
    command = [sys.executable, "-m", "pip", "index", "versions", distribution]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = re.search(r"\(([^)]+)\)", done.stdout)
    return found[1].partition("+")[0] if found else ""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def issue(kind: Kind) -> int:
    """Open an issue with the report, or add the report to the open one, by GitHub's `gh`."""
    title = f"The {kind} releases fail"
    search = ("--state", "open", "--search", f'"{title}" in:title', "--json", "number")
    found = json.loads(_output("gh", "issue", "list", *search))
    body = ("--body-file", str(_report_path(kind)))
    if found:
        _output("gh", "issue", "comment", str(found[0]["number"]), *body)
    else:
        _output("gh", "issue", "create", "--title", title, *body)
    return 0


def _report_path(kind: Kind) -> Path:
    return ROOT / "build" / kind / "report.md"


if __name__ == "__main__":
    command, kind = sys.argv[1:]
    sys.exit({"run": run, "test": test, "issue": issue}[command](kind))
