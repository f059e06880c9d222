"""Gathering by machine code, which numba makes if it is installed.

Most of a reduction's time goes into reading values by index. Compiled, that takes half as
long as in numpy: indices are half as wide, and values are converted on the way. All else
stays with `reductions`, so the answers are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.errors import VocabularyError
from genlm.core.trie.reductions import Floats, Workspace
from genlm.core.trie.segments import Positions, SegmentPlan

__all__ = ["CompiledWorkspace", "checked", "compiled_take"]


class CompiledWorkspace(Workspace):
    """A `Workspace` that gathers in machine code.

    Args:
        plan: A plan that is `checked`.
        dtype: In which to compute.

    Raises:
        ImportError: numba is not installed or cannot be imported.
    """

    def __init__(self, plan: SegmentPlan, dtype: np.dtype[Any]) -> None:
        super().__init__(plan, dtype)
        self._compiled_take = compiled_take()

    def take(self, values: Floats, positions: Positions, out: Floats) -> None:
        """Write `values[positions]` into `out`, in its dtype."""
        self._compiled_take(values, positions, out)


@cache
def compiled_take() -> Callable[[Floats, Positions, Floats], None]:
    """Import numba and compile, for float32 and float64: about a second, once a process.

    Of that, code kept on disk would save a tenth; nothing is written there.

    Raises:
        ImportError: numba is not installed or cannot be imported.
    """
    import numba

    kinds = [numba.float32[::1], numba.float64[::1]]
    signatures = [
        numba.void(values, numba.uint32[::1], out) for values in kinds for out in kinds
    ]
    made: Callable[[Floats, Positions, Floats], None]
    made = numba.njit(signatures, nogil=True)(_take)
    return made


def checked(plan: SegmentPlan) -> SegmentPlan:
    """The plan with indices of 32 bits, none of which leads outside.

    numpy would notice or wrap such an index, machine code would not.

    Raises:
        VocabularyError: One does; the trie's arrays are damaged.
    """
    n, n_slots = len(plan.order), plan.n_slots
    return SegmentPlan(
        order=_within(plan.order, n),
        source=_within(plan.source, n_slots - n),
        halvings=plan.halvings,
        pieces=tuple(_within(piece, n_slots) for piece in plan.pieces),
    )


def _within(positions: Positions, limit: int) -> Positions:
    if len(positions) and not 0 <= positions.min() <= positions.max() < limit:
        raise VocabularyError(
            f"the trie's arrays are damaged: a position is outside 0 to {limit - 1}; build "
            f"the trie anew"
        )
    return positions.astype(np.uint32)


def _take(values: Floats, positions: npt.NDArray[np.uint32], out: Floats) -> None:
    for place in range(len(positions)):
        out[place] = values[positions[place]]
