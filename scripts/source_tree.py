"""The packages of this repository for programs that run from its sources without installation.

`environment` returns variables for a process in which `import genlm` finds the sources and
plugins are discovered as if they were installed: plugins are entry points, which a folder of
sources does not have, so a folder of metadata is written from the `pyproject.toml` files and
comes first on `PYTHONPATH`. Wheels of missing packages are unpacked next to it.

Run as a script, it prints that path:

    PYTHONPATH=$(python scripts/source_tree.py) python -m genlm plugins
"""

from __future__ import annotations

import os
import shutil
import tomllib
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["BUILD", "PEER", "ROOT", "WHEELS", "environment"]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
WHEELS = ROOT / ".cache" / "gpu-wheels"
PEER = "genlm_backend-0.3.1"
"""Its wheel is unpacked by itself: it has modules of the same names as this repository."""


def environment(wheels: Path = WHEELS, build: Path = BUILD) -> dict[str, str]:
    """Return the variables of this process with a `PYTHONPATH` of the sources.

    Args:
        wheels: Folder of wheels, whose packages come before the machine's own; need not
            exist.
        build: Folder that takes the metadata and the wheels; made anew.
    """
    packages = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
    metadata, unpacked = build / "metadata", build / "wheels"
    for folder in (metadata, unpacked, build / "peer"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for package in packages:
        _write_metadata(tomllib.loads((package / "pyproject.toml").read_text()), metadata)
    for wheel in sorted(wheels.glob("*.whl")):
        own = build / "peer" if wheel.name.startswith(PEER) else unpacked
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(own)
    folders = [metadata, *(package / "src" for package in packages)]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")]), str(unpacked)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def _write_metadata(settings: dict[str, Any], folder: Path) -> None:
    """Write what `importlib.metadata` reads of a distribution."""
    project = settings["project"]
    name, version = project["name"], project["version"]
    own = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    own.mkdir()
    requires = [f"Requires-Dist: {need}" for need in project["dependencies"]]
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *requires]
    (own / "METADATA").write_text("\n".join(lines) + "\n")
    sections = [
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())])
        for group, entries in project.get("entry-points", {}).items()
    ]
    (own / "entry_points.txt").write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    print(environment()["PYTHONPATH"])
