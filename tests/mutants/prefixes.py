"""Faults of prefix caches that give a sequence the keys and values of another."""

from __future__ import annotations

import numpy as np

from .attention import CONTEXT, HIDDEN, Attention, State
from .cached_engine import CachedEngine, PrefixStore
from .mutant import engine_mutant


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class PositionOffByOne(CachedEngine):
    """Counts positions from 1 once something is in the cache."""

    def position(self, state):
        return max(0, len(state) - 1) if len(self.prefixes.states) else len(state)


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class LastKeyLost(CachedEngine):
    """Loses the keys and values of a cached prefix's last token."""

    class Store(PrefixStore):
        def found(self, state, length):
            kept = state.cut(length)
            return State(
                tuple(_last_zeroed(keys) for keys in kept.keys),
                tuple(_last_zeroed(values) for values in kept.values),
            )


def _last_zeroed(array):
    changed = array.copy()
    changed[-1] = 0
    return changed


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class NotCut(CachedEngine):
    """Uses all of a stored state for a prefix of the sequence it was stored for."""

    def computed(self, token_ids, adapter):
        state = self.prefixes.longest(adapter, token_ids)
        for token_id in token_ids[self.prefixes.length :]:
            state, hidden = self.model(adapter).extend(state, token_id, len(state) % 12)
        self.prefixes.length = 0
        return state, hidden

    class Store(PrefixStore):
        length = 0

        def found(self, state, length):
            self.length = length
            return state


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class PrefixesByLengthAndLastToken(CachedEngine):
    """Finds a prefix by its length and last token, as a careless block table does."""

    class Store(PrefixStore):
        def key(self, adapter, prefix):
            return adapter, (len(prefix), prefix[-1])


@engine_mutant(killed_by="near-misses-are-told-apart")
class PrefixesBySum(CachedEngine):
    """Finds a prefix by a hash that does not depend on the order of its tokens."""

    class Store(PrefixStore):
        def key(self, adapter, prefix):
            return adapter, (len(prefix), sum(prefix))


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class ForksShareATail(CachedEngine):
    """Appends to the buffers of a cached prefix in place, so that forks overwrite others."""

    def model(self, adapter):
        return InPlace(**vars(super().model(adapter)))


class InPlace(Attention):
    """Writes each new key and value into the buffer in which the prefix's are."""

    def extend(self, state, token_id, position):
        longer, hidden = super().extend(state, token_id, position)
        arrays = zip((*state.keys, *state.values), (*longer.keys, *longer.values), strict=True)
        written = [_appended(old, new) for old, new in arrays]
        return State(
            tuple(written[: len(state.keys)]), tuple(written[len(state.keys) :])
        ), hidden


def _appended(old, new):
    buffer = old.base if len(old) and old.base is not None else np.zeros((CONTEXT, HIDDEN))
    buffer[len(old)] = new[-1]
    return buffer[: len(new)]


@engine_mutant(killed_by="tight-budgets-change-nothing")
class EvictedMemoryReused(CachedEngine):
    """Frees the memory of an evicted prefix although longer prefixes still use it."""

    class Store(PrefixStore):
        def evict(self):
            _, state = self.states.popitem(last=False)
            for array in (*state.keys, *state.values):
                array[:1] = 0


@engine_mutant(killed_by="kept-prefixes-change-nothing")
class PinnedWithoutItsLastToken(CachedEngine):
    """Keeps a prefix with `pin_prefix` under its name but without its last token."""

    def cache_prefix(self, token_ids, adapter):
        prefix = tuple(token_ids)
        shorter = prefix[:-1] or prefix
        state = self.computed(shorter, adapter)[0]
        last, _ = self.model(adapter).extend(state, prefix[0], len(shorter) % 12)
        self.prefixes.pin(adapter, prefix, last)


@engine_mutant(killed_by="kept-prefixes-change-nothing")
class FreedInPlace(CachedEngine):
    """`clear_kv_cache` zeroes the kept keys but leaves the prefixes to be found."""

    def clear_prefix_cache(self):
        for state in (*self.prefixes.pinned.values(), *self.prefixes.states.values()):
            for keys in state.keys:
                keys[:] = 0
