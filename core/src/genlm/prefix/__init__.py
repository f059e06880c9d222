"""Prefixes computed once: a tree of tokens over slots of keys and values.

For engines that run a model themselves. `PrefixRows` answers batches of sequences from a
`PrefixTree` of bounded size, with eviction, pinning, adapters and roll-back; the engine
brings a function that runs its model over what is not in the tree yet (`Computing`). The
`segments` of a batch lay that out as padded forward passes with gathered pasts.
"""

from genlm.prefix.computing import Computed, Computing, TreeBatch
from genlm.prefix.node import Node
from genlm.prefix.padding import BatchLimits, plan_batches
from genlm.prefix.rows import PrefixRows
from genlm.prefix.segments import (
    Segment,
    SegmentBatch,
    SegmentLimits,
    group_segments,
    places_of,
    waves_of,
)
from genlm.prefix.slots import SCRATCH_SLOT, Slots, slots_within
from genlm.prefix.tree import OutOfSlotsError, PrefixTree

__all__ = [
    "SCRATCH_SLOT",
    "BatchLimits",
    "Computed",
    "Computing",
    "Node",
    "OutOfSlotsError",
    "PrefixRows",
    "PrefixTree",
    "Segment",
    "SegmentBatch",
    "SegmentLimits",
    "Slots",
    "TreeBatch",
    "group_segments",
    "places_of",
    "plan_batches",
    "slots_within",
    "waves_of",
]
