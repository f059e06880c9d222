"""Install SGLang for a machine without a GPU.

    pip install --no-deps genlm-sgl
    python -m genlm_sgl.install_cpu [OPTION OF PIP ...]

`--no-deps`, because on Linux genlm-sgl depends on `sglang`, whose requirements need CUDA. This
installs the other requirements of genlm-sgl with what SGLang imports on a CPU, then SGLang
without its requirements, into the current environment (2.5 GB; use a separate one).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from genlm_sgl.versions import NEWEST

__all__ = ["commands", "main", "others"]

REQUIREMENTS = Path(__file__).parent / "requirements-cpu.txt"


def others(requirements: Iterable[str]) -> list[str]:
    """Return the requirements of a distribution without SGLang."""
    named = (requirement.partition(";")[0].strip() for requirement in requirements)
    return [name for name in named if not name.startswith("sglang")]


def commands(pip_options: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands to run, in order."""
    pip = [sys.executable, "-m", "pip", "install", *pip_options]
    newest = ".".join(map(str, NEWEST))
    own = others(metadata.requires("genlm-sgl") or ())
    return [[*pip, *own, "-r", str(REQUIREMENTS)], [*pip, "--no-deps", f"sglang=={newest}"]]


def main() -> None:
    """Run the commands; exit with the status of one that fails."""
    for command in commands(sys.argv[1:]):
        status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own words
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
