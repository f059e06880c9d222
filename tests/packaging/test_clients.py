"""genlm-control and genlm-bytes, from the package index, on this project's genlm-backend.

They are installed next to this project's distributions with pip's usual resolution, which
must keep this genlm-backend instead of the published one. Programs that use them compare their
results with unbatched forward passes.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
EXAMPLE = REPOSITORY / "examples" / "scored_potential.py"
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
print(json.dumps({"program": ""}))
print(json.dumps({"version": version("genlm-backend"), **where}))
sys.path[:0] = sys.argv[1:3]
for path in sys.argv[3:]:
    print(json.dumps({"program": path}))
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def output(environment):
    """The lines that each program printed; one process runs all programs, most on one model."""
    names = ["constrained", "sets", "beam", "documented", "potential"]
    paths = [*(PROGRAMS / f"{name}.py" for name in names), EXAMPLE]
    options = {"PYTHONWARNINGS": "default", "HF_HUB_OFFLINE": "1"}
    command = [environment.python, "-c", RUN, PROGRAMS, EXAMPLE.parent, *paths]
    lines: dict[str, list[str]] = {}
    for line in environment.run(*command, **options).splitlines():
        if line.startswith('{"program": '):
            of_program = lines.setdefault(Path(json.loads(line).pop("program")).stem, [])
        else:
            of_program.append(line)
    return lines


@pytest.fixture(scope="module")
def printed(output):
    """The objects that each program printed."""
    return {
        name: [json.loads(line) for line in lines if line.startswith("{")]
        for name, lines in output.items()
    }


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


def test_the_scored_potential_has_the_sums_of_unbatched_rows(printed, output):
    [found] = printed["potential"]
    assert found["tokens"] >= 10
    lines = output["scored_potential"]
    assert len([line for line in lines if " b'" in line or ' b"' in line]) == 10
