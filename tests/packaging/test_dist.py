"""What `make dist` builds: complete, the same from the sdist, and installable as documented.

The environment sees the third-party packages of the one that runs the tests, so pip resolves
the requirements of the wheels against them and downloads nothing.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from documents import REPOSITORY
from packaging.requirements import Requirement

NAMES = {
    "core": "genlm_core",
    **{folder.name: folder.name.replace("-", "_") for folder in REPOSITORY.glob("plugins/*")},
}


@pytest.fixture(scope="module")
def environment(distributions, new_environment):
    """Without anything of this project until `pip install` of names, not of files."""
    environment = new_environment()
    environment.pip_install("--find-links", distributions, "genlm-core", "genlm-hf")
    return environment


def built(folder: Path, name: str, ending: str) -> Path:
    [found] = folder.glob(f"{NAMES[name]}-*{ending}")
    return found


def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_has_its_package_its_types_and_its_licence(distributions, name):
    wheel = files(built(distributions, name, ".whl"))
    assert [each for each in wheel if each.endswith("/py.typed")]
    assert [each for each in wheel if each.endswith("dist-info/licenses/LICENSE")]
    assert not [each for each in wheel if "test_" in each and each.endswith(".py")]
    [metadata] = [text for each, text in wheel.items() if each.endswith("/METADATA")]
    assert b"Project-URL: Documentation, https://" in metadata
    package = REPOSITORY / ("core" if name == "core" else f"plugins/{name}") / "src"
    sources = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {each for each in wheel if ".dist-info/" not in each} == sources


@pytest.mark.parametrize("name", NAMES)
def test_the_sdist_gives_the_same_wheel(distributions, wheels_of_sdists, name):
    again = files(built(wheels_of_sdists, name, ".whl"))
    assert again == files(built(distributions, name, ".whl"))


def test_the_installed_commands_work(environment):
    genlm = environment.folder / "bin" / "genlm"
    printed = environment.run(genlm, "plugins", "--json", PYTHONWARNINGS="default")
    engines = {each["name"]: each for each in json.loads(printed) if each["kind"] == "engine"}
    assert {name: each["status"] for name, each in engines.items()} == {
        "hf": "ok",
        "reference": "ok",
    }
    [wheel] = {each["version"] for each in engines.values()}
    assert environment.run(genlm, "--version").strip() == f"genlm {wheel}"


@pytest.mark.parametrize("backend", ["reference", "hf"])
def test_the_demonstration_runs(environment, backend):
    options = ["--particles", "5", "--max-tokens", "5", "--backend", backend]
    command = [environment.folder / "bin" / "genlm", "demo", *options]
    output = environment.run(*command, PYTHONWARNINGS="default", HF_HUB_OFFLINE="1")
    assert re.search(r"\n5 particles after \d steps, \d finished: log-evidence ", output)


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM and SGLang are for Linux")
@pytest.mark.parametrize(
    ("plugin", "engine"), [("genlm-vllm", "vllm"), ("genlm-sgl", "sglang")]
)
def test_a_serving_plugin_brings_its_engine_unless_it_is_told_not_to(
    environment, distributions, plugin, engine
):
    """The index would have it; here pip says that it wants it."""
    project = tomllib.loads((REPOSITORY / "plugins" / plugin / "pyproject.toml").read_text())
    requirements = map(Requirement, project["project"]["dependencies"])
    [torch] = [each for each in requirements if each.name == "torch"]
    if not torch.specifier.contains(version("torch"), prereleases=True):
        pytest.skip(f"pip says that it wants {torch} of {plugin}")
    wanted = ["--find-links", distributions, plugin]
    with pytest.raises(AssertionError, match=rf"No matching distribution found for {engine}\b"):
        environment.pip_install(*wanted)
    environment.pip_install("--no-deps", *wanted)
    printed = environment.run(environment.folder / "bin" / "genlm", "plugins", "--json")
    [info] = [each for each in json.loads(printed) if each["distribution"] == plugin]
    if info["status"] == "missing":  # else the engine's CPU build is here
        assert f"pip install '{engine}" in info["install"]
        assert f"python -m {plugin.replace('-', '_')}.install_cpu" in info["install"]
