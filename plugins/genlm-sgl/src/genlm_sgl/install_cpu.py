"""Install SGLang on a machine without a GPU.

    pip install --no-deps genlm-sgl
    python -m genlm_sgl.install_cpu [OPTION OF PIP ...]

`--no-deps` is needed because genlm-sgl depends on `sglang` on Linux, whose requirements need
CUDA. This program installs the other requirements of genlm-sgl, the packages that SGLang
imports on a CPU, and SGLang without its requirements into the current environment (2.5 GB; use
a separate environment).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from genlm_sgl.versions import TESTED

REQUIREMENTS = Path(__file__).parent / "requirements-cpu.txt"


def other_requirements(requirements: Iterable[str]) -> list[str]:
    """Return the requirements of a distribution without SGLang."""
    without_markers = (requirement.partition(";")[0].strip() for requirement in requirements)
    return [name for name in without_markers if not name.startswith("sglang")]


def commands(pip_options: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands of the installation in order."""
    pip = [sys.executable, "-m", "pip", "install", *pip_options]
    requirements = other_requirements(metadata.requires("genlm-sgl") or ())
    return [
        [*pip, *requirements, "-r", str(REQUIREMENTS)],
        [*pip, "--no-deps", f"sglang=={TESTED[-1]}"],
    ]


def main() -> None:
    """Run the commands; exit with the status of the first that fails."""
    for command in commands(sys.argv[1:]):
        status = subprocess.run(command, check=False).returncode  # noqa: S603 - no shell
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
