"""What `genlm plugin new` writes is certified as it stands, built and installed as a wheel."""

from __future__ import annotations

import json

import pytest
from documents import REPOSITORY


@pytest.fixture(scope="module")
def project(build, new_environment, tmp_path_factory):
    """The project that the command of an installed core writes."""
    writing = new_environment(build(REPOSITORY / "core"))
    folder = tmp_path_factory.mktemp("new") / "genlm-mine"
    writing.run(writing.folder / "bin" / "genlm", "plugin", "new", "mine", "--folder", folder)
    return folder


@pytest.fixture(scope="module")
def environment(project, build, new_environment):
    return new_environment(build(REPOSITORY / "core"), build(project))


def test_it_is_certified(environment):
    command = [environment.folder / "bin" / "genlm", "check", "mine", "--no-skips", "--json"]
    report = json.loads(environment.run(*command))
    assert report["backend"] == "genlm-mine:mine"
    assert report["certified"], [o for o in report["outcomes"] if o["status"] == "failed"]


def test_its_tests_pass(environment, project):
    chosen = ["-k", "likeliest or rows-are-right"]  # the others ran above
    printed = environment.run(
        environment.python, "-m", "pytest", "-q", project / "tests", *chosen
    )
    assert "2 passed" in printed
