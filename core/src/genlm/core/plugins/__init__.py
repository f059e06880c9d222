"""Plugins: what they offer, how they are found, which one is chosen."""

from genlm.core.plugins.spec import API_VERSION, BackendSpec

__all__ = ["API_VERSION", "BackendSpec"]
