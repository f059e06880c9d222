"""Installs SGLang for a machine without a GPU: `python -m genlm_sgl.install_cpu`.

SGLang's own requirements are for CUDA. This installs what it imports on a CPU, then SGLang
alone, into the environment that runs it: 2.5 GB, best one of its own. Arguments are passed on
to pip, such as `--extra-index-url https://download.pytorch.org/whl/cpu`.
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
    """The commands that are run, one after the other."""
    pip = [sys.executable, "-m", "pip", "install", *pip_options]
    newest = ".".join(map(str, NEWEST))
    return [[*pip, "-r", str(REQUIREMENTS)], [*pip, "--no-deps", f"sglang=={newest}"]]


def main() -> None:
    """Run pip; exits with its status if it fails."""
    for command in commands(sys.argv[1:]):
        status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own words
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
