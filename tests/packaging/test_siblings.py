"""`genlm.control`, `.bytes` and `.backend` of other distributions work beside the core.

They are published without a `genlm/__init__.py`. Every mix of normal and editable
installations of the core and of three of them, built with setuptools and hatchling
in the layouts that people use.
"""

import itertools
import json
import textwrap
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core"
LAYOUTS = {
    "control": ("setuptools.build_meta", "."),
    "bytes": ("hatchling.build", "."),
    "backend": ("setuptools.build_meta", "src"),
}
PROJECT = """
    [build-system]
    requires = ["{tool}"]
    build-backend = "{backend}"

    [project]
    name = "genlm-{name}"
    version = "0.1"

    [tool.setuptools]
    packages = ["genlm.{name}"]
    package-dir = {{"" = "{layout}"}}

    [tool.hatch.build.targets.wheel]
    packages = ["genlm"]
"""
WHERE = """
import json
import genlm.{first}
import genlm, genlm.control.inner, genlm.bytes.inner, genlm.backend.inner
from genlm import BackendSpec, EmptySequenceError
from genlm.core.plugins.lookup import list_backends
print(json.dumps({{
    "core": genlm.__file__,
    "engines": [info.name for info in list_backends("engine")],
    **{{name: getattr(genlm, name).inner.__file__ for name in ("control", "bytes", "backend")}},
}}))
"""


@pytest.fixture(scope="session")
def siblings(tmp_path_factory) -> dict[str, Path]:
    projects = {}
    for name, (backend, layout) in LAYOUTS.items():
        project = projects[name] = tmp_path_factory.mktemp(f"project_{name}")
        package = project / layout / "genlm" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "inner.py").write_text("")
        text = PROJECT.format(
            name=name, backend=backend, tool=backend.partition(".")[0], layout=layout
        )
        (project / "pyproject.toml").write_text(textwrap.dedent(text))
    return projects


MIXES = list(itertools.product(["normal", "editable"], repeat=1 + len(LAYOUTS)))


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_core_and_siblings_are_all_importable(mix, siblings, build, new_environment):
    projects = {"core": CORE, **siblings}
    kinds = dict(zip(projects, mix, strict=True))
    environment = new_environment(
        *(
            build(
                project,
                editable=kinds[name] == "editable",
                backend=LAYOUTS.get(name, ["hatchling.build"])[0],
            )
            for name, project in projects.items()
        )
    )
    # Whoever is imported first decides which distribution makes the package `genlm`.
    for first in ("core", list(LAYOUTS)[MIXES.index(mix) % len(LAYOUTS)]):
        found = json.loads(environment.run_code(WHERE.format(first=first)))
        assert found["engines"] == ["reference"]
        for name, project in projects.items():
            home = project if kinds[name] == "editable" else environment.folder
            assert Path(found[name]).is_relative_to(home), (name, first, found)
