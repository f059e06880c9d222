"""Gathering in machine code that numba compiles.

Most of a reduction's time goes into reading values by index. Compiled code takes half as
long as numpy for that: indices are half as wide, and values are converted as they are
read. Everything else is that of `reductions`, so the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import MissingRequirementError, VocabularyError
from genlm.core.trie.reductions import Floats, Workspace
from genlm.core.trie.segment_tree import Indices, SegmentTree

__all__ = ["CompiledWorkspace", "checked", "use_compiled"]

COMPILED_FROM_NODES = 200_000
"""Nodes from which a trie is compiled by default, those of a vocabulary of 50,000 tokens.
Importing numba and compiling take a second or two, once a process. Compiled code saves
about 0.07 ms a row at this size and 0.2 to 0.5 ms at 128,000 tokens, so that pays after
some 20,000 rows and 5,000 rows."""


def use_compiled(compiled: bool | None, n_nodes: int) -> bool:
    """Decide whether a trie gathers in machine code, and compile that if it does.

    Args:
        compiled: True or False decide; None compiles from `COMPILED_FROM_NODES` nodes on,
            if numba can be imported.
        n_nodes: Nodes of the trie.
    """
    if compiled is None and n_nodes < COMPILED_FROM_NODES:
        return False
    if compiled is not False:
        try:
            compiled_take()
        except ImportError as error:
            if compiled is None:
                return False
            raise MissingRequirementError(
                "compiled=True", ["numba"], "pip install genlm-core[numba]"
            ) from error
    return compiled is not False


class CompiledWorkspace(Workspace):
    """A `Workspace` that gathers in machine code."""

    def __init__(self, tree: SegmentTree, dtype: np.dtype[Any]) -> None:
        super().__init__(tree, dtype)
        self._compiled_take = compiled_take()

    def take(self, values: Floats, indices: Indices, out: Floats) -> None:
        """Write `values[indices]` into `out`, in its dtype."""
        self._compiled_take(values, indices, out)


@cache
def compiled_take() -> Callable[[Floats, Indices, Floats], None]:
    """Import numba and compile, for float32 and float64; about a second, once a process.

    numba could keep the code in a file; that would save a tenth of the time.
    """
    import numba

    kinds = [numba.float32[::1], numba.float64[::1]]
    signatures = [
        numba.void(values, numba.uint32[::1], out) for values in kinds for out in kinds
    ]
    take: Callable[[Floats, Indices, Floats], None]
    take = numba.njit(signatures, nogil=True)(_take)
    return take


def checked(tree: SegmentTree) -> SegmentTree:
    """Convert a segment tree's indices to uint32 after checking their bounds.

    numpy checks or wraps indices, compiled code does neither.
    """
    n, n_slots = len(tree.order), tree.n_slots
    return SegmentTree(
        order=_within(tree.order, n),
        source=_within(tree.source, n_slots - n),
        levels=tree.levels,
        pieces=tuple(_within(piece, n_slots) for piece in tree.pieces),
    )


def _within(indices: Indices, limit: int) -> Indices:
    if len(indices) and not 0 <= indices.min() <= indices.max() < limit:
        raise VocabularyError(
            f"the trie's arrays are damaged: an index is outside 0 to {limit - 1}; build the "
            f"trie anew"
        )
    return indices.astype(np.uint32)


def _take(values: Floats, indices: npt.NDArray[np.uint32], out: Floats) -> None:
    for place in range(len(indices)):
        out[place] = values[indices[place]]
