"""Registers the token trie on numpy, under its name and the name in genlm-backend."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.core.plugins.spec import TESTED, BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the trie."""
    for name in ("numpy", "sequential"):
        yield BackendSpec(
            name=name,
            kind="trie",
            target="genlm.core.trie.trie:TokenCharacterTrie",
            summary="Token trie on the CPU; arrays only, no recursion",
            conformance="genlm.testing.core_targets:numpy_targets",
            tested=TESTED,
        )
