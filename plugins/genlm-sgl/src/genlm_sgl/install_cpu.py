"""Installs SGLang for a machine without a GPU: `python -m genlm_sgl.install_cpu`.

SGLang's requirements need CUDA. This installs what SGLang imports on a CPU, then SGLang
without its requirements, into the current environment (2.5 GB; use a separate one). Arguments
are passed to pip, such as `--extra-index-url https://download.pytorch.org/whl/cpu`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from genlm_sgl.versions import NEWEST

__all__ = ["commands", "main"]

REQUIREMENTS = Path(__file__).parent / "requirements-cpu.txt"


def commands(pip_options: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands to run, in order."""
    pip = [sys.executable, "-m", "pip", "install", *pip_options]
    newest = ".".join(map(str, NEWEST))
    return [[*pip, "-r", str(REQUIREMENTS)], [*pip, "--no-deps", f"sglang=={newest}"]]


def main() -> None:
    """Run the commands; exit with the status of one that fails."""
    for command in commands(sys.argv[1:]):
        status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own words
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
