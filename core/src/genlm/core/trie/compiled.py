"""Gathering in machine code that numba compiles.

A reduction spends most of its time on reading values by index. Compiled code takes half as long
as numpy for this: indices are half as wide, and values are converted as they are read. The
other operations are those of `reductions`, so the results are equal bit for bit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import MissingRequirementError
from genlm.core.trie.reductions import Floats, Take

COMPILED_FROM_NODES = 200_000
"""Number of nodes from which on a trie is compiled by default: about 50,000 tokens.
Importing numba and compiling take a second or two, once per process. Compiled code saves about
0.07 ms per row at this size and 0.2 to 0.5 ms at 128,000 tokens, so compilation pays off after
about 20,000 and 5,000 rows."""


def use_compiled(compiled: bool | None, n_nodes: int) -> bool:
    """Decide whether a trie gathers in machine code, and compile the code if so."""
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


@cache
def compiled_take() -> Take:
    """Import numba and compile for float32 and float64, which takes about a second per process.

    The indices are uint32, and their bounds are not checked. numba could store the code in a
    file, which would save a tenth of the time.
    """
    import numba

    kinds = [numba.float32[::1], numba.float64[::1]]
    signatures = [
        numba.void(values, numba.uint32[::1], out) for values in kinds for out in kinds
    ]
    take: Take = numba.njit(signatures, nogil=True)(_take)
    return take


def _take(values: Floats, indices: npt.NDArray[np.uint32], out: Floats) -> None:
    for place in range(len(indices)):
        out[place] = values[indices[place]]
