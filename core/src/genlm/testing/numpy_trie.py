"""The target of the token trie that comes with the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genlm import get_trie
from genlm.testing.target import TrieTarget

__all__ = ["target"]


def _build(items: Sequence[Any]) -> Any:
    return get_trie("numpy")(items)


target = TrieTarget(model="numpy", build=_build)
