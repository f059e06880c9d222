"""genlm-control and genlm-bytes, from the package index, on this project's genlm-backend.

They are installed next to this project's distributions with pip's usual resolution, which
must keep this genlm-backend instead of the published one. Programs that use them compare their
results with unbatched forward passes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
OURS = ["core", "plugins/genlm-hf", "plugins/genlm-trie-cuda", "plugins/genlm-backend"]
CLIENTS = ["genlm-control==0.4.1", "genlm-bytes==0.2.0", "genlm-grammar==0.2.0"]


@pytest.fixture(scope="module")
def environment(build, new_environment):
    """This project's wheels, then the clients with their missing dependencies."""
    environment = new_environment(*(build(REPOSITORY / path) for path in OURS))
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
    options = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    options |= {"PYTHONWARNINGS": "default", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.run(*pip, "install", "--quiet", "--no-compile", *CLIENTS, **options)
    return environment


RUN = """
import json, runpy, sys
from importlib.metadata import version
import genlm.backend, genlm.bytes, genlm.control
where = {"ours": genlm.backend.__file__, "theirs": genlm.control.__file__}
print(json.dumps({"program": "", "version": version("genlm-backend"), **where}))
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print(json.dumps({"program": name}))
    runpy.run_path(f"{sys.argv[1]}/{name}.py", run_name="__main__")
"""


def run(environment, program: str, *arguments: str):
    """Run a program and return the objects that it printed."""
    printed = environment.run(
        environment.python,
        PROGRAMS / f"{program}.py",
        *arguments,
        PYTHONWARNINGS="default",
        HF_HUB_OFFLINE="1",
    )
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def printed(environment):
    """The objects that each program printed; one process runs all on one model."""
    names = ["constrained", "sets", "beam", "documented"]
    options = {"PYTHONWARNINGS": "default", "HF_HUB_OFFLINE": "1"}
    output = environment.run(environment.python, "-c", RUN, PROGRAMS, *names, **options)
    found: dict[str, list[dict]] = {}
    for each in map(json.loads, filter(re.compile("{").match, output.splitlines())):
        if "program" in each:
            of_program = found.setdefault(each.pop("program"), [])
        if each:
            of_program.append(each)
    return found


def test_pip_keeps_ours(environment, printed):
    [found] = printed[""]
    project = tomllib.loads((REPOSITORY / "core" / "pyproject.toml").read_text("utf-8"))
    assert found["version"] == project["project"]["version"]
    assert Path(found["ours"]).is_relative_to(environment.folder)
    assert Path(found["theirs"]).is_relative_to(environment.folder)


def test_constrained_smc_finds_the_exact_evidence(printed):
    exact, found = printed["constrained"]
    assert exact["spellings"] > 3
    assert len(found) == 5
    for name, result in found.items():
        assert set(result["texts"]) <= {" type", " value", " values", " key", " which"}, name
        assert result["log_evidence"] == pytest.approx(exact["exact"], abs=0.15), name


def test_set_samplers_weigh_tokens_by_their_probability(printed):
    [found] = printed["sets"]
    assert found["all"] == found["allowed"]
    assert 5 <= found["topk"] <= found["allowed"]
    assert found["eager"] >= 1


def test_a_byte_level_beam_has_the_sums_over_all_tokens(printed):
    [found] = printed["beam"]
    assert found["greedy"].startswith("The val")
    assert found["score"] < 0


def test_what_the_clients_document_runs(printed):
    [found] = printed["documented"]
    assert set(found["regex"]) <= {
        f" {word} of {article}"
        for word in ("type", "value", "values", "key")
        for article in ("a", "the")
    }
    assert sum(found["regex"].values()) == pytest.approx(1)
    assert {json.loads(text) for text in found["json"]} <= {True, False}
    assert sum(found["json"].values()) == pytest.approx(1)
    assert found["unit"] > 1
    assert found["byte"].isascii()


def test_the_scored_potential_has_the_sums_of_unbatched_rows(environment):
    [found] = run(environment, "potential", str(REPOSITORY / "examples"))
    assert found["tokens"] >= 10
    example = REPOSITORY / "examples" / "scored_potential.py"
    printed = environment.run(
        environment.python, example, PYTHONWARNINGS="default", HF_HUB_OFFLINE="1"
    )
    assert len([line for line in printed.splitlines() if " b'" in line or ' b"' in line]) == 10
