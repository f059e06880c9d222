"""Prefix cache of engines that run a model: a token tree over slots of keys and values.

`PrefixRows` computes the next-token rows of batches of sequences from a `PrefixTree` of limited
size, with eviction, pinning, adapters and roll-back. The engine provides a `ForwardFn`, which
runs its model over uncached tokens. `SegmentForward` arranges tokens in padded forward passes
with gathered pasts. `UncachedPath` computes all tokens of every sequence. `PrefixEngine` is the
base class of such engines; `choose_path` selects the fastest execution path with correct rows.
"""

from typing import TYPE_CHECKING

from genlm.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names that `lazy_exports` reads
    from genlm.core.queries.generations import Integers64 as Integers64
    from genlm.core.rows.text_scores import PieceScores as PieceScores
    from genlm.core.rows.text_scores import TextResult as TextResult
    from genlm.prefix.engine import ModelAdapters as ModelAdapters
    from genlm.prefix.engine import PrefixEngine as PrefixEngine
    from genlm.prefix.execution_path import PathChoice as PathChoice
    from genlm.prefix.execution_path import SelfTest as SelfTest
    from genlm.prefix.execution_path import ServeOptions as ServeOptions
    from genlm.prefix.execution_path import UnsupportedModelError as UnsupportedModelError
    from genlm.prefix.execution_path import choose_path as choose_path
    from genlm.prefix.forward import ForwardFn as ForwardFn
    from genlm.prefix.forward import ForwardResult as ForwardResult
    from genlm.prefix.forward import Segments as Segments
    from genlm.prefix.forward import TokenBatch as TokenBatch
    from genlm.prefix.node import SCRATCH_SLOT as SCRATCH_SLOT
    from genlm.prefix.node import Node as Node
    from genlm.prefix.node import Paths as Paths
    from genlm.prefix.node import Slots as Slots
    from genlm.prefix.node import slots_within as slots_within
    from genlm.prefix.padding import BatchLimits as BatchLimits
    from genlm.prefix.padding import SegmentLimits as SegmentLimits
    from genlm.prefix.padding import plan_batches as plan_batches
    from genlm.prefix.pass_layout import PassLayout as PassLayout
    from genlm.prefix.rows import PrefixRows as PrefixRows
    from genlm.prefix.segment_forward import PassLogits as PassLogits
    from genlm.prefix.segment_forward import SegmentForward as SegmentForward
    from genlm.prefix.tree import PrefixTree as PrefixTree
    from genlm.prefix.uncached import UncachedPath as UncachedPath
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
