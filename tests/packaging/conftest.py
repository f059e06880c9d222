"""Fresh virtual environments, and the wheels that are installed into them.

Nothing is downloaded: wheels are built with the tools of the environment that runs the tests.
The fresh environments see its third-party packages, but not those of this project.
"""

import functools
import os
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions as distributions_in
from pathlib import Path

import pytest
from documents import REPOSITORY
from programs import run_program

# What a build frontend does, for several projects in one process.
BUILD = """
import importlib, os, sys
backend, hooks, folder, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    for hook in hooks.split(","):
        getattr(importlib.import_module(backend), hook)(folder)
"""

COMMAND = """#!{python}
import sys
from {module} import {attr}
sys.exit({attr}())
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path, **variables: str) -> str:
        """Run a command away from the repository and return what it printed."""
        outer = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("GENLM_", "PYTHON", "PIP_"))
        }
        inner = outer | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} | variables
        return run_program(*command, cwd=self.folder, env=inner).stdout

    def run_code(self, code: str, *arguments: str) -> str:
        return self.run(self.python, "-c", code, *arguments)

    @property
    def packages(self) -> Path:
        """The folder of installed packages."""
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return folder

    def install(self, *wheels: Path) -> None:
        """Unpack pure wheels and write their commands, as pip does in several seconds."""
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(self.packages)
        for found in distributions_in(path=[str(self.packages)]):
            for entry in found.entry_points.select(group="console_scripts"):
                command = self.folder / "bin" / entry.name
                values = {"module": entry.module, "attr": entry.attr}
                command.write_text(COMMAND.format(python=self.python, **values))
                command.chmod(0o755)

    def pip_install(self, *arguments: str | Path) -> str:
        """Run `pip install` without an index; what is missing is an error."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--no-cache-dir"]
        options = ["--quiet", "--no-index", "--no-compile", "--disable-pip-version-check"]
        settings = {"PYTHONWARNINGS": "default", "PIP_CONFIG_FILE": os.devnull}
        return self.run(*pip, "install", *options, *arguments, **settings)


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to every installed package that is not this project's."""
    folder = tmp_path_factory.mktemp("third_party")
    for library in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(library).iterdir():
            # Path files run only from a site-packages, so none of them comes along.
            if "genlm" not in entry.name and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="session")
def new_environment(
    tmp_path_factory: pytest.TempPathFactory, third_party: Path
) -> Callable[..., Environment]:
    """Make a virtual environment and install wheels into it."""

    def create(*wheels: Path) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        environment = Environment(folder)
        (environment.packages / "third_party.pth").write_text(f"{third_party}\n")
        environment.install(*wheels)
        return environment

    return create


def run_build(
    folder: Path, *projects: Path, hooks: str = "build_wheel", backend: str = "hatchling.build"
) -> None:
    run_program(sys.executable, "-c", BUILD, backend, hooks, folder, *projects)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of every distribution."""
    folder = tmp_path_factory.mktemp("dist")
    projects = REPOSITORY / "core", *sorted(REPOSITORY.glob("plugins/*"))
    run_build(folder, *projects, hooks="build_sdist,build_wheel")
    return folder


@pytest.fixture(scope="session")
def wheels_of_sdists(tmp_path_factory: pytest.TempPathFactory, distributions: Path) -> Path:
    """A folder with the wheel that each of these sdists gives."""
    folder, sources = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("sources")
    for path in distributions.glob("*.tar.gz"):
        with tarfile.open(path) as sdist:
            sdist.extractall(sources, filter="data")
    run_build(folder, *sources.iterdir())
    return folder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a project, normal or editable, once each, and return the wheel."""

    @functools.cache
    def build(
        project: Path, *, editable: bool = False, backend: str = "hatchling.build"
    ) -> Path:
        folder = tmp_path_factory.mktemp("wheel")
        hook = "build_editable" if editable else "build_wheel"
        run_build(folder, project, hooks=hook, backend=backend)
        (wheel,) = folder.glob("*.whl")
        return wheel

    return build
