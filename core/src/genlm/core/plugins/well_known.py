"""Backends that this project publishes, for messages when they are not installed."""

from __future__ import annotations

from genlm.core.plugins.spec import Kind

__all__ = ["WELL_KNOWN"]

WELL_KNOWN: dict[str, tuple[Kind, str]] = {
    "hf": ("engine", "genlm-hf"),
    "vllm": ("engine", "genlm-vllm"),
    "sgl": ("engine", "genlm-sgl"),
    "mlx": ("engine", "genlm-mlx"),
    "cuda": ("trie", "genlm-trie-cuda"),
    "parallel": ("trie", "genlm-trie-cuda"),
}
"""Name -> (kind, the distribution that provides it)."""
