"""The targets of the token trie that comes with the core.

Weights are reduced in numpy, and where numba is installed partly in machine code too.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from genlm import get_trie
from genlm.testing.target import TrieTarget

__all__ = ["targets"]


def targets(folder: Path) -> Iterator[TrieTarget]:
    """Yield a target for each way that the machine has.

    Args:
        folder: Not needed.
    """
    del folder
    yield TrieTarget(model="numpy", build=functools.partial(_build, compiled=False))
    if importlib.util.find_spec("numba") is not None:
        yield TrieTarget(model="compiled", build=functools.partial(_build, compiled=True))


def _build(items: Sequence[Any], *, compiled: bool) -> Any:
    return get_trie("numpy")(items, compiled=compiled)
