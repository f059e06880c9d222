"""Registers the trie as `"cuda"` and under its published name `"parallel"`."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the trie without importing torch or Triton."""
    for name in ("cuda", "parallel"):
        yield BackendSpec(
            name=name,
            kind="trie",
            target="genlm_trie_cuda.trie:DeviceTrie",
            summary="Token trie on the GPU in Triton; torch or numpy elsewhere",
            requires=("torch",),
            conformance="genlm_trie_cuda.conformance:targets",
            tested={"torch": ("2.11.0", "2.13.0", "2.15.0")},
        )
