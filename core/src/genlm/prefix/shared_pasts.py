"""Division of sequences into passes whose pasts begin with the same slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from genlm.core.queries.generations import Integers64
from genlm.prefix.node import Slots

# Reading this many slots costs more than attention in two parts.
_WORTH_SHARING = 4096

# Reading this many slots costs more than another pass over the weights.
_WORTH_A_PASS = 2**15

# Sequences belong to one group if they have this many more slots in common.
_LEAST_COMMON = 64


def groups_with_shared_pasts(
    paths: Sequence[Slots], pasts: Integers64, trunk: int = 0
) -> Iterator[tuple[Integers64, int]]:
    """Group sequences by the slots with which their pasts begin, so that few slots are read.

    Args:
        paths: Slots of each sequence after the trunk.
        pasts: Number of slots of each past, those of the trunk included, shape `(n,)`.
        trunk: Number of first slots that all paths have in common and do not include.

    Yields:
        Indices of the sequences of a group, ascending, and the number of first slots that its
        pasts have in common; 0 if they are not worth sharing. No sequence has a slot that
        follows the past of a sequence of a later group.
    """
    if paths:
        yield from _groups(paths, pasts - trunk, np.arange(len(paths)), trunk)


def _groups(
    paths: Sequence[Slots], pasts: Integers64, members: Integers64, trunk: int
) -> Iterator[tuple[Integers64, int]]:
    others, longest = len(members) - 1, int(pasts[members].max())
    if others * (trunk + longest) < _WORTH_SHARING:
        yield members, 0
        return
    common = _common(paths, pasts, members)
    groups, remaining = [], members
    if others * (longest - common) >= _WORTH_A_PASS:
        key = common + _LEAST_COMMON - 1
        keys = np.array([paths[i][key] if key < pasts[i] else -1 for i in members.tolist()])
        for slot in np.unique(keys[keys >= 0]):
            group = members[keys == slot]
            added = _common(paths, pasts, group) - common
            if (len(group) - 1) * added >= _WORTH_A_PASS:
                groups.append(group)
        remaining = np.setdiff1d(members, np.concatenate([members[:0], *groups]))
    if len(remaining):
        shared = trunk + common  # `common` is negative if a past ends within the trunk
        yield remaining, shared if (len(remaining) - 1) * shared >= _WORTH_SHARING else 0
    for group in groups:
        yield from _groups(paths, pasts, group, trunk)


def _common(paths: Sequence[Slots], pasts: Integers64, members: Integers64) -> int:
    """Return the number of first slots that the pasts of some sequences have in common."""
    first, count = paths[members[0]], int(pasts[members].min())
    for member in members[1:].tolist():
        if count <= 0:
            break
        differs = paths[member][:count] != first[:count]
        if differs.any():
            count = int(differs.argmax())
    return count
