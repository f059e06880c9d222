"""Prefixes computed once: a tree of tokens over slots of keys and values.

For engines that run a model themselves. `PrefixRows` computes the next-token rows of batches
of sequences from a `PrefixTree` of bounded size, with eviction, pinning, adapters and
roll-back; the engine provides a `ForwardFn`, which runs its model over uncached tokens, or a
`ScoringForward`, with which texts are scored too. `prefill_stages`, `group_segments` and
`SegmentBatch` lay tokens out as padded forward passes with gathered pasts. `PrefixEngine` is
the base class of such engines; `choose_path` selects the fastest execution path that gives the
right rows.
"""

from genlm.core.text_scores import PieceScores, ScoredText, TextResult
from genlm.prefix.continuation import TableBatch
from genlm.prefix.engine import Adapters, PrefixEngine
from genlm.prefix.execution_path import (
    ExecutionPath,
    PathChoice,
    ScoringPath,
    SelfTest,
    ServeOptions,
    UnsupportedModelError,
    choose_path,
)
from genlm.prefix.forward import (
    ForwardCounts,
    ForwardFn,
    ForwardResult,
    Receive,
    ScoringForward,
    TableForward,
    TokenRun,
    TreeBatch,
)
from genlm.prefix.node import SCRATCH_SLOT, Node, Slots, slots_within
from genlm.prefix.padding import (
    BatchLimits,
    Segment,
    SegmentBatch,
    SegmentLimits,
    group_segments,
    places_of,
    plan_batches,
    prefill_stages,
)
from genlm.prefix.rows import PrefixRows
from genlm.prefix.tree import OutOfSlotsError, PrefixTree, Tokens

__all__ = [
    "SCRATCH_SLOT",
    "Adapters",
    "BatchLimits",
    "ExecutionPath",
    "ForwardCounts",
    "ForwardFn",
    "ForwardResult",
    "Node",
    "OutOfSlotsError",
    "PathChoice",
    "PieceScores",
    "PrefixEngine",
    "PrefixRows",
    "PrefixTree",
    "Receive",
    "ScoredText",
    "ScoringForward",
    "ScoringPath",
    "Segment",
    "SegmentBatch",
    "SegmentLimits",
    "SelfTest",
    "ServeOptions",
    "Slots",
    "TableBatch",
    "TableForward",
    "TextResult",
    "TokenRun",
    "Tokens",
    "TreeBatch",
    "UnsupportedModelError",
    "choose_path",
    "group_segments",
    "places_of",
    "plan_batches",
    "prefill_stages",
    "slots_within",
]
