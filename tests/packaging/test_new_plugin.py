"""What `genlm plugin new` writes is the plugin of the tutorial, and is certified as it stands.

It is built and installed as a wheel, in an environment without other plugins.
"""

from __future__ import annotations

import json
import math
import re

import pytest
from documents import REPOSITORY, blocks

TUTORIAL = "docs/plugins/writing-a-plugin.md"


@pytest.fixture(scope="module")
def project(build, new_environment, tmp_path_factory):
    """The project that the command of an installed core writes."""
    writing = new_environment(build(REPOSITORY / "core"))
    folder = tmp_path_factory.mktemp("new") / "genlm-toy"
    writing.run(writing.folder / "bin" / "genlm", "plugin", "new", "toy", "--folder", folder)
    return folder


@pytest.fixture(scope="module")
def environment(project, build, new_environment):
    return new_environment(build(REPOSITORY / "core"), build(project))


def test_the_installed_command_lists_the_plugin(environment):
    infos = json.loads(
        environment.run(environment.folder / "bin" / "genlm", "plugins", "--json")
    )
    engines = [info for info in infos if info["kind"] == "engine"]
    assert {info["provider"]: info["status"] for info in engines} == {
        "genlm-core:reference": "ok",
        "genlm-toy:toy": "ok",
    }


def test_a_model_of_the_plugin_answers_with_its_closed_form(environment):
    code = (
        "import genlm, json, sys\n"
        "assert genlm.__file__.startswith(sys.prefix)\n"
        "with genlm.load_model('any', backend='toy') as llm:\n"
        "    ids = llm.tokenizer.encode('banana')\n"
        "    print(json.dumps(llm.next_token_logprobs_sync(ids).tolist()))\n"
    )
    row = json.loads(environment.run_code(code))
    weights = [1.0] * 257
    for age, byte in enumerate(reversed(b"banana"), start=1):
        weights[byte] += 1 / age
    expected = [math.log(weight / sum(weights)) for weight in weights]
    assert len(row) == len(expected)
    assert max(abs(a - b) for a, b in zip(row, expected, strict=True)) <= 1e-5


def test_the_plugin_is_what_a_call_means_when_it_is_the_only_one(environment):
    assert environment.run_code("import genlm; print(genlm.find_backend().name)") == "toy\n"


def test_an_absent_plugin_is_named_with_its_command(environment):
    code = (
        "import genlm\n"
        "try: genlm.load_model('gpt2', backend='hf')\n"
        "except genlm.UnknownBackendError as error: print(error)"
    )
    assert environment.run_code(code) == (
        "no engine named 'hf'. Installed: reference, toy. "
        "It is provided by genlm-hf: pip install genlm-hf, "
        "or pip install ./plugins/genlm-hf in a clone\n"
    )


def test_it_is_certified(environment):
    command = [environment.folder / "bin" / "genlm", "check", "toy", "--no-skips", "--json"]
    report = json.loads(environment.run(*command))
    assert report["backend"] == "genlm-toy:toy"
    assert report["certified"], [o for o in report["outcomes"] if o["status"] == "failed"]
    assert report["counts"].keys() == {"passed", "not applicable"}


def test_its_tests_pass(environment, project):
    chosen = ["-k", "likeliest or rows-are-right"]  # the others ran above
    printed = environment.run(
        environment.python, "-m", "pytest", "-q", project / "tests", *chosen
    )
    assert "2 passed" in printed


@pytest.mark.parametrize("file", ["plugin.py", "engine.py", "conformance.py"])
def test_the_tutorial_shows_the_modules_of_the_plugin(project, file):
    source = (project / "src" / "genlm_toy" / file).read_text()
    assert source in blocks(TUTORIAL, "python")


def test_the_tutorial_shows_the_entry_point_of_the_plugin(project):
    (toml,) = blocks(TUTORIAL, "toml")
    assert toml in (project / "pyproject.toml").read_text()


def test_the_program_in_the_tutorial_prints_what_its_comment_says(environment):
    program = [block for block in blocks(TUTORIAL, "python") if "load_model" in block][-1]
    expected = re.findall(r"# (b'.*')$", program, re.MULTILINE)
    assert environment.run_code(program).splitlines() == expected != []
