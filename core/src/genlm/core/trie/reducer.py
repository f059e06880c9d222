"""Which way a trie is reduced: in numpy, or partly in machine code once that pays.

Both give the same answers bit for bit, so the change from one to the other shows in
nothing but the time.
"""

from __future__ import annotations

import contextlib

from genlm.core.errors import MissingRequirementError
from genlm.core.trie.compiled import CompiledWorkspace, checked, compiled_take
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.reductions import Floats, Operation, Workspace, reduce_rows
from genlm.core.trie.segments import SegmentPlan

__all__ = ["WORTH_COMPILING", "Reducer"]

WORTH_COMPILING = 1 << 27
"""Weights after which numba is imported: 1,000 rows of 128,000, which take numpy about as
long as numba takes to import and to compile. The sum is never twice the shorter way's."""


class Reducer:
    """Reduces rows of weights over all nodes of one trie.

    Safe to use from several threads.

    Args:
        layout: Of the trie.
        compiled: Whether to use machine code; None starts to after `WORTH_COMPILING`
            weights, if numba can be imported.

    Raises:
        MissingRequirementError: `compiled` is True and numba cannot be imported.
    """

    def __init__(self, layout: TrieLayout, compiled: bool | None) -> None:
        self._layout = layout
        self._waits_for = WORTH_COMPILING if compiled is None else None
        self._way: tuple[SegmentPlan, type[Workspace]] | None = None
        if compiled:
            try:
                self._compile()
            except ImportError as error:
                raise MissingRequirementError(
                    "compiled=True", ["numba"], "pip install genlm-core[numba]"
                ) from error

    @property
    def compiled(self) -> bool:
        """Whether reductions use machine code by now."""
        return self._way is not None and self._way[1] is CompiledWorkspace

    @property
    def nbytes(self) -> int:
        """Memory of what is kept between reductions, in bytes."""
        return 0 if self._way is None else self._way[0].nbytes

    def reduce(self, operation: Operation, rows: Floats, out: Floats) -> None:
        """Reduce each row of weights; as `reduce_rows`."""
        waits_for = self._waits_for
        if waits_for is not None:
            left = waits_for - rows.size
            self._waits_for = left if left >= 0 else None
            if left < 0:
                with contextlib.suppress(ImportError):
                    self._compile()
        way = self._way
        if way is None:
            way = SegmentPlan.of(self._layout), Workspace
            if self._way is None:  # else another thread has compiled meanwhile
                self._way = way
        plan, workspace = way
        reduce_rows(plan, operation, rows, out, workspace)

    def _compile(self) -> None:
        compiled_take()
        self._way = checked(SegmentPlan.of(self._layout)), CompiledWorkspace
