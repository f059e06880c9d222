"""The example plugin works when installed, and the tutorial shows its source."""

import json
import math
import re

import pytest
from documents import REPOSITORY, blocks

TOY = REPOSITORY / "examples" / "genlm-toy"
README, TUTORIAL = "examples/genlm-toy/README.md", "docs/plugins/writing-a-plugin.md"


@pytest.fixture(scope="module")
def environment(build, new_environment):
    """A fresh environment with nothing of this project but the core and the toy."""
    return new_environment(build(REPOSITORY / "core"), build(TOY))


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
    weights = [1.0] * 256
    for age, byte in enumerate(reversed(b"banana"), start=1):
        weights[byte] += 1 / age
    expected = [math.log(weight / sum(weights)) for weight in weights]
    assert len(row) == len(expected)
    assert max(abs(a - b) for a, b in zip(row, expected, strict=True)) <= 1e-5


def test_the_demonstration_runs_on_the_plugin(environment):
    command = [environment.folder / "bin" / "genlm", "demo", "--backend", "toy"]
    output = environment.run(*command, "--particles", "5", "--max-tokens", "5")
    assert "5 particles after 5 steps" in output


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


def test_the_plugin_has_at_most_forty_lines_of_python_besides_its_oracle():
    sources = [path for path in TOY.glob("src/**/*.py") if path.name != "conformance.py"]
    assert sum(len(path.read_text().splitlines()) for path in sources) <= 40


def test_the_plugin_is_certified_as_a_third_party_would_do_it(environment):
    command = [environment.folder / "bin" / "genlm", "check", "toy", "--no-skips", "--json"]
    report = json.loads(environment.run(*command))
    assert report["backend"] == "genlm-toy:toy"
    assert report["certified"], [o for o in report["outcomes"] if o["status"] == "failed"]
    assert report["counts"].keys() == {"passed", "not applicable"}


def test_three_lines_in_the_plugins_own_tests_run_the_checks(environment):
    three_lines = blocks(TUTORIAL, "py")[0]
    folder = environment.folder / "tests"
    folder.mkdir()
    (folder / "test_toy.py").write_text(three_lines)
    chosen = ["-k", "rows-are-right"]  # the others ran above
    printed = environment.run(environment.python, "-m", "pytest", "-q", folder, *chosen)
    assert "1 passed" in printed


@pytest.mark.parametrize("file", ["plugin.py", "engine.py", "conformance.py"])
def test_the_tutorial_shows_the_modules_of_the_plugin(file):
    source = (TOY / "src" / "genlm_toy" / file).read_text()
    assert source in blocks(TUTORIAL, "python")


def test_the_tutorial_shows_the_entry_point_of_the_plugin():
    (toml,) = blocks(TUTORIAL, "toml")
    assert toml in (TOY / "pyproject.toml").read_text()


@pytest.mark.parametrize("document", [README, TUTORIAL], ids=["readme", "tutorial"])
def test_the_program_in_the_document_prints_what_its_comment_says(environment, document):
    program = [block for block in blocks(document, "python") if "load_model" in block][-1]
    expected = re.findall(r"# (b'.*')$", program, re.MULTILINE)
    assert environment.run_code(program).splitlines() == expected != []
