"""Workflows, hooks and issue templates are valid, pinned, and run nothing but `make`."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from documents import REPOSITORY
from programs import run_program

GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
TEMPLATES = sorted(
    set(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)
MAKEFILE = (REPOSITORY / "Makefile").read_text("utf-8")
TARGETS = set(" ".join(re.findall(r"^([a-z -]+):", MAKEFILE, re.MULTILINE)).split())
release = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "scripts" / "check_release.py")))


def loaded(path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_github_are_yaml(path):
    assert isinstance(loaded(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_only(path):
    commands = [step["run"] for step in steps(loaded(path)) if "run" in step]
    for command in commands:
        make, target = command.split()
        assert make == "make"
        assert target in TARGETS
    assert commands


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_to_a_commit_and_says_its_version(path):
    text = path.read_text("utf-8")
    used = [step["uses"] for step in steps(loaded(path)) if "uses" in step]
    assert len(re.findall(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\n", text)) == len(used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_says_otherwise(path):
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_packages_are_published_by_a_trusted_publisher_without_a_token():
    text = (GITHUB / "workflows" / "publish.yml").read_text("utf-8")
    job = yaml.safe_load(text)["jobs"]["publish"]
    assert job["permissions"] == {"id-token": "write"}
    assert job["environment"]["name"] == "pypi"
    assert "secrets." not in text
    assert "password" not in text


def test_everything_is_tested_before_it_lands():
    commands = {step.get("run") for path in WORKFLOWS for step in steps(loaded(path))}
    assert {"make check", "make test", "make surface", "make site", "make dist"} <= commands


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_asks_for_something(path):
    template = loaded(path)
    assert {"name", "description", "body"} <= set(template)
    kinds = {"input", "textarea", "dropdown", "checkboxes"}
    asked = [each for each in template["body"] if each["type"] in kinds]
    assert any(each.get("validations", {}).get("required") for each in asked)
    assert len({each["id"] for each in asked}) == len(asked)


def test_hooks_before_a_commit_are_targets_of_the_makefile():
    config = loaded(REPOSITORY / ".pre-commit-config.yaml")
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    for hook in hooks:
        assert hook["entry"].removeprefix("make ") in TARGETS
        assert hook["language"] == "system"
    assert len(hooks) == 2


@pytest.fixture
def repository(tmp_path):
    for folder in ("core", "plugins/genlm-one"):
        (tmp_path / folder).mkdir(parents=True)
        text = f'[project]\nname = "{folder}"\nversion = "1.2.0"\n'
        (tmp_path / folder / "pyproject.toml").write_text(text)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (today)\n")
    return tmp_path


def test_a_tag_with_everybodys_version_and_a_changelog_may_be_published(repository):
    assert list(release.reasons(repository, "v1.2.0")) == []


@pytest.mark.parametrize("tag", ["", "1.2.0", "v1.2", "v1.2.0-rc1", "latest"])
def test_what_is_no_tag_of_a_version_is_refused(repository, tag):
    [reason] = release.reasons(repository, tag)
    assert "is not a tag" in reason


def test_another_version_or_no_changelog_is_a_reason(repository):
    assert list(release.reasons(repository, "v1.2.1")) == [
        "core has version 1.2.0, not 1.2.1",
        "plugins/genlm-one has version 1.2.0, not 1.2.1",
        "CHANGELOG.md has no section '## 1.2.1'",
    ]


def test_clones_have_the_same_line_ends_on_all_platforms():
    """Git for Windows converts line ends by default, and packages are installed from clones."""
    path = "core/src/genlm/core/reference/default.txt"
    found = run_program("git", "check-attr", "eol", path, cwd=REPOSITORY).stdout
    assert found == f"{path}: eol: lf\n"
