"""The supported versions of SGLang, and how to install one.

SGLang's model runner is not a public interface; another version may compute wrong rows.
"""

from __future__ import annotations

TESTED = ("0.5.23",)
"""Tested versions, oldest first; see docs/sglang-engine.md."""

SUPPORTED = ">=0.5.23,<0.5.24"
"""Accepted versions."""

INSTALL = (
    f"on Linux pip install 'sglang{SUPPORTED}' (with a GPU), or "
    "python -m genlm_sgl.install_cpu (without)"
)


def check_version() -> str:
    """Return the installed version of SGLang; see `supported_version`."""
    # Not at the top of the module: `install_cpu` imports it before it installs genlm-core.
    from genlm.plugin import supported_version

    return supported_version("genlm-sgl", ("sglang",), SUPPORTED, INSTALL)
